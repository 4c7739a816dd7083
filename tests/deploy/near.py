"""A deployment without a network: the server's half and real devices in this process, frames handed over as bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedloom import wire
from fedloom.deploy.device import Device
from fedloom.deploy.messages import read
from fedloom.deploy.serve import conduct
from fedloom.runs.store import Store
from tests.deploy.federation import Federation

Spoil = Callable[[dict[str, Any], dict[str, Any]], bytes]  # a request and its answer to what is sent instead


class Grid:
    """Hands requests to devices; what client_1 answers goes through `spoil`."""

    def __init__(self, federation: Federation, keys: dict[str, bytes], spoil: Spoil) -> None:
        folder = federation.folder
        self.devices = [
            Device(name, folder / "data" / f"{name}.npz", folder / "deploy" / "clients" / name / "state")
            for name in keys
        ]
        self.keys, self.spoil, self.replies = list(keys.values()), spoil, dict[str, Any]()

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(public_key=key, node_id=n, last_activated_at="") for n, key in enumerate(self.keys)]

    def push_messages(self, messages: list[Any]) -> list[str]:
        return [self._answered(message) for message in messages]

    def _answered(self, message: Any) -> str:
        number, request = message.metadata.dst_node_id, read(message.content, 2**31)
        answer = {"ticket": request["ticket"], "body": self.devices[number].answer(request["kind"], request["body"])}
        frame = self.spoil(request, answer) if number == 1 else wire.pack(answer)
        name = f"message {len(self.replies)}"
        self.replies[name] = SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id=name),
            has_error=lambda: False,
            content={"fedloom": {"frame": frame}},
        )
        return name

    def pull_messages(self, names: list[str]) -> list[Any]:
        return [self.replies[name] for name in names]


def near(federation: Federation, spoil: Spoil, **config: str) -> Store:
    """The folder of a run whose client_1 answers what `spoil` makes of its answers; `config` is the server's."""
    from flwr.supercore.task_identity import TaskIdentity

    from fedloom.deploy.roster import registered

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as a link would say

    keys = Path("deploy") / "server"
    here = os.getcwd()
    os.chdir(federation.folder)
    try:
        config = {"study": "study.toml", "keys": str(keys), "test": "data/test.npz", **config}
        return Store.open(federation.folder / conduct(Grid(federation, registered(keys), spoil), config))
    finally:
        os.chdir(here)
