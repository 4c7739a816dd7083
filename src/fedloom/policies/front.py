"""Which of many are best when there are several goals? NSGA-II over plain arrays: Deb et al., IEEE TEC 2002.

Sorting into fronts, crowding, crossover and mutation are pymoo's (extra `search`). This module keeps them free of
state, so that a population is arrays that can be stored. All goals are minimised; variables lie between 0 and 1.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from fedloom.errors import InputError

__all__ = ["children", "nondominated", "require", "survivors"]

Vector = npt.NDArray[np.float64]


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


def children(parents: Vector, goals: Vector, count: int, generator: np.random.Generator) -> Vector:
    """New variables from a tournament among the parents, simulated binary crossover and polynomial mutation."""
    from pymoo.algorithms.moo.nsga2 import PM, SBX, RankAndCrowding, binary_tournament
    from pymoo.core.mating import Mating
    from pymoo.core.population import Population
    from pymoo.core.problem import Problem
    from pymoo.operators.selection.tournament import TournamentSelection

    problem = Problem(n_var=parents.shape[1], n_obj=goals.shape[1], xl=0.0, xu=1.0)
    pool = Population.new("X", parents, "F", goals)
    pool = RankAndCrowding().do(problem, pool, n_survive=len(pool), random_state=generator)
    mating = Mating(TournamentSelection(func_comp=binary_tournament), SBX(eta=15, prob=0.9), PM(eta=20))
    rules = SimpleNamespace(tournament_type="comp_by_dom_and_crowding", random_state=generator)
    found = mating.do(problem, pool, count, random_state=generator, algorithm=rules).get("X")
    drawn: Vector = np.asarray(found, np.float64).reshape(-1, parents.shape[1])
    if len(drawn) < count:  # all others were copies of somebody
        drawn = np.concatenate([drawn, generator.random((count - len(drawn), parents.shape[1]))])
    return np.clip(drawn, 0.0, 1.0)
