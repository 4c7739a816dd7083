"""Named fleets: what the devices of a federation are like, as columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedloom.registry import register

__all__ = ["high", "low", "uniform"]

Columns = dict[str, npt.NDArray[np.float64]]
FIFTHS = (0.5, 0.25, 0.125, 0.0625)


def _fifths(clients: int, largest: float) -> Columns:
    capacities = np.array((largest, *FIFTHS))
    return {"capacity": capacities[np.arange(clients) * len(capacities) // clients]}


@register("fleet", "uniform")
def uniform(clients: int, generator: np.random.Generator) -> Columns:
    """Every device can train the whole model."""
    return {"capacity": np.ones(clients)}


@register("fleet", "low")
def low(clients: int, generator: np.random.Generator) -> Columns:
    """A fifth each of capacity 0.99, 1/2, 1/4, 1/8 and 1/16: nobody can train the whole model."""
    return _fifths(clients, 0.99)


@register("fleet", "high")
def high(clients: int, generator: np.random.Generator) -> Columns:
    """A fifth each of capacity 1, 1/2, 1/4, 1/8 and 1/16."""
    return _fifths(clients, 1.0)
