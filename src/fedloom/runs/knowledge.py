"""What does each participant know of the others? Every participant's model on every participant's test part.

A measure of the simulation, made from a run's folder after its last checkpoint: in a real federation nobody holds all
test parts. It is never part of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.client import Client
from fedloom.copies import on_host
from fedloom.errors import InputError
from fedloom.fleet.fleet import Engine
from fedloom.readings import Accuracy
from fedloom.registry import find
from fedloom.runs.engine import arithmetic
from fedloom.runs.experiment import Experiment
from fedloom.runs.start import looked_into
from fedloom.runs.world import World, world_of
from fedloom.types import Measure, Report, Task, Work

__all__ = ["Knowledge", "knowledge"]

MOST = 50


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Shares of right answers; NaN where there is nothing to ask."""

    peers: np.ndarray
    """(K, K): the model of a row's participant on the test part of a column's."""
    classes: np.ndarray
    """(K, classes): the model of a row's participant on all test images of a class."""
    class_names: tuple[str, ...]
    method: str

    @property
    def own(self) -> float:
        """Mean over participants of what they know of their own data."""
        return float(self.peers.diagonal().mean())

    @property
    def others(self) -> float:
        """Mean over pairs of what a participant knows of another's data; NaN for one alone."""
        count = len(self.peers)
        return float((self.peers.sum() - self.peers.trace()) / (count * (count - 1))) if count > 1 else float("nan")


@dataclass(frozen=True, eq=False)
class Examined(World):
    """The world of a run that is over: whoever is asked is shown everybody's test part."""

    @cached_property
    def jobs(self) -> Mapping[str, Callable[[Client, Task], Generator[Any, Any, Report]]]:
        """One question more."""
        return {**super().jobs, "knowledge": partial(knows, self)}


def knows(world: World, client: Client, task: Task) -> Work[Report]:
    """How good is the model you really use, on everybody's test part?"""
    tensors = yield from world.method.final(client, task)
    parts = [world.client(Task(each, 0), {}).test for each in range(world.study.fleet.clients)]
    read: list[Any] = on_host((yield tuple(Measure(tensors, Accuracy(), part) for part in parts)))
    right, asked = (sum(each[name] for each in read).tolist() for name in ("right", "samples"))
    numbers = {f"peer {n}": float(each["right"].sum() / each["samples"].sum()) for n, each in enumerate(read)}
    numbers |= {f"class {n}": r / a for n, (r, a) in enumerate(zip(right, asked, strict=True)) if a}
    return Report(numbers=numbers)


def knowledge(folder: Path) -> Knowledge:
    """Ask every participant of a finished run."""
    store = looked_into(folder)
    study = store.study()
    if study.fleet.clients > MOST:
        raise InputError(f"{folder} has {study.fleet.clients} participants; at most {MOST} can be shown")
    known = world_of(study.model_dump_json(), store.split_file)
    world = Examined(known.study, known.dataset, known.split, restored=True)
    with arithmetic(study.engine.device, study.engine.precision):
        engine: Engine = find("engine", "local")(lambda: world)
        experiment = Experiment(store, world, engine)
        fleet, server = experiment.fleet, experiment.method.evaluated(experiment.server, experiment.fleet)
        fleet.begin(server.round, experiment.train(server.round))
        asked = fleet.ask("knowledge", fleet.show(server, range(fleet.size)))
        answers = {answer.client: answer.numbers for answer in asked}
    blank = np.full((fleet.size, fleet.size + world.dataset.classes), np.nan)
    names = [f"peer {n}" for n in range(fleet.size)] + [f"class {n}" for n in range(world.dataset.classes)]
    for client, numbers in answers.items():
        blank[client] = [numbers.get(name, np.nan) for name in names]
    return Knowledge(blank[:, : fleet.size], blank[:, fleet.size :], world.dataset.class_names, study.method.name)
