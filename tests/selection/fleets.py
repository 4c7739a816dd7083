"""A fleet of hand-made columns, nobody of whom ever works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedloom.bench.select import RULES
from fedloom.fleet.fleet import Fleet
from fedloom.types import Named, Server, Train

__all__ = ["NAN", "RULES", "anyone", "choices", "fleet_of", "near"]

NAN = np.nan


def fleet_of(samples, round: int = 5, seed: int = 0, **columns) -> Fleet:
    """Clients with these columns at the start of a round; those with a known time were asked in the round before."""
    sizes = np.asarray(samples, np.float64)
    begun = {"samples": sizes, "capacity": np.ones(len(sizes))}
    names = Named("test"), Named("test")
    fleet = Fleet(begun, None, None, None, seed=seed, names=names)  # type: ignore[arg-type]
    for name, values in columns.items():
        fleet.columns[name] = np.asarray(values, fleet.columns[name].dtype)
    if "asked" not in columns:
        fleet.columns["asked"] = np.where(np.isnan(fleet.columns["seconds"]), -1, round - 1)
    fleet.begin(round, Train())
    return fleet


def anyone(fleet: Fleet) -> Any:
    """A server that only has a memory."""
    return SimpleNamespace(memory={})


def choices(rule: Callable[[Fleet, Server], np.ndarray], fleet: Fleet, draws: int) -> Counter[int]:
    """How often each client is chosen over fresh draws with the same columns."""
    counts: Counter[int] = Counter()
    for seed in range(draws):
        fleet.seed = seed
        counts.update(rule(fleet, anyone(fleet)).tolist())
    return counts


def near(count: int, chance: float, draws: int) -> bool:
    """Within four standard deviations of what chance gives."""
    return abs(count / draws - chance) < 4 * np.sqrt(chance * (1 - chance) / draws) + 1e-12
