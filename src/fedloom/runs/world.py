"""The world that a study describes: data, split, network, method, and the clients they make.

An engine is handed a factory of it. In a worker that was forked, the factory finds the world its parent built, so data
are loaded once and shared.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.augment import AUGMENTATIONS
from fedloom.client import Client
from fedloom.data.dataset import Dataset
from fedloom.data.split import Split, split
from fedloom.engine.reference import Reference
from fedloom.engine.stacked import Stacked
from fedloom.errors import InputError, Unfit
from fedloom.method import Method
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.questions import QUESTIONS
from fedloom.runs.study import Data, Study, method_of, named, partition_of
from fedloom.seeds import SERVER, numpy_generator
from fedloom.types import Images, Report, Samples, Task

__all__ = ["World", "dataset_of", "world_of"]

DTYPES = {"float64": torch.float64}  # all other precisions keep float32 tensors and change the arithmetic


@dataclass(frozen=True, eq=False)
class World:
    """All that clients' work needs, and all that is the same in every round."""

    study: Study
    dataset: Dataset
    split: Split
    restored: bool = False  # whether the split is a saved one

    @cached_property
    def method(self) -> Method:
        """The method with its policies."""
        method: Method = method_of(self.study)
        return method

    @cached_property
    def network(self) -> Network:
        """The model at any width."""
        data, model, engine = self.dataset, self.study.model, self.study.engine
        make = partial(build, model.name, channels=data.channels, classes=data.classes, size=data.size, **model.fields)
        dtype, shape = DTYPES.get(engine.precision, torch.float32), tuple(data.x.shape[1:])
        adapted, half = self.method.adapt(make, shape, data.classes), engine.precision == "bf16"
        return Network(adapted, shape, data.classes, dtype=dtype, device=engine.device, half=half)

    @cached_property
    def images(self) -> Images:
        """All images on the device, with the numbers that normalise them."""
        device, dtype = self.network.device, self.network.dtype
        mean, std = self._normalisation()
        shape = (-1, 1, 1)
        return Images(
            torch.from_numpy(self.dataset.x).to(device),
            torch.from_numpy(self.dataset.y).to(device),
            torch.as_tensor(mean, dtype=dtype, device=device).reshape(shape),
            torch.as_tensor(std, dtype=dtype, device=device).reshape(shape),
        )

    def _normalisation(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each channel, on the scale 0..1."""
        x = self.dataset.x[: self.dataset.trained]
        if self.study.data.normalise == "fixed":
            return np.full(x.shape[1], 0.5), np.full(x.shape[1], 0.5)
        # Counted per grey level: exact, and no float copy of the images.
        levels = [np.bincount(x[:, channel].reshape(-1), minlength=256) for channel in range(x.shape[1])]
        scale = np.arange(256) / 255
        mean = np.array([(count * scale).sum() / count.sum() for count in levels])
        square = np.array([(count * scale**2).sum() / count.sum() for count in levels])
        std = np.sqrt(np.maximum(square - mean**2, 0))
        return mean, np.where(std > 0, std, 1.0)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """What the server knows of its clients before the first round."""
        (make, fields), fleet = named("fleet", self.study), self.study.fleet
        generator = numpy_generator(self.study.run.seed, 0, 0, SERVER, "fleet")
        columns: dict[str, np.ndarray] = make(clients=fleet.clients, generator=generator, **fields)
        weak = columns["capacity"] < 1
        excluded = weak if fleet.weak == "exclude" and not self.method.adapts else np.zeros(fleet.clients, bool)
        return {"samples": self.split.train.sizes.astype(np.float64), "excluded": excluded, **columns}

    def check(self) -> None:
        """Refuse what could only fail or mislead later: weak devices under whole models, nobody left to train."""
        weak, name = int((self.columns["capacity"] < 1).sum()), self.study.method.name
        if weak and not self.method.adapts and self.study.fleet.weak == "refuse":
            raise Unfit(
                f"{name} sends whole models, but {weak} of {self.study.fleet.clients} devices of fleet "
                f"'{self.study.fleet.name}' cannot train them; set fleet.weak to exclude (leave them out) or ignore "
                "(pretend they can), or use a method that cuts"
            )
        self.method.suits(self.network)
        if self.method.public and not len(self.split.public):
            raise InputError(
                f"{name} needs public data at the server, but data.public is 0; hold some training images out with "
                "--set data.public=1000"
            )
        if self.columns["excluded"].all():
            raise Unfit(f"fleet '{self.study.fleet.name}' has no device that can train the whole model under {name}")

    @cached_property
    def trainer(self) -> Reference:
        """What does the heavy work: on a GPU captured steps, on a CPU the reference, unless the study says."""
        engine = self.study.engine
        name = ("graphs" if engine.device == "cuda" else "reference") if engine.trainer == "auto" else engine.trainer
        if name == "graphs":
            from fedloom.engine.graphs import Graphs

            return Graphs(self.network, deadline=engine.deadline)
        return (Stacked if name == "stacked" else Reference)(self.network, deadline=engine.deadline)

    @property
    def filter(self) -> Callable[[Client, Report], Report] | None:
        """What is done to reports before they leave a client."""
        return self.method.filter

    @cached_property
    def jobs(self) -> Mapping[str, Callable[[Client, Task], Generator[Any, Any, Report]]]:
        """What a task can ask for: the method's work, or a question."""
        return {"work": self.method.work} | {name: partial(ask, self.method) for name, ask in QUESTIONS.items()}

    def client(self, task: Task, state: dict[str, Any]) -> Client:
        """The client that a task is for."""
        return Client(
            task.client, task, self.study.run.seed, self.network,
            train=self._samples(self.split.train.rows if self.method.pooled else self.split.train[task.client]),
            validation=self._samples(self.split.validation[task.client]),
            test=self._samples(self.split.test[task.client]),
            capacity=float(self.columns["capacity"][task.client]),
            augment=AUGMENTATIONS.get(self.study.data.augment),
            state=state,
        )  # fmt: skip

    def home(self) -> Client:
        """The server as a client: its training data are the public set, its test data the data set's test set."""
        nothing, task = np.empty(0, np.int64), Task(SERVER, 0)
        return Client(
            SERVER, task, self.study.run.seed, self.network,
            train=self._samples(self.split.public), validation=self._samples(nothing),
            test=self._samples(self.dataset.test_rows),
        )  # fmt: skip

    def _samples(self, rows: np.ndarray) -> Samples:
        return Samples(self.images, torch.from_numpy(np.ascontiguousarray(rows)))  # on the CPU, where plans are drawn


@lru_cache(maxsize=1)
def dataset_of(data_json: str) -> Dataset:
    """The data set of a [data] section; the next study of a grid mostly asks for the same one."""
    load, options = named("data", Study(data=Data.model_validate_json(data_json)))
    dataset: Dataset = load(**options)
    return dataset


@lru_cache(maxsize=2)
def world_of(study_json: str, split_file: Path | None = None) -> World:
    """The world of a study (as JSON, so that a spawned worker can be told); with a saved split, that one."""
    study = Study.model_validate_json(study_json)
    if study.engine.device == "cuda" and not torch.cuda.is_available():
        raise InputError("engine.device is 'cuda' but this machine has no CUDA device; use cpu")
    dataset = dataset_of(study.data.model_dump_json(exclude={"validation", "public", "normalise", "augment"}))
    if split_file is not None:
        return World(study, dataset, Split.load(split_file), restored=True)
    divided = split(
        dataset, partition_of(study), study.fleet.clients,
        validation=study.data.validation, public=study.data.public, seed=study.run.seed,
    )  # fmt: skip
    return World(study, dataset, divided)
