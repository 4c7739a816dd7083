"""Who trains? A selection looks at the fleet's columns and names the clients of a round, in ascending order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from annotated_types import Gt, Le

from fedloom.fleet.fleet import Fleet
from fedloom.registry import register
from fedloom.types import Server

__all__ = ["All", "First", "Select", "Uniform", "cohort_size"]


class Select(Protocol):
    """A rule that names the clients of a round."""

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """Distinct client numbers, ascending."""


def cohort_size(fraction: float, fleet: Fleet) -> int:
    """A share of the whole fleet, at least one, at most those available."""
    return min(max(1, round(fraction * fleet.size)), len(fleet.available))


@register("select", "all")
@dataclass(frozen=True)
class All:
    """Every client that is available."""

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """All of them."""
        return fleet.available


@register("select", "first")
@dataclass(frozen=True)
class First:
    """One client, always the first that is available."""

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """The lowest number."""
        return fleet.available[:1]


@register("select", "uniform")
@dataclass(frozen=True)
class Uniform:
    """A share of the clients, drawn at random without replacement."""

    fraction: Annotated[float, Gt(0), Le(1), "share of the clients that train in a round"] = 1.0

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """A fresh draw each round."""
        generator = fleet.generator("select")
        chosen = generator.choice(fleet.available, cohort_size(self.fraction, fleet), replace=False)
        return np.sort(chosen)
