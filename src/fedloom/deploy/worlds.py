"""The world of a study where the data are not in one place: at the server, and at one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from secrets import randbits
from typing import Any

import numpy as np

from fedloom.client import Client
from fedloom.data.dataset import Arrays, Dataset, build
from fedloom.data.npz import IGNORED, read_npz
from fedloom.data.rows import Rows
from fedloom.data.split import Split, split
from fedloom.errors import InputError, oxford
from fedloom.registry import SLOTS, is_path
from fedloom.runs.study import Study, method_of, resolve
from fedloom.runs.world import World
from fedloom.types import Task

__all__ = ["DeviceWorld", "ServerWorld", "device_data", "heard", "server_data", "suits", "told"]

# What a client needs of a study: whole sections, or these settings. Data set, partition and fleet are its own matter.
TOLD: dict[str, Any] = {
    **dict.fromkeys(("method", *SLOTS, "model", "train"), True), "data": {"augment", "normalise"},
    "evaluate": {"model"}, "engine": {"precision", "deadline"}, "run": {"seed", "rounds"},
}  # fmt: skip
Normal = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class ServerWorld(World):
    """The server: public and test images if it has any, and what clients told of themselves."""

    normal: Normal = field(default=(np.zeros(1), np.ones(1)))
    joined: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """What the clients said when they joined."""
        return dict(self.joined)

    def _common(self) -> Normal:
        return self.normal


@dataclass(frozen=True, eq=False)
class DeviceWorld(World):
    """One device: its own images only."""

    normal: Normal = field(default=(np.zeros(1), np.ones(1)))
    capacity: float = 1.0

    def device(self, client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """All that is here, whatever number the server knows it by."""
        return self.split.train[0], self.split.validation[0], self.split.test[0], self.capacity

    def client(self, task: Task, state: dict[str, Any]) -> Client:
        """Its noise is not drawn from the seed, which the server has given it."""
        return replace(super().client(task, state), secret=randbits(62))

    def _common(self) -> Normal:
        return self.normal


def device_data(path: Path, validation: float = 0.1) -> tuple[Dataset, Split]:
    """A device's images: a file of `fedloom partition --export`, an own `.npz`, or a folder of images by class.

    Without a validation or test part of its own, shares of the training part become one: `validation`, and a fifth.
    """
    if not 0 <= validation < 0.8:
        raise InputError(f"--validation is a share of the images, at least 0 and less than 0.8; got {validation}")
    if path.is_dir():
        from fedloom.data.folders import by_class

        found = by_class(path)
    elif path.is_file():
        found = read_npz(path)
    else:
        raise InputError(f"data '{path}' is neither a file nor a folder")
    held = _validation(path) if path.is_file() else None
    if held is None:
        dataset = build(path.stem, found, hold_out=False)
        if dataset.trained < 3:
            raise InputError(f"{path} holds {dataset.trained} training images; at least 3 are needed")
        return dataset, split(dataset, "iid", 1, validation=validation)
    trained = len(found.x_train)
    parts = {"x_train": np.concatenate([found.x_train, held[0]]), "y_train": np.concatenate([found.y_train, held[1]])}
    kept = {"x_test": found.x_test, "y_test": found.y_test, "class_names": found.class_names}
    dataset = build(path.stem, Arrays(path, **parts, **kept), hold_out=False)  # type: ignore[arg-type]
    rows = np.arange(len(dataset.y))
    cuts = np.split(rows, [trained, dataset.trained])
    train, validated, test = (Rows.of([part]) for part in cuts)
    return dataset, Split(train, validated, test, np.empty(0, np.int64))


def _validation(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    with np.load(path, allow_pickle=False) as file:
        if not set(IGNORED) <= set(file.files):
            return None
        x, y = (file[key] for key in IGNORED)
    return x, y


def server_data(
    public: Path | None, test: Path | None, shape: Sequence[int], class_names: Sequence[str], clients: int
) -> tuple[Dataset, Split]:
    """The server's own images: public ones to work with, test ones to measure on; either may be missing."""
    nothing = np.zeros((0, *shape), np.uint8), np.zeros(0, np.int64)
    (x_public, y_public), (x_test, y_test) = (
        _images(path, part, shape, len(class_names)) if path else nothing
        for path, part in ((public, "train"), (test, "test"))
    )
    held = len(y_public)
    if not held:  # a data set has training images; this one is nobody's
        x_public, y_public = np.zeros((1, *shape), np.uint8), np.zeros(1, np.int64)
    both = np.concatenate([x_public, x_test]), np.concatenate([y_public, y_test])
    dataset = Dataset("server", *both, trained=len(y_public), class_names=tuple(class_names))
    empty, something = (Rows.of([rows] * clients) for rows in ([], [0]))
    # Whether a client's own parts are large enough is its own matter: it refuses a study that needs more.
    return dataset, Split(empty, something, empty, np.arange(held))


def _images(path: Path, part: str, shape: Sequence[int], classes: int) -> tuple[np.ndarray, np.ndarray]:
    if not path.is_file():
        raise InputError(f"data '{path}' does not exist")
    dataset = build(path.stem, read_npz(path), hold_out=False)
    rows = dataset.test_rows if part == "test" and len(dataset.test_rows) else dataset.train_rows
    if tuple(dataset.x.shape[1:]) != tuple(shape) or dataset.classes > classes:
        raise InputError(
            f"{path} holds images of shape {dataset.x.shape[1:]} and {dataset.classes} classes; "
            f"the clients' are {tuple(shape)} and {classes}"
        )
    return dataset.x[rows], dataset.y[rows]


def suits(study: Study) -> None:
    """Refuse a study that cannot be about real clients."""
    method = method_of(study)
    if method.pooled:
        raise InputError(f"{study.method.name} needs the data of all clients in one place; it cannot be deployed")
    if method.public_everywhere:
        raise InputError(f"{study.method.name} needs public images at every client; it cannot be deployed")
    if study.model.others:
        raise InputError(f"[model] names {study.model.label}; real clients have no list of models yet: name one")
    if study.evaluate.on != "own":
        raise InputError(
            f"evaluate.on is '{study.evaluate.on}', but real clients hold only their own test images; use own"
        )


def told(study: Study) -> dict[str, Any]:
    """What clients are told of a study, as plain data."""
    sections: dict[str, Any] = study.model_dump(include=TOLD, exclude_defaults=True)
    return sections


def heard(sections: Mapping[str, Any], allow: Sequence[str], device: str) -> Study:
    """The study that a client was told, for its device; refused if it says more, or names code that is not allowed."""
    for section, settings in sections.items():
        known = TOLD.get(section, set())
        if beyond := [] if known is True else sorted(set(settings) - known):
            raise InputError(
                f"the server tells {oxford(beyond, 'and')} of [{section}], which are this client's own matter; "
                f"allowed: {oxford(sorted(known)) or 'nothing'}"
            )
    for path in _paths(sections):
        if path not in allow:
            raise InputError(
                f"the study names '{path}', which is not part of fedloom and not allowed here; if you trust it, "
                f"install it and join with --allow {path}"
            )
    study = resolve({**sections, "engine": {**sections.get("engine", {}), "device": device}})
    suits(study)
    return study


def _paths(tree: Any) -> list[str]:
    """All that could be imported: names travel, code does not."""
    if isinstance(tree, str):
        return [tree] if is_path(tree) else []
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return [path for item in inner for path in _paths(item)]
