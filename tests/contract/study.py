"""The small study that every method is put through, and how to look into its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom import wire
from fedloom.runs import start
from fedloom.runs.result import Result
from fedloom.runs.study import resolve

AFRESH = ("serial",)  # every round makes a new model, which need not be better than the last
BASE: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "limit": 400, "public": 40, "validation": 0.2},
    "model": {"name": "lenet5_bn"},
    "partition": {"name": "dirichlet:1.0"},
    "fleet": {"clients": 5, "name": "low", "weak": "ignore"},
    "train": {"batch_size": 16, "momentum": 0.5},
    "run": {"rounds": 3, "seed": 3, "checkpoint_every": 2},
}
# Where models may differ they do.
MIXED = {"name": ["lenet5_bn", {"name": "mlp", "hidden": [16]}]}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "fedmd": {"model": MIXED, "method": {"samples": 30, "public_epochs": 2, "private_epochs": 2}},
    "dsfl": {"model": MIXED, "method": {"samples": 30}},
    # Biases before batch norm have gradients that are zero but for rounding, of which the server's Adam makes steps.
    "feddf": {"model": {"name": ["lenet5", {"name": "mlp", "hidden": [16]}]}, "method": {"steps": 5}},
    # A teacher in evaluation mode whose batch norm saw few batches says large things; at a small rate that is harmless.
    "metafed": {"method": {"warm_up": 2}, "train": {"batch_size": 16, "lr": 0.02}},
    "serial": {"train": {"batch_size": 16, "lr": 0.02}},
    "fedala": {"start": {"most": 3}},
    "fedcpn": {"start": {"most": 3}},
    "depthfl": {"model": {"name": "cnn4", "widths": [4, 6, 8]}},
    "fedea": {"method": {"population": 3, "rounds_each": 3}},
    "fednas": {"model": {"name": "darts_search", "width": 4, "cells": 2, "nodes": 1}, "fleet": {"clients": 5}},
}


def study_of(method: str, out: Path, on: str = "local", **changes: dict[str, Any]):
    sections = {name: dict(values) for name, values in BASE.items()}
    for name, values in OWN.get(method, {}).items():
        sections[name] = dict(values)
    for name, values in changes.items():
        sections.setdefault(name, {}).update(values)
    sections["method"] = {"name": method, **sections.get("method", {})}
    sections.setdefault("engine", {}).update({"name": on, "workers": 2} | changes.get("engine", {}))
    sections["run"]["out"] = str(out)
    return resolve(sections)


def run(method: str, out: Path, on: str = "local", watch=None, **changes: dict[str, Any]) -> Result:
    return start.start(study_of(method, out, on, **changes), watch)


def final(result: Result) -> dict[str, Tensor]:
    """All that a run ended with: the server's tensors and memory, the fleet's columns, the clients' states, flat."""
    found: dict[str, Tensor] = {}
    for path in sorted((result.folder / "checkpoints").iterdir()):
        tree = wire.load(path)
        tensors: list[Tensor] = []
        wire._flatten(tree, lambda tensor, name, kept=tensors: kept.append((name, tensor)) or len(kept))
        found |= {
            f"{path.stem.split('-')[0]}{path.stem.split('-')[1] if 'client' in path.stem else ''}/{n}": t
            for n, t in tensors
        }
    return found


def rows(result: Result) -> list[dict[str, Any]]:
    """The metrics without what no two runs have in common."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in result.rows("metrics")]


MEASURED = {"seconds", "peak_memory_bytes"}


def ledger(result: Result) -> list[dict[str, Any]]:
    """The rows of tasks without what is measured."""
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in result.rows("clients")]
