"""Selections: how long it takes to choose 1,000 of 1,000,000 clients."""

from __future__ import annotations

from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from fedloom.fleet.fleet import Fleet
from fedloom.registry import find
from fedloom.types import Named, Server, Train

__all__ = ["fleet_of", "select"]

CLIENTS, COHORT, REPEATS, ROUND = 1_000_000, 1_000, 5, 50
RULES: dict[str, dict[str, Any]] = {
    "uniform": {}, "by_size": {}, "round_robin": {}, "chfl": {}, "powd": {"ask": False}, "oort": {}, "tifl": {},
}  # fmt: skip


def fleet_of(clients: int, unseen: float) -> Fleet:
    """A fleet in the middle of a run: random columns, a share of the clients never asked."""
    random, nobody, names = np.random.default_rng(0), Any, (Named(""), Named(""))
    begun = {"samples": random.integers(1, 500, clients).astype(np.float64), "capacity": np.ones(clients)}
    fleet = Fleet(begun, nobody, nobody, nobody, seed=0, names=names)  # type: ignore[arg-type]
    last = random.integers(0, ROUND, clients)
    fleet.columns["round"], fleet.columns["asked"] = last, last.copy()
    for name in ("loss", "squared_loss", "seconds"):
        fleet.columns[name] = random.random(clients) + 0.1
        fleet.columns[name][: int(unseen * clients)] = np.nan
    fleet.columns["asked"][: int(unseen * clients)] = -1
    fleet.begin(ROUND, Train())
    return fleet


def select() -> list[dict[str, object]]:
    """Milliseconds a choice, median of five after a warm-up; a third of the clients never seen (TiFL: none).

    On a busy machine the time of the process itself says more than the clock on the wall.
    """
    rows: list[dict[str, object]] = []
    for name, settings in RULES.items():
        rule = find("select", name)(fraction=COHORT / CLIENTS, **settings)
        fleet, times = fleet_of(CLIENTS, 0.0 if name == "tifl" else 1 / 3), []
        server = Server(ROUND, {}, Any)  # type: ignore[arg-type]
        for _ in range(REPEATS + 1):
            begin = np.array([process_time(), perf_counter()])
            chosen = rule(fleet, server)
            times.append(1000 * (np.array([process_time(), perf_counter()]) - begin))
        own, wall = (median(each[clock] for each in times[1:]) for clock in (0, 1))
        rows.append({"selection": name, "chosen": len(chosen), "of": CLIENTS, "ms of the process": f"{own:.1f}",
                     "ms on the wall": f"{wall:.1f}"})  # fmt: skip
    return rows
