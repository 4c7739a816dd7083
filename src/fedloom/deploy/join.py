"""The client half of a deployment: join a server, answer it, leave when the run is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom import __version__
from fedloom.deploy.device import Device
from fedloom.deploy.folder import ClientSettings, settings
from fedloom.deploy.messages import read
from fedloom.errors import InputError
from fedloom.runs.experiment import Watch

__all__ = ["join"]


def join(
    name: str | None,
    data: Path,
    keys: Path | None = None,
    *,
    server: str | None = None,
    capacity: float | None = None,
    allow: tuple[str, ...] = (),
    device: str = "cpu",
    validation: float = 0.1,
    stay: bool = False,
    study: Path | None = None,
    least: int = 0,
    watch: Watch = lambda row: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Be a client until the run is over (or, with `stay`, until stopped); with a study, a peer without a server."""
    if keys is None:
        if name is None:
            raise InputError("join needs --name, or --keys with the client's folder")
        keys = Path("deploy") / "clients" / name
    own = settings(keys / "client.toml", ClientSettings)
    name = name or own.name
    if not name:
        raise InputError(f"{keys / 'client.toml'} does not say the client's name; give --name")
    config: dict[str, Any] = {
        "name": name, "data": str(data), "keys": str(keys), "allow": " ".join((*own.allow, *allow)),
        "capacity": own.capacity if capacity is None else capacity, "device": device, "validation": validation,
    }  # fmt: skip
    if study is not None:
        from fedloom.deploy.ring import join_peers

        own_device = Device(
            name, data, keys / "state", capacity=float(config["capacity"]), allow=tuple(str(config["allow"]).split()),
            device=device, validation=validation,
        )  # fmt: skip
        say(own_device.described)
        folder = join_peers(study, name, keys, own_device, least=least, watch=watch, say=say)
        say(f"the run is over: {folder}" if folder else "the run is over")
        return
    from fedloom.deploy.apps import LARGEST, client_app, describe
    from fedloom.deploy.node import Node

    if not (server or own.server):
        raise InputError(f"{keys / 'client.toml'} does not say where the server is; give --server HOST:PORT")
    address = server or own.server
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"the server's address is HOST:PORT; got '{address}'")
    node = Node(address, keys, config, say)
    say(describe(config))

    def over(message: Any) -> bool:
        kind = message.metadata.message_type
        if kind == "query.hello":
            theirs = read(message.content, LARGEST).get("body", {}).get("fedloom")
            if theirs != __version__:
                raise InputError(
                    f"the server runs fedloom {theirs}, this client {__version__}; install the same version on both"
                )
        if kind == "query.end":
            say("the run is over")
        return kind == "query.end" and not stay

    node.serve(client_app, over)
