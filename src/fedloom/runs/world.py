"""The world that a study describes: data, split, network, method, and the clients they make.

An engine is handed a factory of it. In a worker that was forked, the factory finds the world its parent built, so data
are loaded once and shared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4
from zlib import crc32

import numpy as np
import torch

from fedloom.augment import augmentation_of
from fedloom.client import Client
from fedloom.data.dataset import Dataset, padded, stratified
from fedloom.data.levels import count_levels, group_levels, moments
from fedloom.data.mapped import forget, mapped
from fedloom.data.split import Split, split
from fedloom.engine.reference import Reference
from fedloom.engine.several import Several
from fedloom.engine.stacked import Stacked
from fedloom.engine.taped import Taped
from fedloom.engine.worker import Trainer
from fedloom.errors import InputError, choose, kind_of
from fedloom.fleet.dealt import dealt
from fedloom.fleet.nonsense import Form
from fedloom.fleet.traces import trace
from fedloom.method import Method
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.gap import gap
from fedloom.policies.merge import Merge
from fedloom.questions import QUESTIONS
from fedloom.registry import own_modules
from fedloom.runs.judged import judged, remembered
from fedloom.runs.notices import notices, tell
from fedloom.runs.refusals import CONTRIBUTED, refuse
from fedloom.runs.study import Data, Open, Study, method_of, named, partition_of
from fedloom.seeds import SERVER, numpy_generator, torch_generator
from fedloom.settings import built, must_take
from fedloom.types import Augmentation, Images, Report, Samples, Server, Task, Tensors

__all__ = ["World", "dataset_of", "must_be_there", "world_of"]

FOLDER = "FEDLOOM_DATA"  # names the folder of data sets
HERE = uuid4().hex  # this process, for what its workers on one machine share
UNLOADED = {
    "validation",
    "test",
    "public",
    "public_from",
    "normalise",
    "augment",
}  # settings of [data] that do not change what is loaded
MANY = 33  # groups of a data set from which on (writers) they are not tested one by one
DEVICES = ("cpu", "cuda")
DTYPES = {"float64": torch.float64}  # all other precisions keep float32 tensors and change the arithmetic


@dataclass(frozen=True, eq=False)
class World:
    """All that clients' work needs, and all that is the same in every round."""

    study: Study
    dataset: Dataset
    split: Split
    restored: bool = False  # whether the split is a saved one
    pages: str = ""  # under which name processes of this machine share the images, if they do

    @cached_property
    def method(self) -> Method:
        """The method with its policies."""
        method: Method = method_of(self.study)
        return method

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The study's models at any width."""
        return tuple(self._network(model) for model in self.study.model.each)

    @property
    def network(self) -> Network:
        """The only model, or the first."""
        return self.networks[0]

    def _network(self, model: Open) -> Network:
        data, engine = self.dataset, self.study.engine
        make = partial(build, model.name, channels=data.channels, classes=data.classes, size=data.size, **model.fields)
        dtype, shape = DTYPES.get(engine.precision, torch.float32), tuple(data.x.shape[1:])
        adapted, half = self.method.adapt(make, shape, data.classes), engine.precision == "bf16"
        return Network(adapted, shape, data.classes, dtype=dtype, device=engine.device, half=half, layout=engine.layout)

    @cached_property
    def settled(self) -> Study:
        """The study with what it leaves open decided: this is what a run writes down and what resume goes by."""
        engine, layouts = self.study.engine, {network.channels_last for network in self.networks}
        # Where models of a list differ in it, the rule decides again: it goes by model and device alone.
        chosen = {"layout": "channels_last" if layouts.pop() else "contiguous"} if len(layouts) == 1 else {}
        if engine.trainer == "auto":
            fast = engine.device == "cuda" and engine.deadline is None
            played = engine.device == "cpu" and "taped" in self.method.trainers
            chosen["trainer"] = "graphs" if fast else "taped" if played else "reference"
        return self.study.model_copy(update={"engine": engine.model_copy(update=chosen)})

    @cached_property
    def images(self) -> Images:
        """All images on the device, normalised by the numbers that all clients have in common."""
        x, y = (torch.from_numpy(part).to(self.network.device) for part in (self.dataset.x, self.dataset.y))
        channels = self.dataset.channels
        if self.study.data.normalise == "fixed" and not self.personal:  # else nobody trains under these numbers
            return Images(x, y, *self._numbers(np.full(channels, 0.5), np.full(channels, 0.5)))
        return Images(x, y, *self._numbers(*self._common()))

    def _common(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each channel over all training images."""
        return moments(count_levels(self.dataset.x[: self.dataset.trained]))

    def _numbers(self, mean: np.ndarray, std: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of channels as a batch of images wants them."""
        like = torch.empty(0, dtype=self.network.dtype, device=self.network.device)
        return torch.from_numpy(mean).to(like)[..., None, None], torch.from_numpy(std).to(like)[..., None, None]

    @property
    def personal(self) -> bool:
        """Whether every client normalises by statistics of its own, which nobody else ever sees."""
        return self.method.personal or self.study.data.normalise.startswith("personal")

    def _own_images(self, client: int, rows: np.ndarray) -> Images:
        """The images as a client sees them; its statistics are those of its own training rows."""
        if not self.personal or not len(rows):
            return self.images
        if client not in self._statistics:
            x, of = self.dataset.x, rows
            if self.augmentation is not None and self.study.data.normalise == "personal_augmented":
                drawn = torch_generator(self.study.run.seed, 0, 0, client, "statistics")
                x, of = self.augmentation(torch.from_numpy(x[rows]), drawn).numpy(), np.arange(len(rows))
            self._statistics[client] = self._numbers(*moments(count_levels(x, of)))
        mean, std = self._statistics[client]
        return replace(self.images, mean=mean, std=std)

    @cached_property
    def _statistics(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    @cached_property
    def _by_origin(self) -> Images:
        """The images, each normalised by the statistics of the training images of its own group."""
        if self.dataset.groups is None:
            return self.images
        levels, names = group_levels(self.dataset), self.dataset.group_names
        if unknown := [names[group] for group in np.unique(self.dataset.groups) if not levels[group].any()]:
            raise InputError(
                f"evaluate.test_stats is 'data', but data set '{self.dataset.name}' has no training images of "
                f"{', '.join(unknown)} to take statistics from; use model"
            )
        mean, std = self._numbers(*moments(levels))
        origin = torch.from_numpy(self.dataset.groups).to(self.network.device)
        return replace(self.images, mean=mean, std=std, origin=origin)

    def tested(self, own: Images) -> dict[str, Samples]:
        """The test set that all share, by group, as a model that sees images like `own` is tested on it."""
        rows, data = self.dataset.test_rows, self.dataset
        groups = np.zeros(len(data.y), np.int64) if data.groups is None else data.groups
        if self.study.evaluate.on == "unseen":
            rows = rows[~np.isin(groups[rows], groups[: data.trained])]
        by_origin = self.personal and self.study.evaluate.test_stats == "data"
        images, names = self._by_origin if by_origin else own, data.group_names
        if len(names) not in range(2, MANY):
            return {"": Samples(images, _rows(rows))} if len(rows) else {}
        return {names[group]: Samples(images, _rows(rows[groups[rows] == group])) for group in np.unique(groups[rows])}

    @cached_property
    def augmentation(self) -> Augmentation | None:
        """What is done to training images."""
        return augmentation_of(self.study.data.augment)

    @property
    def adapts(self) -> bool:
        """Whether weak devices get less to train: a part of the model, or a smaller one."""
        return self.method.adapts or len(self.networks) > 1

    @cached_property
    def form(self) -> Form:
        """What reports of the method's work must hold."""
        return Form(self.method.tells, units=self.method.adapts)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """What the server knows of its clients before the first round."""
        (make, fields), fleet = named("fleet", self.study), self.study.fleet
        generator = numpy_generator(self.study.run.seed, 0, 0, SERVER, "fleet")
        must_take(f"fleet '{fleet.name}'", make, ("clients", "generator"))
        what, given = f"fleet '{fleet.name}'", {"clients": fleet.clients, "generator": generator}
        columns: dict[str, np.ndarray] = built(what, make, fields, given)
        _check_columns(what, columns, fleet.clients)
        weak = columns["capacity"] < 1
        excluded = weak if fleet.weak == "exclude" and not self.adapts else np.zeros(fleet.clients, bool)
        if len(self.networks) > 1:
            costs = [network.macs(network.initial(self.study.run.seed)) for network in self.networks]
            columns["kind"] = dealt(columns["capacity"], costs)
        columns |= {"samples": self.split.train.sizes.astype(np.float64), "excluded": excluded}
        if count := round(fleet.onlookers * fleet.clients):
            order = numpy_generator(self.study.run.seed, 0, 0, SERVER, "onlookers").permutation(fleet.clients)
            columns["onlooker"] = np.isin(np.arange(fleet.clients), order[:count])
            columns["excluded"] = excluded | columns["onlooker"]
        if fleet.trace is not None:
            drawn = numpy_generator(self.study.run.seed, 0, 0, SERVER, "trace")
            columns |= trace(fleet.trace, fleet.clients, fleet.day, drawn)
        return columns

    @property
    def cohort(self) -> int:
        """How many clients a round asks at most."""
        if self.method.pooled:
            return 1
        asked = round(getattr(self.method.select, "fraction", 1.0) * self.study.fleet.clients)
        return min(max(1, asked), int((~self.columns["excluded"]).sum()))

    def check(self) -> None:
        """Refuse what could only fail or mislead later, and say what has no effect."""
        refuse(self)
        for sentence in notices(self):
            tell(sentence)

    @cached_property
    def trainer(self) -> Trainer:
        """What does the heavy work, for each model one of its own."""
        trainers = [self._trainer(network) for network in self.networks]
        return Several(trainers) if len(trainers) > 1 else trainers[0]

    def _trainer(self, network: Network) -> Reference:
        """Of the kind that the study says, or that was settled for it."""
        name = self.settled.engine.trainer
        if name == "graphs":
            from fedloom.engine.graphs import Graphs

            return Graphs(network)
        if name == "stacked":
            return Stacked(network)
        return (Taped if name == "taped" else Reference)(network)

    @property
    def deadline(self) -> float | None:
        """Seconds that a task may take."""
        return self.study.engine.deadline

    def elsewhere(self) -> Callable[[], World]:
        """What builds this world in a process that may be on another machine: settings and row numbers, no data."""
        study, folder = self.study.model_dump_json(), os.environ.get(FOLDER)
        return partial(world_there, study, self.split, own_modules(), HERE, folder)

    def moved_in(self) -> None:
        """All processes of this machine that should have the data have them: what they share needs no name any more."""
        if self.pages:
            forget(self.pages)

    @property
    def filter(self) -> Callable[[Client, Report], Report] | None:
        """What is done to reports before they leave a client."""
        return self.method.filter

    @property
    def merge(self) -> Merge:
        """How the method joins reports."""
        return self.method.merge

    @cached_property
    def jobs(self) -> Mapping[str, Callable[[Client, Task], Generator[Any, Any, Report]]]:
        """What a task can ask for: the method's work, or a question."""
        jobs = {name: partial(ask, self.method) for name, ask in (QUESTIONS | {"gap": gap}).items()}
        if self.study.evaluate.model == "trained":
            return jobs | {"work": partial(remembered, self.method), "evaluate": partial(judged, self.method)}
        return jobs | {"work": self.method.work}

    def client(self, task: Task, state: dict[str, Any]) -> Client:
        """The client that a task is for."""
        rows, validation, test, capacity = self.device(task.client)
        images = self._own_images(task.client, rows)
        groups = {} if self.study.evaluate.on == "own" else self.tested(images)
        return Client(
            task.client, task, self.study.run.seed, self.networks[task.kind],
            train=Samples(images, _rows(rows), self.augmentation),
            validation=Samples(images, _rows(validation)),
            test=_joined(groups) if groups else Samples(images, _rows(test)),
            capacity=capacity,
            state=state, groups=groups, public=self._seen_by(images) if self.method.public_everywhere else None,
        )  # fmt: skip

    def shown(self, server: Server) -> Tensors:
        """The tensors that clients are sent to evaluate."""
        tensors: Tensors = self.method.evaluation(server)
        return tensors

    def device(self, client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """What a client holds: its rows to train on, to validate with and to test on, and its capacity."""
        train = self.split.train.rows if self.method.pooled else self.split.train[client]
        capacity = float(self.columns["capacity"][client])
        return train, self.split.validation[client], self.split.test[client], capacity

    @cached_property
    def public(self) -> Samples:
        """What the server holds: images held out, images of another data set, or copies that clients gave."""
        data, generator = self.study.data, numpy_generator(self.study.run.seed, 0, 0, SERVER, "public")
        rows = self.split.public
        if data.public_from == CONTRIBUTED:
            rows = np.sort(generator.choice(self.split.train.rows, data.public, replace=False))
        elif data.public_from:
            return self._foreign(data.public_from, data.public, generator)
        return Samples(self._own_images(SERVER, rows), _rows(rows))

    def _seen_by(self, own: Images) -> Samples:
        """The public images as somebody sees them who sees images like `own`."""
        return replace(self.public, images=replace(self.public.images, mean=own.mean, std=own.std))

    def _foreign(self, name: str, count: int, generator: np.random.Generator) -> Samples:
        """So many training images of another data set, normalised like all others."""
        other = dataset_of.__wrapped__(Data(name=name, pad=self.study.data.pad).model_dump_json(exclude=UNLOADED))
        if (other.x.shape[1:], other.classes) != (self.dataset.x.shape[1:], self.dataset.classes):
            raise InputError(
                f"data.public_from: images of '{name}' are {other.x.shape[1:]} of {other.classes} classes; "
                f"'{self.dataset.name}' has {self.dataset.x.shape[1:]} of {self.dataset.classes}"
            )
        if count > other.trained:
            raise InputError(f"data.public is {count}, but '{name}' has {other.trained} training images")
        device = self.network.device
        x, y = (torch.from_numpy(part[: other.trained]).to(device) for part in (other.x, other.y))
        rows = stratified(other.y[: other.trained], count, generator)
        return Samples(Images(x, y, self.images.mean, self.images.std), _rows(rows))

    def home(self) -> Client:
        """The server as a client: its training data are the public set, its test data the data set's test set."""
        public, task = self.public, Task(SERVER, 0)
        nothing, groups = _rows(np.empty(0, np.int64)), self.tested(self.images)
        return Client(
            SERVER, task, self.study.run.seed, self.network,
            train=public, validation=replace(public, rows=nothing),
            test=_joined(groups) if groups else replace(public, rows=nothing),
            groups={} if self.study.evaluate.on == "own" else groups, public=public,
        )  # fmt: skip


def _check_columns(what: str, columns: object, clients: int) -> None:
    """Refuse a fleet that is not columns of a number a client, capacities in (0, 1] among them."""
    if not isinstance(columns, dict) or "capacity" not in columns:
        raise InputError(f"{what} makes {kind_of(columns)}; expected a dict of columns with 'capacity' in it")
    for name, column in columns.items():
        if np.shape(column) != (clients,):
            raise InputError(f"column '{name}' of {what} has shape {np.shape(column)}; expected {(clients,)}")
    capacity = columns["capacity"]
    if not ((capacity > 0) & (capacity <= 1)).all():
        raise InputError(f"capacities of {what} must be in (0, 1]; got {capacity.min():g} to {capacity.max():g}")


def _joined(groups: Mapping[str, Samples]) -> Samples:
    parts = list(groups.values())
    return replace(parts[0], rows=torch.cat([part.rows for part in parts]).sort().values)


def _rows(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows))  # on the CPU, where plans are drawn


@lru_cache(maxsize=1)
def dataset_of(data_json: str) -> Dataset:
    """The data set of a [data] section; the next study of a grid mostly asks for the same one."""
    data = Data.model_validate_json(data_json)
    load, options = named("data", Study(data=data))
    dataset = built(f"dataset '{data.name}'", load, options)
    if not isinstance(dataset, Dataset):
        raise InputError(f"dataset '{data.name}' makes {kind_of(dataset)}; expected a fedloom.data.Dataset")
    return dataset if data.pad is None else padded(dataset, data.pad)


@lru_cache(maxsize=1)
def _mapped_dataset(data_json: str, name: str) -> Dataset:
    return mapped(partial(dataset_of.__wrapped__, data_json), name)


def world_there(study_json: str, split: Split, modules: Sequence[str], origin: str, folder: str | None) -> World:
    """The world of a study in a worker process: data from where they lie, one copy a machine, arithmetic as asked.

    `modules` register what the user wrote. `folder` is where the run's own process finds data sets; a machine that is
    set up otherwise says so itself.
    """
    for module in modules:
        import_module(module)
    if folder is not None:
        os.environ.setdefault(FOLDER, folder)
    study = Study.model_validate_json(study_json)
    data_json = study.data.model_dump_json(exclude=UNLOADED)
    pages = f"{origin}-{crc32(data_json.encode())}"
    world = World(study, _mapped_dataset(data_json, pages), split, restored=True, pages=pages)
    if study.engine.device == "cpu":
        torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = study.engine.precision in ("tf32", "bf16")
    return world


def must_be_there(what: str, device: str) -> None:
    """Refuse a device that is none, or that this machine does not have."""
    if device not in DEVICES:
        raise choose(what, device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{what} is 'cuda' but this machine has no CUDA device; use cpu")


@lru_cache(maxsize=2)
def world_of(study_json: str, split_file: Path | None = None) -> World:
    """The world of a study (as JSON, so that a spawned worker can be told); with a saved split, that one."""
    study = Study.model_validate_json(study_json)
    must_be_there("engine.device", study.engine.device)
    dataset = dataset_of(study.data.model_dump_json(exclude=UNLOADED))
    if split_file is not None:
        return World(study, dataset, Split.load(split_file), restored=True)
    divided = split(
        dataset, partition_of(study), study.fleet.clients,
        validation=study.data.validation, test=study.data.test,
        public=0 if study.data.public_from else study.data.public, seed=study.run.seed,
    )  # fmt: skip
    return World(study, dataset, divided)
