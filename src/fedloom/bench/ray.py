"""What the Ray engine costs and gains on this machine: rounds of clients that do nothing, two workers against one.

`crowd` is a federation of 100,000 clients; `python -m fedloom.bench.ray` runs it and tells the memory of the driver
round by round.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fedloom.client import Client
from fedloom.data.dataset import Dataset
from fedloom.engine.local import Local
from fedloom.engine.ray import Ray
from fedloom.engine.reference import Reference
from fedloom.engine.worker import Trainer
from fedloom.fleet.fleet import Engine, Fleet
from fedloom.fleet.nonsense import FREE, Form
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.merge import Mean, Merge
from fedloom.runs.start import run
from fedloom.types import Images, Named, Report, Samples, Task

__all__ = ["crowd", "generated", "ray"]

Jobs = Mapping[str, Callable[[Client, Task], Generator[Any, Any, Report]]]
CLIENTS, REPEATS, PAIRS = 1000, 5, 3


class Idle:
    """A workplace whose clients do nothing: what is left is the engine."""

    filter: Callable[[Client, Report], Report] | None = None
    merge: Merge = Mean()
    deadline: float | None = None
    form: Form = FREE

    def __init__(self) -> None:
        self.network = Network(partial(build, "lenet5", channels=1, classes=10, size=28), (1, 28, 28), 10)
        self.trainer: Trainer = Reference(self.network)
        one = torch.ones(1, 1, 1)
        self.images = Images(torch.zeros(1, 1, 28, 28, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), one, one)
        self.jobs: Jobs = {"work": _nothing}

    def client(self, task: Task, state: dict[str, Any]) -> Client:
        """Nobody's data."""
        nothing = Samples(self.images, torch.arange(0))
        return Client(task.client, task, 0, self.network, nothing, nothing, nothing, 1.0, state)

    def elsewhere(self) -> type[Idle]:
        """It is built anywhere."""
        return Idle


def _nothing(client: Client, task: Task) -> Generator[Any, Any, Report]:
    return Report()
    yield


def _round(engine: Engine, place: Idle, tasks: int) -> float:
    """Seconds of a round of so many tasks that share a model, median of a few; every round has a new model."""
    columns = {"samples": np.ones(CLIENTS), "capacity": np.ones(CLIENTS)}
    named = Named("fedavg"), Named("lenet5")
    fleet = Fleet(columns, engine, place.network, place.client(Task(0, 0), {}), seed=0, names=named)
    times = []
    for number in range(REPEATS + 1):
        model = place.network.initial(number)
        begin = perf_counter()
        done = sum(1 for _ in fleet.run(fleet.task(client, {"model": model}) for client in range(tasks)))
        times.append(perf_counter() - begin)
        if done != tasks:
            raise RuntimeError(f"{tasks - done} clients that do nothing failed")
    return median(times[1:])


def ray() -> list[dict[str, object]]:
    """Milliseconds of a round of idle clients, and seconds of a round of the CNN with one worker and with two."""
    rows: list[dict[str, object]] = []
    place = Idle()
    local, cluster = Local(lambda: place), Ray(lambda: place, 2, cpus=0.5)
    try:
        for tasks in (10, 1000):
            alone, there = _round(local, place, tasks), _round(cluster, place, tasks)
            rows.append({"what": f"round of {tasks} idle clients", "local": f"{1000 * alone:.1f} ms",
                         "ray": f"{1000 * there:.1f} ms", "": f"{1000 * (there - alone):+.1f} ms"})  # fmt: skip
    finally:
        cluster.close()
    pairs = [(_cnn(1), _cnn(2)) for _ in range(PAIRS)]
    one, two = (median(times) for times in zip(*pairs, strict=True))
    rows.append({"what": "round of the CNN, 8 clients", "local": "", "ray": f"{one:.2f} s with one worker",
                 "": f"{two:.2f} s with two: {median(a / b for a, b in pairs):.2f}x"})  # fmt: skip
    return rows


def _cnn(workers: int) -> float:
    """Seconds of a round of eight clients that train McMahan's CNN: the median after the first, none is evaluated."""
    settings = {
        "engine.workers": workers, "engine.cpus": 0.5, "train.batch_size": 32, "train.steps": 12,
        "evaluate.every": REPEATS + 2, "data.samples": 1024, "data.size": 28,
    }  # fmt: skip
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run(
            "fedavg", dataset="fedloom.bench.ray:generated", model="cnn", clients=8, rounds=REPEATS + 2, engine="ray",
            out=folder, set=settings, watch=lambda row: times.append(row["seconds"]),
        )  # fmt: skip
    return median(times[1:-1])


def generated(samples: int = 400_000, size: int = 4, classes: int = 4) -> Dataset:
    """Pictures of a few grey levels whose mean tells the class, and noise; the last tenth is the test set."""
    generator = np.random.default_rng(0)
    y = generator.integers(classes, size=samples)
    x = generator.integers(40, size=(samples, 1, size, size), dtype=np.uint8)
    x += (y * (200 // classes)).astype(np.uint8)[:, None, None, None]
    return Dataset("generated", x, y, samples - samples // 10, tuple(str(label) for label in range(classes)))


def crowd(clients: int = 100_000, cohort: int = 1000, rounds: int = 50, **engine: object) -> dict[str, Any]:
    """A large federation of tiny models: the driver's resident memory after every round, and the summary."""
    memory: list[float] = []

    def watch(row: Mapping[str, Any]) -> None:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        memory.append(int(line.split()[1]) / 1024)
        sys.stderr.write(f"round {row['round']}: {row['seconds']:.2f} s, {memory[-1]:.0f} MB\n")

    settings = {
        "select.fraction": cohort / clients, "data.samples": 4 * clients + 4 * clients // 9, "train.batch_size": 4,
        "train.lr": 0.1, "evaluate.every": 10, "evaluate.clients": cohort, "run.checkpoint_every": 10,
        "model.hidden": [8], "data.validation": 0.0, **{f"engine.{key}": value for key, value in engine.items()},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = run(
            "fedavg", dataset="fedloom.bench.ray:generated", model="mlp", clients=clients, rounds=rounds,
            engine="ray", out=folder, set=settings, watch=watch,
        )  # fmt: skip
        return {"memory": memory, **result.summary}


if __name__ == "__main__":
    found = crowd(reduce=sys.argv[1] if len(sys.argv) > 1 else "flat", cpus=0.5, workers=2)
    first, last = found["memory"][9], found["memory"][-1]
    sys.stdout.write(f"after round 10: {first:.0f} MB; after round {found['rounds']}: {last:.0f} MB\n")
    sys.stdout.write(f"{found['seconds_per_round']:.2f} s a round; accuracy {found['global_accuracy']:.3f}\n")
