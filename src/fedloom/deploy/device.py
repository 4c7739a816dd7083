"""The client's side of a deployment: a device that keeps its data, its state and its capacity.

It answers requests and never starts anything by itself. All it must remember lies on its disk, so that it may be killed
at any time: `STATE/RUN/setup.json`, what the server said of the run, and one file a version of `client.state`. A
version is written before the report that would bring it into force is sent; older ones go once the server's checkpoint
no longer needs them.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import __version__, wire
from fedloom.data.levels import count_levels
from fedloom.deploy.messages import PROTOCOL
from fedloom.deploy.worlds import DeviceWorld, device_data, heard
from fedloom.engine.states import States
from fedloom.engine.worker import perform
from fedloom.errors import ClientError, FedloomError, InputError
from fedloom.runs.engine import arithmetic
from fedloom.runs.world import must_be_there
from fedloom.types import NEVER, Failure, Moment, Outcome, Task

__all__ = ["Device", "Disk", "StateLost"]

RUN = re.compile(r"[0-9a-f]{8,64}")
FORGOTTEN = "forgotten"  # an empty file beside the versions, once one that counted was removed
VERSION = re.compile(r"state-(\d+)-(\d+)\.safetensors")


class StateLost(ClientError):
    """The version of a client's state that counts is no longer there."""


class Disk(States):
    """Versions of one client's state, each a file as soon as it is proposed."""

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, client: int) -> None:
        """Find what an earlier process left."""
        found = ((VERSION.fullmatch(path.name), path) for path in self.folder.iterdir())
        self._versions[client] = {(int(match[1]), int(match[2])): path for match, path in found if match}

    def propose(self, client: int, moment: Moment, state: dict[str, Any]) -> None:
        """Write it down before anybody hears of it."""
        wire.save(state, self._file(moment))
        super().propose(client, moment, state)

    def load(self, client: int, accepted: Moment) -> dict[str, Any]:
        """As ever; StateLost if that version was forgotten, or everything before it. Newer ones are then kept."""
        counted = any(moment <= accepted for moment in self._versions.get(client, {}))
        if not counted and (self.folder / FORGOTTEN).exists():
            when = f"round {accepted[0] + 1}, stage {accepted[1]}" if accepted > NEVER else "the run's beginning"
            raise StateLost(f"its state as of {when} is gone: the client has gone on since, and keeps newer ones only")
        state = super().load(client, accepted)
        self._sweep(client)
        return state

    def at(self, client: int, moment: Moment) -> dict[str, Any] | None:
        """Exactly this version, if there is one."""
        version = self._versions.get(client, {}).get(moment)
        return wire.load(version, self.device) if isinstance(version, Path) else version

    def forget(self, client: int, safe: Moment) -> None:
        """Remove what neither the last checkpoint nor anything after it needs."""
        versions = self._versions.get(client, {})
        kept = max((moment for moment in versions if moment <= safe), default=safe)
        for moment in [moment for moment in versions if moment < kept]:
            (self.folder / FORGOTTEN).touch()
            del versions[moment]
        self._sweep(client)

    def _sweep(self, client: int) -> None:
        """Remove the files of versions that were dropped."""
        versions = self._versions.get(client, {})
        for path in self.folder.iterdir():
            match = VERSION.fullmatch(path.name)
            if match and (int(match[1]), int(match[2])) not in versions:
                path.unlink()

    def _file(self, moment: Moment) -> Path:
        return self.folder / f"state-{moment[0]}-{moment[1]}.safetensors"


class Device:
    """One client: its images, what it is able to, and its answers."""

    def __init__(
        self,
        name: str,
        data: Path,
        state: Path,
        *,
        capacity: float = 1.0,
        allow: Sequence[str] = (),
        device: str = "cpu",
        validation: float = 0.1,
    ) -> None:
        if not 0 < capacity <= 1:
            raise InputError(f"capacity must be in (0, 1]; got {capacity}")
        must_be_there("--device", device)
        self.name, self.state, self.capacity, self.allow, self.device = name, state, capacity, tuple(allow), device
        self.dataset, self.split = device_data(data, validation)
        self._run = ""
        self._client = -1
        self._world: DeviceWorld | None = None
        self._disk: Disk | None = None

    def answer(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request of the server."""
        if kind == "hello":
            return self.facts(str(body.get("fedloom", "")))
        if kind == "setup":
            return self._setup(body)
        if kind in ("work", "ask"):
            return {"outcome": self._perform(body)}
        return {}

    @property
    def described(self) -> str:
        """Itself in a line."""
        parts = (len(part[0]) for part in (self.split.train, self.split.validation, self.split.test))
        sizes = "{} images to train on, {} to validate, {} to test".format(*parts)
        return f"{self.name}: {sizes}, {self.dataset.classes} classes, capacity {self.capacity:g}"

    def facts(self, server: str = __version__) -> dict[str, Any]:
        """What a client tells of itself when it joins: sizes, classes, capacity, versions; no images, no labels."""
        trained = np.concatenate([self.split.train[0], self.split.validation[0]])
        facts: dict[str, Any] = {
            "name": self.name, "protocol": PROTOCOL, "fedloom": __version__, "torch": torch.__version__,
            "python": platform.python_version(), "samples": len(self.split.train[0]), "capacity": self.capacity,
            "shape": list(self.dataset.x.shape[1:]), "class_names": list(self.dataset.class_names),
            "levels": count_levels(self.dataset.x, trained),
        }  # fmt: skip
        if server != __version__:
            facts["refuses"] = (
                f"the server runs fedloom {server}, '{self.name}' {__version__}; install the same version"
            )
        return facts

    def _setup(self, body: dict[str, Any]) -> dict[str, Any]:
        """Get ready for a run, or say why not."""
        try:
            body = json.loads(json.dumps(body))  # what is looked at now is what a later process will read
            folder = self.folder(body["run"])
            self._world = self._make(body)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".setup.partial").write_text(json.dumps(body))
            (folder / ".setup.partial").replace(folder / "setup.json")
        except FedloomError as error:
            return {"refuses": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return {"refuses": f"the study cannot be understood here: {type(error).__name__}: {error}"}
        self._disk = self._enter(body)
        return {}

    def folder(self, run: object) -> Path:
        """Where all of a run lies; InputError for a name that cannot be one's."""
        if not (isinstance(run, str) and RUN.fullmatch(run)):
            raise InputError("the server named the run in a way that cannot be a folder")
        return self.state / run

    def _make(self, body: dict[str, Any]) -> DeviceWorld:
        """The world that the server described, on this device's data."""
        study = heard(body["study"], self.allow, self.device)
        if tuple(body["shape"]) != self.dataset.x.shape[1:] or body["class_names"] != list(self.dataset.class_names):
            raise InputError(
                f"the study is about {len(body['class_names'])} classes of images {tuple(body['shape'])}; "
                f"'{self.name}' has {self.dataset.classes} of {self.dataset.x.shape[1:]}, or names them differently"
            )
        normal = np.array(body["mean"]), np.array(body["std"])
        world = DeviceWorld(study, self.dataset, self.split, normal=normal, capacity=self.capacity)
        if world.method.validates and not len(self.split.validation[0]):
            raise InputError(f"{study.method.name} needs validation images, and '{self.name}' keeps none aside")
        world.method.suits(world.network)
        return world

    def _enter(self, body: dict[str, Any]) -> Disk:
        self._run, self._client = body["run"], int(body["client"])
        disk = Disk(self.folder(self._run), self.device)
        disk.take(self._client)
        return disk

    def _ready(self, run: str) -> tuple[DeviceWorld, Disk]:
        """What belongs to this run; a new process finds on the disk what the last one was told."""
        if run != self._run or self._world is None or self._disk is None:
            path = self.folder(run) / "setup.json"
            if not path.is_file():
                raise InputError(f"'{self.name}' was not told what this run is about")
            body = json.loads(path.read_text())
            self._world = self._make(body)
            self._disk = self._enter(body)
        return self._world, self._disk

    def _perform(self, body: dict[str, Any]) -> Outcome:
        task = body.get("task")
        if not isinstance(task, Task):
            raise wire.WireError("a request holds no task")
        try:
            world, disk = self._ready(str(body.get("run", "")))
            if task.client != self._client:
                raise InputError(f"a task for client {task.client} came to client {self._client}")
            if task.job not in world.jobs:
                raise InputError(f"there is no job '{task.job}'")
            disk.forget(task.client, _moment(body.get("safe")))
            state = disk.load(task.client, task.accepted)
        except FedloomError as error:
            kind = "lost" if isinstance(error, StateLost) else "raised"
            failure = Failure(task.client, task.round, task.stage, kind, str(error))
            return Outcome(task.client, task.round, task.stage, task.job, failure=failure)
        with arithmetic(world.study.engine.device, world.study.engine.precision):
            (outcome,) = perform(world, [(task, state)])
        if outcome.state is not None:
            disk.propose(task.client, (task.round, task.stage), outcome.state)
        failed = outcome.failure and replace(outcome.failure, trace="")  # paths of this device are nobody's business
        return replace(outcome, state=None, failure=failed)


def _moment(value: object) -> Moment:
    match value:
        case (int(round), int(stage)):
            return round, stage
    return NEVER
