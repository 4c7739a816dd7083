"""Whose model reaches whom? A star has a server; every other topology is a list of stages of edges.

Stages are among the members that are alive. Who is absent is skipped: in a ring its neighbours become neighbours, and
every other shape is drawn anew among those who are left. In a list of edges, the neighbours of an absent one are joined
in a circle, so that what was connected stays so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from math import isqrt
from typing import Annotated, Literal, Protocol

import numpy as np
from annotated_types import Ge

from fedloom.errors import InputError, oxford
from fedloom.registry import register

__all__ = ["Chain", "Edge", "Graph", "Ring", "Stages", "Star", "Topology", "metropolis"]

log = logging.getLogger("fedloom.topology")
Edge = tuple[int, int]  # from, to; an edge from a client to itself lets it work alone
Stages = list[list[Edge]]


class Topology(Protocol):
    """A rule for who hands its model to whom."""

    def stages(self, round: int, members: Sequence[int]) -> Stages:
        """The edges of each stage of a round among the members that are alive; none for a star."""


@register("topology", "star")
@dataclass(frozen=True)
class Star:
    """A server in the middle."""

    def stages(self, round: int, members: Sequence[int]) -> Stages:
        """The server's round does it all."""
        return []


@register("topology", "ring")
@dataclass(frozen=True)
class Ring:
    """Everybody hands its model to the next in the ring, K - 1 times a round."""

    direction: Annotated[Literal["alternating", "clockwise", "counter"], "which way models travel"] = "alternating"

    def stages(self, round: int, members: Sequence[int]) -> Stages:
        """Clockwise in the first round; alternating turns around each round."""
        count = len(members)
        clockwise = self.direction == "clockwise" or (self.direction == "alternating" and round % 2 == 0)
        step = 1 if clockwise else -1
        edges = [(members[place], members[(place + step) % count]) for place in range(count)]
        return [edges for _ in range(count - 1)]


@register("topology", "chain")
@dataclass(frozen=True)
class Chain:
    """One after the other around the ring: each hands its model to the next, who waits for it; K stages a round."""

    def stages(self, round: int, members: Sequence[int]) -> Stages:
        """The last one's model reaches the first in the next round; in the very first round there is none yet."""
        if not members:
            return []
        first = members[0] if round == 0 else members[-1]
        return [[edge] for edge in pairwise([first, *members])]


@register("topology", "graph")
@dataclass(frozen=True)
class Graph:
    """Neighbours in an undirected graph exchange models, all at once, once a round."""

    shape: Annotated[Literal["complete", "ring", "torus", "regular", "edges"], "the graph"] = "complete"
    degree: Annotated[int, Ge(2), "regular: neighbours of each, as far as the number of members allows"] = 3
    edges: Annotated[tuple[tuple[int, int], ...], "edges: pairs of client numbers"] = ()
    seed: Annotated[int, Ge(0), "regular: which of the random graphs"] = 0

    def __post_init__(self) -> None:
        if bool(self.edges) != (self.shape == "edges"):
            raise InputError(f"topology.edges goes with shape 'edges'; got shape '{self.shape}' and {self.edges!r}")
        if any(one == two or min(one, two) < 0 for one, two in self.edges):
            raise InputError(f"topology.edges are pairs of different client numbers; got {self.edges!r}")

    def fits(self, clients: int) -> None:
        """Refuse edges to clients that do not exist: raise InputError with the reason. Warn of a graph in parts."""
        if beyond := sorted({client for edge in self.edges for client in edge if client >= clients}):
            named = ", ".join(map(str, beyond))
            raise InputError(
                f"topology.edges name client(s) {named}, but {clients} clients are numbered 0 to {clients - 1}"
            )
        if self.edges:
            _warn(self.edges, clients)

    def stages(self, round: int, members: Sequence[int]) -> Stages:
        """One stage, every edge in both ways."""
        pairs = self._listed(members) if self.edges else self._drawn(members)
        both = {edge for one, two in pairs if one != two for edge in ((one, two), (two, one))}
        alone = {(member, member) for member in members} - {(member, member) for member, _ in both}
        return [sorted(both | alone)] if members else []

    def _drawn(self, members: Sequence[int]) -> Iterable[Edge]:
        count = len(members)
        circle = [(place, (place + 1) % count) for place in range(count)]
        match self.shape:
            case "complete":
                places: Iterable[Edge] = combinations(range(count), 2)
            case "torus":
                places = _torus(count)
            case "regular":
                places = _regular(count, self.degree, np.random.default_rng([self.seed, count]))
            case _:
                places = circle
        return [(members[one], members[two]) for one, two in places]

    def _listed(self, members: Sequence[int]) -> Iterable[Edge]:
        near: dict[int, set[int]] = {member: set() for member in members}
        for one, two in self.edges:
            near.setdefault(one, set()).add(two)
            near.setdefault(two, set()).add(one)
        for absent in sorted(near.keys() - set(members)):
            around = sorted(near.pop(absent))
            for one in around:
                near[one].discard(absent)
            for one, two in zip(around, around[1:] + around[:1], strict=True):
                if one != two:
                    near[one].add(two)
                    near[two].add(one)
        return [(one, two) for one, others in near.items() for two in others]


def _torus(count: int) -> list[Edge]:
    """A grid, as square as the number allows, whose ends meet; a prime number makes a ring."""
    high = next((side for side in range(isqrt(count), 0, -1) if count % side == 0), 1)
    wide = count // high
    across = [(place, place // wide * wide + (place + 1) % wide) for place in range(count)]
    return across + [(place, (place + wide) % count) for place in range(count)]


def _regular(count: int, degree: int, generator: np.random.Generator) -> list[Edge]:
    """A random connected graph of equal degrees: ends of edges paired at random until nothing is doubled or apart."""
    degree = min(degree, count - 1)
    degree -= degree * count % 2  # an odd number of ends cannot be paired
    if degree == count - 1:
        return list(combinations(range(count), 2))
    for _ in range(10_000):
        left = np.repeat(np.arange(count), degree)
        edges: set[Edge] = set()
        while len(left):
            pairs = generator.permutation(left).reshape(-1, 2)
            rest = []
            for one, two in np.sort(pairs, axis=1).tolist():
                if one == two or (one, two) in edges:
                    rest += [one, two]
                else:
                    edges.add((one, two))
            if len(rest) == len(left):
                break  # what is left can only be doubled
            left = np.array(rest, dtype=np.int64)
        if not len(left) and _connected(count, edges):
            return sorted(edges)
    raise InputError(f"no connected graph of {count} members with {degree} neighbours each was found")


def _connected(count: int, edges: Iterable[Edge]) -> bool:
    return len(_parts(count, edges)) == 1


def _parts(count: int, edges: Iterable[Edge]) -> list[list[int]]:
    """The members that reach each other.

    >>> _parts(5, [(0, 3), (3, 1)])
    [[0, 1, 3], [2], [4]]
    """
    names = list(range(count))
    for one, two in edges:
        old, new = names[one], names[two]
        names = [new if name == old else name for name in names]
    return [[place for place, name in enumerate(names) if name == part] for part in dict.fromkeys(names)]


@cache  # a run looks at its graph more than once, and a comparison for every cell
def _warn(edges: tuple[Edge, ...], clients: int) -> None:
    """Say once who is alone, and which groups never hear of each other."""
    parts = _parts(clients, edges)
    alone = [part[0] for part in parts if len(part) == 1]
    groups = [part for part in parts if len(part) > 1]
    if alone:
        log.warning("topology.edges: client(s) %s have no neighbour and train alone", oxford(alone, "and"))
    if len(groups) > 1:
        listed = "; ".join(oxford(group, "and") for group in groups)
        log.warning("topology.edges: these %d groups never hear of each other: %s", len(groups), listed)


def metropolis(own: int, degrees: dict[int, int]) -> dict[int, float]:
    """How much each neighbour's model counts: 1 / (1 + the larger of both degrees); the rest is one's own.

    Xiao and Boyd, Fast linear iterations for distributed averaging, 2004. Rows and columns add up to 1, so the mean
    over all members stays.

    >>> metropolis(1, {4: 3})
    {4: 0.25}
    """
    return {neighbour: 1 / (1 + max(own, degree)) for neighbour, degree in degrees.items()}
