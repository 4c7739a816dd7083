"""Whose model reaches whom? A star has a server; every other topology is a list of stages of edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from fedloom.registry import register

__all__ = ["Edge", "Ring", "Stages", "Star", "Topology"]

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
