"""Trainers side by side: the same fits by the eager reference and by the fast trainers, on the device at hand."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch

from fedloom.bench.federation import device_of
from fedloom.engine.reference import Reference
from fedloom.engine.stacked import Stacked
from fedloom.engine.taped import Taped
from fedloom.engine.worker import Trainer
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD
from fedloom.steps import Descent
from fedloom.types import Fit, Images, Plan

__all__ = ["WORKLOADS", "Workload", "engine", "fits_of"]

REPEATS = 3


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
    Workload("LeNet-5 with batch norm x 10, batch 32", "lenet5_bn", (1, 28, 28), (1.0,) * 10, 32, 40),
    Workload("perceptron x 100, 8 x 8, batch 10", "mlp", (1, 8, 8), (1.0,) * 100, 10, 30),
)
ON_CPU = tuple(work.name for work in WORKLOADS[4:])


def fits_of(work: Workload, device: str) -> tuple[Network, list[Fit]]:
    """The fits of a workload on random images."""
    make = partial(build, work.model, channels=work.shape[0], classes=10, size=work.shape[1])
    network = Network(make, work.shape, 10, device=device, half=work.precision == "bf16", layout="auto")
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


def _seconds(trainers: Mapping[str, Trainer], fits: Sequence[Fit], device: str) -> dict[str, float]:
    """The median of each, in turn; the first of each warms up, records and captures."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(REPEATS + 1):
        for name, trainer in trainers.items():
            begin = perf_counter()
            answers = trainer.solve(fits)
            if device == "cuda":
                torch.cuda.synchronize()
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            if number:
                times[name].append(perf_counter() - begin)
    return {name: median(each) for name, each in times.items()}


def engine(device: str | None = None) -> list[dict[str, object]]:
    """Seconds for all steps of a workload after a warm-up, and how many times as fast as the reference; on a CPU with
    one thread, as every client trains there."""
    device, threads = device_of(device), torch.get_num_threads()
    rows: list[dict[str, object]] = []
    for work in WORKLOADS:
        if device == "cpu" and work.name not in ON_CPU:
            continue
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = work.precision != "float32"
        network, fits = fits_of(work, device)
        trainers: dict[str, Trainer] = {"reference": Reference(network)}
        if device == "cuda":
            from fedloom.engine.graphs import Graphs

            trainers["graphs"] = Graphs(network)
        else:
            torch.set_num_threads(1)
            trainers |= {"taped": Taped(network), "stacked": Stacked(network)}
        found = _seconds(trainers, fits, device)
        sys.stderr.write(f"{work.name}: {found}\n")
        row: dict[str, object] = {"workload": work.name, "steps": work.steps}
        for name, seconds in found.items():
            row[f"{name} s"] = f"{seconds:.4f}"
            if name != "reference":
                row[f"{name} ratio"] = f"{found['reference'] / seconds:.2f}"
        rows.append(row)
    torch.set_num_threads(threads)
    return rows
