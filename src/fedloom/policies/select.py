"""Who trains? A selection looks at the fleet's columns and names the clients of a round, in ascending order.

What it may look at is what a server honestly knows: how much data a client has, and what its last reports said and
how long they took (missing until the first one). Rules with a paper of their own: chfl.py, powd.py, oort.py, tifl.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt
from annotated_types import Gt, Le

from fedloom.fleet.fleet import Fleet
from fedloom.registry import register
from fedloom.types import Server

__all__ = [
    "All",
    "BySize",
    "First",
    "Fraction",
    "RoundRobin",
    "Select",
    "Uniform",
    "cohort_size",
    "drawn",
    "importance",
    "members",
    "rounded",
    "without",
]

Fraction = Annotated[float, Gt(0), Le(1), "share of the clients that train in a round"]
Floats = npt.NDArray[np.float64]


def members(fleet: Fleet) -> np.ndarray:
    """Clients whose data the model learns from: all but those that are left out or only look on."""
    return np.flatnonzero(~fleet.columns.get("excluded", np.zeros(fleet.size, bool)))


class Select(Protocol):
    """A rule that names the clients of a round."""

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """Distinct client numbers, ascending."""


def cohort_size(fraction: float, fleet: Fleet) -> int:
    """A share of the whole fleet, at least one, at most those available."""
    return min(max(1, round(fraction * fleet.size)), len(fleet.available))


def rounded(number: float, generator: np.random.Generator) -> int:
    """A number of clients that need not be whole: rounded up as often as its fraction says, else down."""
    return int(number) + int(generator.random() < number % 1)


def drawn(generator: np.random.Generator, clients: np.ndarray, count: int, logits: Floats) -> np.ndarray:
    """So many of the clients, one after the other without replacement, each in proportion to exp(logit).

    In the order of the draw. As a race: whoever arrives after an exponential time of rate exp(logit) is drawn in just
    this way, and a million clients cost one pass.
    """
    arrival = np.log(generator.standard_exponential(len(clients))) - logits
    first = np.argpartition(arrival, count - 1)[:count] if count < len(clients) else np.arange(len(clients))
    order: np.ndarray = clients[first[np.argsort(arrival[first], kind="stable")]]
    return order


def without(clients: np.ndarray, taken: np.ndarray, size: int) -> np.ndarray:
    """Those of the clients, of a fleet of some size, that are not taken."""
    free = np.ones(size, bool)
    free[taken] = False
    left: np.ndarray = clients[free[clients]]
    return left


def by_data(fleet: Fleet, clients: np.ndarray) -> Floats:
    """Logits of a draw in proportion to the clients' training samples."""
    with np.errstate(divide="ignore"):  # whoever has none comes last
        logits: Floats = np.log(fleet.columns["samples"][clients])
    return logits


def importance(fleet: Fleet) -> Floats:
    """|B| sqrt(mean squared loss) of every client's samples in its last first epoch; NaN before the first report."""
    found: Floats = fleet.columns["samples"] * np.sqrt(fleet.columns["squared_loss"])
    return found


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

    fraction: Fraction = 1.0

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """A fresh draw each round."""
        generator = fleet.generator("select")
        chosen = generator.choice(fleet.available, cohort_size(self.fraction, fleet), replace=False)
        return np.sort(chosen)


@register("select", "by_size")
@dataclass(frozen=True)
class BySize:
    """A share of the clients, drawn without replacement in proportion to their training samples."""

    fraction: Fraction = 1.0

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """Those with more data more often."""
        size, here = cohort_size(self.fraction, fleet), fleet.available
        return np.sort(drawn(fleet.generator("select"), here, size, by_data(fleet, here)))


@register("select", "round_robin")
@dataclass(frozen=True)
class RoundRobin:
    """Those who have waited longest since they were last asked; of equals, the lowest numbers."""

    fraction: Fraction = 1.0

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """In turn, whoever is away missing it."""
        waited = np.argsort(fleet.columns["asked"][fleet.available], kind="stable")
        return np.sort(fleet.available[waited[: cohort_size(self.fraction, fleet)]])
