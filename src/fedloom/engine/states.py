"""Clients' private state: versions of it, in memory and in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom import wire
from fedloom.types import NEVER, Moment

__all__ = ["States", "moment_of", "state_file"]


class States:
    """Versions of clients' private state. A version is proposed under a moment and counts once a task names it.

    With `history`, versions are there back to the last checkpoint: whoever lost newer ones elsewhere goes back to them.
    """

    def __init__(self, device: torch.device | str = "cpu", history: bool = True) -> None:
        self.device, self.history = device, history
        self._versions: dict[int, dict[Moment, dict[str, Any] | Path]] = {}
        self._written: set[str] = set()  # files that hold a version of ours; another run's leftovers do not count

    def load(self, client: int, accepted: Moment) -> dict[str, Any]:
        """The newest version that was accepted; newer ones belong to reports that never counted and are dropped."""
        versions = self._versions.get(client, {})
        for moment in [moment for moment in versions if moment > accepted]:
            del versions[moment]
        if not versions:
            return {}
        newest = max(versions)
        if not self.history:
            # That of the round before is in force again if this one is not finished.
            before = max((moment for moment in versions if moment[0] < newest[0]), default=newest)
            self._versions[client] = versions = {moment: versions[moment] for moment in {before, newest}}
        version = versions[newest]
        if isinstance(version, Path):
            version = versions[newest] = wire.load(version, self.device)
        return dict(version)

    def propose(self, client: int, moment: Moment, state: dict[str, Any]) -> None:
        """Remember a version that the client's report would bring into force."""
        self._versions.setdefault(client, {})[moment] = {name: _alone(value) for name, value in state.items()}

    def settle(self, client: int, accepted: Moment) -> tuple[Moment, dict[str, Any] | Path] | None:
        """The accepted version and its moment, if there is one; older ones are forgotten."""
        versions = self._versions.get(client, {})
        counted = [moment for moment in versions if moment <= accepted]
        if not counted:
            return None
        newest = max(counted)
        for moment in counted:
            if moment != newest:
                del versions[moment]
        return newest, versions[newest]

    def replace(self, client: int, moment: Moment, state: dict[str, Any]) -> None:
        """Forget what is known of a client: this is its state."""
        self._versions[client] = {moment: state}

    def checkpoint(self, folder: Path, accepted: Mapping[int, Moment]) -> dict[str, str]:
        """Write the accepted version of every client once, forget older ones, and name the files by client."""
        files = {}
        for client in sorted(self._versions):
            settled = self.settle(client, accepted.get(client, NEVER))
            if settled is None:
                continue
            moment, version = settled
            path = folder / state_file(client, moment)
            if path.name not in self._written:
                wire.save(version if isinstance(version, dict) else wire.load(version), path)
            self._written.add(path.name)
            files[str(client)] = path.name
        return files

    def restore(self, folder: Path, files: Mapping[str, str]) -> None:
        """Take over what a checkpoint names, nothing else; files are read when their client is next asked."""
        self._written, self._versions = set(files.values()), {}
        for client, name in files.items():
            self._versions[int(client)] = {moment_of(name): folder / name}


def _alone(value: Any) -> Any:
    """The value without the memory of clients that trained beside it: one of a stack would keep all of them."""
    if isinstance(value, Tensor):
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if isinstance(value, dict):
        return {name: _alone(each) for name, each in value.items()}
    return value


def state_file(client: int, moment: Moment) -> str:
    """The name of the file of a client's state.

    >>> state_file(7, (3, 0)), moment_of("client-7-3-0.safetensors")
    ('client-7-3-0.safetensors', (3, 0))
    """
    return f"client-{client}-{moment[0]}-{moment[1]}.safetensors"


def moment_of(name: str) -> Moment:
    """The moment that a state file's name tells."""
    *_, round, stage = Path(name).stem.split("-")
    return int(round), int(stage)
