"""The folder of a run: valid from the start, never half written.

study.json, environment.json and split.npz are there before the first round. Metrics are appended as lines, and made
into parquet when the run ends, is interrupted or fails. A checkpoint is a manifest that names immutable files (the
server, the fleet, one a changed client) and is renamed into place last, so a run that is killed anywhere goes on from
its last checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch

from fedloom import __version__, wire
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet, Keeper
from fedloom.network import Network
from fedloom.runs.damage import holding, sound
from fedloom.runs.parquet import write_parquet
from fedloom.runs.study import Study, resolve
from fedloom.types import NEVER, Moment, Server, Tensors

__all__ = ["FAILURE", "Store"]

MANIFEST = "checkpoint.json"
STATUS = "status.json"  # who takes part, and what they did, in a run with real clients
FAILURE = "failure.json"  # why the last attempt to go on ended, if it failed
LINES = ("metrics", "clients")


class Store:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, out: Path, label: str, study: str, split: Any) -> Store:
        """A new folder inside `out`, complete as soon as it is visible; an existing one is never touched."""
        partial = out / f".new-{os.getpid()}-{datetime.now():%H%M%S%f}"
        try:
            out.mkdir(parents=True, exist_ok=True)
            (partial / "checkpoints").mkdir(parents=True)
        except OSError as error:
            raise InputError(f"run.out '{out}' cannot hold the folder of a run: {error.strerror}") from error
        (partial / "study.json").write_text(study + "\n")
        (partial / ".study.json").write_text(study + "\n")
        environment = {
            "fedloom": __version__, "python": platform.python_version(), "torch": torch.__version__,
            "machine": platform.machine(), "system": platform.system(),
            "started": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        }  # fmt: skip
        (partial / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
        split.save(partial / "split.npz")
        for name in LINES:
            (partial / f"{name}.jsonl").touch()
        for number in range(10_000):
            folder = out / (label if number == 0 else f"{label}-{number + 1}")
            try:
                partial.rename(folder)  # onto a folder that holds something it fails, and whoever comes first wins
            except OSError:
                continue
            return cls(folder)
        raise InputError(f"{out} holds 10,000 runs called '{label}'; choose another --out")

    @classmethod
    def open(cls, folder: Path) -> Store:
        """The folder of an existing run."""
        if not (folder / "study.json").is_file():
            raise InputError(f"{folder} is not the folder of a run: it has no study.json")
        return cls(folder)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Have the folder to oneself: two processes that go on with the same run would spoil it."""
        with (self.folder / ".claim").open("a") as file:
            if not _lock(file):
                raise InputError(f"{self.folder} is being run by another process; wait for it or stop it")
            (self.folder / FAILURE).unlink(missing_ok=True)
            yield

    @property
    def is_running(self) -> bool:
        """Whether another process is at it."""
        path = self.folder / ".claim"
        if not path.exists():
            return False
        with path.open("a") as file:
            return not _lock(file)

    @property
    def split_file(self) -> Path:
        """The saved split."""
        return self.folder / "split.npz"

    @property
    def model_file(self) -> Path:
        """The final global model, as it was evaluated, once the run is finished and if there is one."""
        return self.folder / "model.safetensors"

    def save_model(self, tensors: Tensors) -> None:
        """Write the final global model as a plain state dict."""
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        safetensors.torch.save_file(plain, self.model_file)

    def model(self) -> Tensors:
        """What was written."""
        with sound(self.model_file):
            return safetensors.torch.load_file(self.model_file)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return (self.folder / MANIFEST).is_file()

    def study(self) -> Study:
        """The study, checked anew."""
        return resolve(self.read("study.json") or {}, str(self.folder / "study.json"))

    def begun(self) -> Study:
        """The study as it was when the run began."""
        with sound(path := self.folder / ".study.json"):
            return Study.model_validate_json(path.read_text())

    def manifest(self) -> dict[str, Any] | None:
        """The last checkpoint's manifest."""
        found = self.read(MANIFEST)
        return None if found is None else holding(found, ("round", "files", "clients", "bytes"), self.folder / MANIFEST)

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add lines to metrics or clients."""
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(_finite(row)) + "\n" for row in rows)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """All complete lines of metrics or clients."""
        return list(self.lines(name))

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The same, one after the other."""
        with sound(path := self.folder / f"{name}.jsonl"), path.open() as file:
            yield from ({**json.loads(line)} for line in file if line.endswith("\n"))

    def checkpoint(self, server: Server, fleet: Fleet, states: Keeper) -> None:
        """Make everything up to this round safe."""
        folder, done = self.folder / "checkpoints", server.round
        moments = zip(fleet.columns["round"].tolist(), fleet.columns["stage"].tolist(), strict=True)
        accepted: dict[int, Moment] = {
            client: (int(round), int(stage)) for client, (round, stage) in enumerate(moments) if round > NEVER[0]
        }
        files = {"server": f"server-{done}.safetensors", "fleet": f"fleet-{done}.safetensors"}
        wire.save({"tensors": server.tensors, "memory": server.memory}, folder / files["server"])
        wire.save(fleet.columns, folder / files["fleet"])
        manifest = {
            "round": done,
            "files": files,
            "clients": states.checkpoint(folder, accepted),
            "bytes": {name: (self.folder / f"{name}.jsonl").stat().st_size for name in LINES},
        }
        self.write(MANIFEST, manifest)
        named = {*files.values(), *manifest["clients"].values()}  # type: ignore[attr-defined]
        for path in folder.iterdir():
            if path.name not in named:
                path.unlink()

    def tabulate(self) -> None:
        """Make all lines into parquet: at the end, since it goes through every one."""
        for name in LINES:
            write_parquet(self.lines, name, self.folder / f"{name}.parquet")

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, whole or not at all."""
        partial = self.folder / f".{name}.partial"
        with partial.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / name)

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder, if it is there."""
        path = self.folder / name
        if not path.is_file():
            return None
        with sound(path):
            return {**json.loads(path.read_text())}

    def restore(self, server: Server, fleet: Fleet, states: Keeper) -> Server:
        """Go back to the last checkpoint, or to the start if there is none; lines written after it are dropped."""
        manifest = self.manifest() or {"bytes": dict.fromkeys(LINES, 0)}
        for name in LINES:
            with sound(path := self.folder / f"{name}.jsonl"), path.open("r+b") as file:
                if file.seek(0, os.SEEK_END) < manifest["bytes"][name]:  # to cut it would fill it with zeros
                    raise InputError(f"{path} is damaged: it is shorter than {MANIFEST} says")
                file.truncate(manifest["bytes"][name])
        folder = self.folder / "checkpoints"
        states.restore(folder, manifest.get("clients", {}))
        if "files" not in manifest:
            return server
        path = folder / manifest["files"]["fleet"]
        fleet.columns = holding(wire.load(path), ("samples", "round", "stage"), path)
        return self.server(server.network)

    def server(self, network: Network) -> Server:
        """The server of the last checkpoint."""
        manifest = self.manifest() or {}
        path = self.folder / "checkpoints" / manifest["files"]["server"]
        saved = holding(wire.load(path, network.device), ("tensors", "memory"), path)
        return Server(manifest["round"], saved["tensors"], network, saved["memory"])


def _lock(file: IO[str]) -> bool:
    """Lock a file until it is closed, also by the process's end; whether that was possible. Forked workers do not
    inherit the lock. Where the system has no such locks, everything is possible."""
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError:
        return False
    return True


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON knows it: no NaN, no infinity."""
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}
