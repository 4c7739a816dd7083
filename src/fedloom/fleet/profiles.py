"""Named fleets: what the devices of a federation are like, as columns.

Every device has a capacity (share of the model's units it can train), a compute speed (multiply-accumulates a second),
a bandwidth down and up (bytes a second), a chance to be available in a round and a chance to drop out of one. The
figures of `uniform` stand for a mid-range phone on a good line: 10 GMAC/s, 100 Mbit/s down, 20 Mbit/s up.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le, Lt

from fedloom.errors import InputError
from fedloom.registry import register

__all__ = ["high", "low", "mixed", "uniform"]

Columns = dict[str, npt.NDArray[np.float64]]
Speed = Annotated[float, Gt(0), "multiply-accumulates a second"]
Bandwidth = Annotated[float, Gt(0), "bytes a second"]
Chance = Annotated[float, Gt(0), Le(1), "chance that a device is available in a round"]
Dropout = Annotated[float, Ge(0), Lt(1), "chance that a device that was asked never reports"]
GMAC, DOWN, UP = 1e10, 1.25e7, 2.5e6
FIFTHS = (0.5, 0.25, 0.125, 0.0625)


def _columns(clients: int, capacity: npt.ArrayLike, **columns: npt.ArrayLike) -> Columns:
    return {name: np.broadcast_to(np.asarray(column, np.float64), clients).copy() for name, column in
            {"capacity": capacity, **columns}.items()}  # fmt: skip


def _shared(capacities: tuple[float, ...], clients: int) -> npt.NDArray[np.float64]:
    """Equal blocks of clients, one a capacity."""
    if not capacities:
        raise InputError("fleet.capacities needs at least one capacity in (0, 1]; got none")
    for capacity in capacities:
        if not 0 < capacity <= 1:
            raise InputError(f"fleet.capacities must be in (0, 1]; got {capacity}")
    return np.asarray(capacities)[np.arange(clients) * len(capacities) // clients]


@register("fleet", "uniform")
def uniform(
    clients: int,
    generator: np.random.Generator,
    speed: Speed = GMAC,
    down: Bandwidth = DOWN,
    up: Bandwidth = UP,
    availability: Chance = 1.0,
    dropout: Dropout = 0.0,
) -> Columns:
    """Every device can train the whole model; all are equally fast."""
    return _columns(clients, 1.0, speed=speed, down=down, up=up, availability=availability, dropout=dropout)


@register("fleet", "low")
def low(clients: int, generator: np.random.Generator, availability: Chance = 1.0, dropout: Dropout = 0.0) -> Columns:
    """A fifth each of capacity 0.99, 1/2, 1/4, 1/8 and 1/16, slower in proportion: nobody holds the whole model."""
    capacity = _shared((0.99, *FIFTHS), clients)
    return _columns(
        clients, capacity, speed=GMAC * capacity, down=DOWN, up=UP, availability=availability, dropout=dropout
    )


@register("fleet", "high")
def high(clients: int, generator: np.random.Generator, availability: Chance = 1.0, dropout: Dropout = 0.0) -> Columns:
    """A fifth each of capacity 1, 1/2, 1/4, 1/8 and 1/16, slower in proportion."""
    capacity = _shared((1.0, *FIFTHS), clients)
    return _columns(
        clients, capacity, speed=GMAC * capacity, down=DOWN, up=UP, availability=availability, dropout=dropout
    )


@register("fleet", "mixed")
def mixed(
    clients: int,
    generator: np.random.Generator,
    capacities: Annotated[tuple[float, ...], "capacities, an equal share of the clients each"] = (1.0,),
    speed: Speed = GMAC,
    down: Bandwidth = DOWN,
    up: Bandwidth = UP,
    spread: Annotated[float, Ge(1), "fastest over slowest device, log-uniform, for speed and for bandwidth"] = 10.0,
    availability: Chance = 1.0,
    dropout: Dropout = 0.0,
) -> Columns:
    """Speeds and bandwidths drawn log-uniformly over a factor, independent of the capacity."""
    drawn = {name: top * spread ** -generator.random(clients) for name, top in
             (("speed", speed), ("down", down), ("up", up))}  # fmt: skip
    return _columns(clients, _shared(capacities, clients), **drawn, availability=availability, dropout=dropout)
