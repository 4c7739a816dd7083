"""Trainers side by side: the same fits by the eager reference and by the fast trainers, on the device at hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from fedloom.bench.federation import device_of
from fedloom.engine.reference import Reference
from fedloom.engine.stacked import Stacked
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.objective import CrossEntropy
from fedloom.steps import SGD, Descent
from fedloom.types import Fit, Images, Plan

__all__ = ["WORKLOADS", "Workload", "engine", "fits_of"]

REPEATS = 2


@dataclass(frozen=True)
class Workload:
    """Clients of some widths, each with so many steps of one batch size."""

    name: str
    model: str
    shape: tuple[int, int, int]
    widths: tuple[float, ...]
    batch: int
    steps: int
    precision: str = "float32"


FIVE = (1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625)
WORKLOADS = (
    Workload("ResNet-18, five widths, batch 32, TF32", "resnet18", (3, 32, 32), FIVE, 32, 32, "tf32"),
    Workload("the same, bf16, channels last", "resnet18", (3, 32, 32), FIVE, 32, 32, "bf16"),
    Workload("the same, batch 10, TF32", "resnet18", (3, 32, 32), FIVE, 10, 100, "tf32"),
    Workload("ResNet-18 x 10, batch 32, TF32", "resnet18", (3, 32, 32), (1.0,) * 10, 32, 32, "tf32"),
    Workload("McMahan CNN x 10, batch 32", "cnn", (1, 28, 28), (1.0,) * 10, 32, 40),
    Workload("LeNet-5 x 10, batch 32", "lenet5", (1, 28, 28), (1.0,) * 10, 32, 40),
    Workload("LeNet-5 x 100, batch 10", "lenet5", (1, 28, 28), (1.0,) * 100, 10, 30),
)
ON_CPU = ("McMahan CNN x 10, batch 32", "LeNet-5 x 10, batch 32", "LeNet-5 x 100, batch 10")


def fits_of(work: Workload, device: str) -> tuple[Network, list[Fit]]:
    """The fits of a workload on random images."""
    make = partial(build, work.model, channels=work.shape[0], classes=10, size=work.shape[1])
    network = Network(make, work.shape, 10, device=device, half=work.precision == "bf16")
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (2000, *work.shape), dtype=torch.uint8, generator=generator).to(device)
    y = torch.randint(10, (2000,), generator=generator).to(device)
    half = torch.full((work.shape[0], 1, 1), 0.5, device=device)
    images, tensors = Images(x, y, half, half), network.initial(0)
    step, rate = Descent(CrossEntropy(), SGD(momentum=0.9, weight_decay=5e-4)), network.scalar(0.01)
    fits = []
    for width in work.widths:
        kept = {group: torch.arange(number) for group, number in network.units.kept(width).items()}
        rows = [(torch.randint(2000, (work.batch,), generator=generator),) for _ in range(work.steps)]
        plan = Plan(images, rows, [0] * work.steps, work.steps, 0)
        own = {
            name: tensor.clone()
            for name, tensor in (network.units.take(tensors, kept) if width < 1 else tensors).items()
        }
        fits.append(Fit(own, step, plan, {"lr": rate}))
    return network, fits


def _seconds(trainer: Any, fits: Sequence[Fit], device: str) -> float:
    times = []
    for number in range(REPEATS + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = perf_counter()
        answers = trainer.solve(fits)
        if device == "cuda":
            torch.cuda.synchronize()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        if number:  # the first warms up and captures
            times.append(perf_counter() - begin)
    return median(times)


def engine(device: str | None = None) -> list[dict[str, object]]:
    """Seconds for all steps of a workload, median of two after a warm-up; and the ratio to the reference."""
    device = device_of(device)
    rows: list[dict[str, object]] = []
    for work in WORKLOADS:
        if device == "cpu" and work.name not in ON_CPU:
            continue
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = work.precision != "float32"
        network, fits = fits_of(work, device)
        trainers: dict[str, Any] = {"reference": Reference(network)}
        if device == "cuda":
            from fedloom.engine.graphs import Graphs

            trainers["graphs"] = Graphs(network)
        else:
            trainers["stacked"] = Stacked(network)
        found = {name: _seconds(trainer, fits, device) for name, trainer in trainers.items()}
        fast = "graphs" if device == "cuda" else "stacked"
        sys.stderr.write(f"{work.name}: {found}\n")
        rows.append(
            {"workload": work.name, "steps": work.steps, "reference s": f"{found['reference']:.3f}",
             f"{fast} s": f"{found[fast]:.4f}", "ratio": f"{found['reference'] / found[fast]:.1f}"}
        )  # fmt: skip
    return rows
