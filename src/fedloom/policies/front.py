"""Which of many are best when there are several goals? NSGA-II over plain arrays: Deb et al., IEEE TEC 2002.

Sorting into fronts, crowding, crossover and mutation are pymoo's (extra `search`). This module keeps them free of
state, so that a population is arrays that can be stored. All goals are minimised; variables lie between 0 and 1.
How children vary is Zhu and Jin's way: strings of bits beside real numbers.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.errors import InputError

__all__ = ["children", "nondominated", "require", "spread", "survivors"]

Vector = npt.NDArray[np.float64]
CROSSED = 0.9  # of the pairs of parents
CHANGED = 0.1  # of the bits, and of the real numbers
TRIES = 100  # to make children that are no copies


def require() -> None:
    """Say what to install where pymoo is missing."""
    if find_spec("pymoo") is None:
        raise InputError("fedea needs pymoo, which is not installed; pip install 'fedloom[search]'")


def survivors(goals: Vector, count: int) -> list[int]:
    """The numbers of the `count` best: by front, within the last front by crowding."""
    from pymoo.algorithms.moo.nsga2 import RankAndCrowding
    from pymoo.core.population import Population
    from pymoo.core.problem import Problem

    everyone = Population.new("X", np.arange(len(goals), dtype=float)[:, None], "F", goals)
    kept = RankAndCrowding().do(
        Problem(n_var=1, n_obj=goals.shape[1]), everyone, n_survive=count, random_state=np.random.default_rng(0)
    )
    return sorted(int(x) for x in kept.get("X")[:, 0])


def nondominated(goals: Vector) -> list[int]:
    """The numbers of those that nobody beats in all goals.

    >>> nondominated(np.array([[0.1, 5.0], [0.2, 4.0], [0.2, 6.0]]))
    [0, 1]
    """
    beaten = [bool(((goals <= own).all(axis=1) & (goals < own).any(axis=1)).any()) for own in goals]
    return [number for number, lost in enumerate(beaten) if not lost]


def spread(count: int, variables: int, generator: np.random.Generator) -> Vector:
    """First variables, one of each in every `count`-th of its range: few drawn freely leave parts of it untried."""
    part = np.stack([generator.permutation(count) for _ in range(variables)], axis=1)
    return (part + generator.random((count, variables))) / count


def children(parents: Vector, goals: Vector, count: int, generator: np.random.Generator, coded: int = 0) -> Vector:
    """New variables from a tournament among the parents; none is a copy of a parent or of another.

    The first `coded` variables are one string of eight bits each: crossover at one point, bits flipped. The others are
    real numbers: simulated binary crossover, polynomial mutation.
    """
    from pymoo.algorithms.moo.nsga2 import PM, SBX, RankAndCrowding, binary_tournament
    from pymoo.core.population import Population
    from pymoo.core.problem import Problem
    from pymoo.operators.crossover.pntx import SinglePointCrossover
    from pymoo.operators.mutation.bitflip import BitflipMutation
    from pymoo.operators.selection.tournament import TournamentSelection

    def mated(part: Vector, crossover: Any, mutation: Any) -> Any:
        problem = Problem(n_var=part.shape[1], n_obj=goals.shape[1], xl=0.0, xu=1.0)
        crossed = crossover.do(problem, Population.new("X", part), parents=pairs, random_state=generator)
        return mutation.do(problem, crossed, random_state=generator).get("X")

    pool = Population.new("X", parents, "F", goals)
    whole = Problem(n_var=parents.shape[1], n_obj=goals.shape[1], xl=0.0, xu=1.0)
    pool = RankAndCrowding().do(whole, pool, n_survive=len(pool), random_state=generator)
    rules = SimpleNamespace(tournament_type="comp_by_dom_and_crowding", random_state=generator)
    select, known = TournamentSelection(func_comp=binary_tournament), np.array(pool.get("X"), np.float64)
    bytes_ = np.rint(255 * known[:, :coded]).astype(np.uint8)
    bits, known[:, :coded] = np.unpackbits(bytes_, axis=1).astype(bool), bytes_ / 255
    drawn = np.empty((0, parents.shape[1]))
    for _ in range(TRIES):
        pairs = select.do(whole, pool, (count + 1) // 2, 2, to_pop=False, random_state=generator, algorithm=rules)
        parts = []
        if coded:
            made = mated(bits, SinglePointCrossover(prob=CROSSED), BitflipMutation(prob=1.0, prob_var=CHANGED))
            parts.append(np.packbits(made.astype(bool), axis=1) / 255)
        if coded < parents.shape[1]:
            real = SBX(eta=2, prob=CROSSED, prob_var=1.0), PM(eta=20, prob=1.0, prob_var=CHANGED)
            parts.append(np.clip(mated(known[:, coded:], *real), 0.0, 1.0))
        for child in np.concatenate(parts, axis=1):
            if len(drawn) < count and not (np.concatenate([known, drawn]) == child).all(axis=1).any():
                drawn = np.concatenate([drawn, child[None]])
    # Where all are copies, as of parents that are all alike, chance has to help.
    return np.concatenate([drawn, generator.random((count - len(drawn), parents.shape[1]))])
