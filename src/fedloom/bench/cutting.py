"""What cutting and merging cost of a round: HeteroFL as in papers/submodels-3-4.toml, on generated pictures.

`take` cuts the sub-models of one round's ten clients out of ResNet-18, `put` adds their reports up, `result` makes the
next global model. Each is timed on its own, with the device idle before and after, so on a GPU, where in a real round
they overlap with other work, their share is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fedloom.bench.federation import PICTURES, device_of, seconds_of_rounds
from fedloom.runs.grid import merged
from fedloom.runs.papers import read_paper
from fedloom.runs.study import resolve
from fedloom.runs.world import World, world_of
from fedloom.types import Report, Server

__all__ = ["cutting"]

PAPER, COLUMN, ROW = "submodels-3-4", "CIFAR-10", "HeteroFL"
REPEATS = 5


def cutting(
    device: str | None = None, rounds: int = 3, samples: int | None = None, width: float = 1.0
) -> list[dict[str, object]]:
    """Milliseconds of the three and their share of a whole round, the median of some.

    `samples` a client are 500 as in the paper, on a CPU 40: fewer make a round shorter and the share larger.
    """
    where = device_of(device)
    study = _sections(where, samples or (500 if where == "cuda" else 40), width)
    whole = median(seconds_of_rounds(study, rounds, where))
    settings = {"engine": {**study["engine"], "device": where}}
    parts = _parts(world_of(resolve(merged(study, settings)).model_dump_json()))
    rows: list[dict[str, object]] = [
        {"part": name, "ms": 1000 * seconds, "share of a round": seconds / whole} for name, seconds in parts.items()
    ]
    together = sum(parts.values())
    rows.append({"part": "cutting and merging", "ms": 1000 * together, "share of a round": together / whole})
    return [*rows, {"part": "whole round", "ms": 1000 * whole, "share of a round": 1.0}]


def _sections(device: str, samples: int, width: float) -> dict[str, Any]:
    paper = read_paper(PAPER).paper
    data = {"name": PICTURES, "count": 100 * samples, "channels": 3, "size": 32, "public": 0}
    changes = {
        "data": data,
        "model": {"name": "resnet18", "width": width},
        "partition": {"name": "iid"},
        "engine": {"precision": "tf32" if device == "cuda" else "float32"},
    }
    return merged(paper.study, paper.columns[COLUMN], paper.rows[ROW], changes)


def _parts(world: World) -> dict[str, float]:
    method, network = world.method, world.network
    server = Server(0, network.initial(0), network)
    # As the fleet mixes capacities, so does a cohort: ten devices spread evenly over the sorted fleet.
    capacities = np.sort(world.columns["capacity"])[np.linspace(0, world.study.fleet.clients - 1, 10).astype(int)]
    generator, units = torch.Generator().manual_seed(0), network.units
    wheres = [method.cut(network, float(capacity), 0, generator) for capacity in capacities]
    sent = method.sent(server)

    def take() -> list[dict[str, torch.Tensor]]:
        return [units.take(sent, where) if where else sent for where in wheres]

    reports = [
        Report(tensors, 20.0, where=where, classes=torch.arange(10))
        for tensors, where in zip(take(), wheres, strict=True)
    ]

    def put() -> Any:
        joined = method.merge.begin(server)
        for report in reports:
            joined.add(report)
        return joined

    joined = put()
    works: dict[str, Callable[[], object]] = {"take": take, "put": put, "result": joined.result}
    return {name: median(_timed(work, network.device) for _ in range(REPEATS)) for name, work in works.items()}


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - begin
