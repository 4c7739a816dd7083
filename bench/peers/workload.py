"""The workloads that fedloom and its peers run: same data, same model, same batches a round, same rounds.

FedAvg with plain SGD on generated pictures. Needs torch and numpy only, so that it runs in every peer's environment.
A script calls `begin` first, `Clock.lap` after every round and `Clock.report` at its end, which prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

RATE = 0.05


@dataclass(frozen=True)
class Work:
    """So many clients with so many pictures each, some of them a round, one local epoch."""

    model: str
    shape: tuple[int, int, int]
    clients: int
    samples: int
    cohort: int
    batch: int


WORKS = {
    "W0": Work("lenet5", (1, 28, 28), clients=4, samples=20, cohort=2, batch=10),  # shows that a peer runs, no more
    "W1": Work("lenet5", (1, 28, 28), clients=100, samples=600, cohort=10, batch=32),
    "W2": Work("cnn", (3, 32, 32), clients=100, samples=500, cohort=10, batch=32),
    "W3": Work("lenet5", (1, 28, 28), clients=1000, samples=20, cohort=100, batch=10),
}


def begin() -> argparse.Namespace:
    """The arguments that every script takes, and as many threads as there are cores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--started", type=float, default=time.time(), help="when the command was given (time.time)")
    given = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    return given


def pictures(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Random pictures (unsigned bytes) and labels of all clients, one client's behind the other's."""
    generator = np.random.default_rng(0)
    count = work.clients * work.samples
    return (generator.integers(0, 256, (count, *work.shape), np.uint8), generator.integers(0, 10, count, np.int64))


def clients(work: Work, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every client's pictures, normalised, and labels, on the device."""
    x, y = (torch.from_numpy(each).to(device) for each in pictures(work))
    scaled = x.float().div_(255).sub_(0.5).div_(0.5)
    return list(zip(scaled.split(work.samples), y.split(work.samples), strict=True))


def network(work: Work) -> nn.Module:
    """LeNet-5 (first convolution padded to 32 x 32) or the CNN of McMahan et al."""
    channels, size, _ = work.shape
    if work.model == "lenet5":
        return nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * (size // 4) ** 2, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


class Clock:
    """Seconds of every round, the time until the first was done, and the memory behind it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.rounds, self.cpu, self.first = given, list[float](), list[float](), 0.0
        self.spent, self.last = cpu_seconds(), time.perf_counter()

    def lap(self) -> None:
        """A round is done."""
        if self.given.device == "cuda":
            torch.cuda.synchronize()
        self.rounds.append(time.perf_counter() - self.last)
        if len(self.rounds) == 1:
            self.first = time.time() - self.given.started
        spent = cpu_seconds()
        self.cpu.append(spent - self.spent)
        self.spent, self.last = spent, time.perf_counter()

    def report(self, version: str, note: str = "") -> None:
        """One JSON line: the result of the script."""
        on_device = torch.cuda.max_memory_allocated() if self.given.device == "cuda" else None
        found = {
            "work": self.given.work, "device": self.given.device, "version": version, "torch": torch.__version__,
            "note": note, "rounds": self.rounds, "cpu": self.cpu, "first_round_s": self.first, "peak_bytes": peak(),
            "peak_device_bytes": on_device,
        }  # fmt: skip
        print("\n" + json.dumps(found), flush=True)  # noqa: T201 (the script's one result)


def peak() -> int:
    """Peak resident memory of this process and of all that it started and that still live, added up (Linux)."""
    lines = [line for member in family() for line in _told(member, "status").splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def cpu_seconds() -> float:
    """Processor time of the same, with those that ended: what a round costs even where others use the machine too."""
    ticks = [_told(member, "stat").rpartition(")")[2].split()[11:15] for member in family()]
    return sum(int(tick) for each in ticks for tick in each) / os.sysconf("SC_CLK_TCK")


def family() -> set[int]:
    """This process (under torchrun: its launcher) and all that descend from it."""
    numbers = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    parents = {number: _told(number, "stat").rpartition(")")[2].split()[1:2] for number in numbers}
    found = {os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()}
    while more := {child for child, parent in parents.items() if parent and int(parent[0]) in found} - found:
        found |= more
    return found


def _told(process: int, file: str) -> str:
    try:
        return Path(f"/proc/{process}/{file}").read_text()
    except OSError:  # ended since
        return ""
