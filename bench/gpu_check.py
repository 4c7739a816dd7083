"""On a GPU: fast trainers agree with the reference, for every method.

python bench/gpu_check.py [METHOD ...]

Methods are checked side by side, each in a process of its own: what takes time is the host, not the card.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import numpy as np
import torch

import fedloom
from fedloom import wire
from fedloom.errors import FedloomError
from fedloom.registry import entries, find

METHODS = sorted(entries("method"))
# No batch norm: of biases before it, whose gradients are rounding alone, Adam makes steps of full size.
MIXED = {"model.name": ["lenet5", "mlp"]}
# Nine fits one after another: norms over a few images divide by next to nothing, and that amplifies a last bit.
PLAIN = {"model.name": "lenet5"}
OWN = {
    "fedrkd": PLAIN,
    "metafed": PLAIN,
    "depthfl": {"model.name": "cnn4", "model.widths": [8, 12, 16]},
    "fedea": {"method.population": 3, "method.rounds_each": 2},
    "fednas": {"model.name": "darts_search"},
    "fedmd": MIXED | {"method.public_epochs": 2, "method.private_epochs": 2},
    "dsfl": MIXED,
    "feddf": MIXED | {"method.steps": 20},
}


def final(method: str, trainer: str, out: Path, **more: object) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    settings = {
        "engine.trainer": trainer, "engine.precision": "float64", "engine.device": "cuda", "engine.name": "local",
        "train.momentum": 0.9, "train.weight_decay": 1e-3, "train.clip": 1.0, "train.batch_size": 16, "train.epochs": 2,
        "fleet.weak": "ignore", "data.public": 60, "model.name": "lenet5_bn", **OWN.get(method, {}), **more,
    }  # fmt: skip
    # Clients of unequal size, but not so unequal that stacking them would be waste.
    result = fedloom.run(method, set=settings, rounds=2, clients=10, out=out, partition="dirichlet:5.0", fleet="low")
    kept = sorted((result.folder / "checkpoints").glob("*.safetensors"))
    # The clock's columns are measured. All else is compared: what the server remembers, and what clients keep.
    found = [
        pair for path in kept if not path.name.startswith("fleet") for pair in tensors_in(wire.load(path), path.stem)
    ]
    return dict(found), result.summary


def tensors_in(tree: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors and arrays of a tree, by their place."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        yield path, torch.as_tensor(tree)
    elif isinstance(tree, dict | list | tuple):
        for key, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_in(each, f"{path}/{key}")
    elif is_dataclass(tree):
        yield from tensors_in(vars(tree), path)


class Said(logging.Handler):
    """What the engine's log said: a step that could not be captured, for one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def agree(method: str) -> str:
    """Gaps to the reference; and whether `graphs` really did what a method says it can do (its `trainers`)."""
    said = Said()
    logging.getLogger("fedloom.engine").addHandler(said)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            truth, summary = final(method, "reference", Path(folder))
            line = f"{method:12s} reference acc {summary['local_accuracy']:.4f} fail {summary['failures']}"
            for trainer in ("graphs", "stacked"):
                said.lines.clear()
                begin = time.perf_counter()
                found, other = final(method, trainer, Path(folder))
                gap = max(float((truth[n].double() - found[n].double()).abs().max()) for n in truth if truth[n].numel())
                line += f" | {trainer} gap {gap:.1e} fail {other['failures']} {time.perf_counter() - begin:.1f}s"
                if trainer == "graphs" and bool(said.lines) == ("graphs" in find("method", method).trainers):
                    line += f" CLAIM IS WRONG: {find('method', method).trainers}, log: {said.lines[:1]}"
    except (RuntimeError, ValueError, KeyError, FedloomError) as error:
        line = f"{method} broke: {type(error).__name__}: {str(error)[:300]}"
    return line


if __name__ == "__main__":
    cores = min(12, os.cpu_count() or 1)
    # Spawned: a process that was forked cannot use the card.
    with multiprocessing.get_context("spawn").Pool(cores, maxtasksperchild=1) as pool:
        for line in pool.imap(agree, sys.argv[1:] or METHODS):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
