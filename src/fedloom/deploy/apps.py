"""An ordinary Flower ServerApp and an ordinary ClientApp: `fedloom serve` and `fedloom join` run just these.

Flower's own tools may run them too (`flower-superlink`, `flower-supernode`, `flwr run`). Then the ServerApp finds its
settings in the run's configuration (`study`, `keys`, `min`, `test`, `public`) and the ClientApp in the node's
(`name`, `data`, `keys`, `capacity`). Paths are those of the machine on which the app runs.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from fedloom.deploy.device import Device
from fedloom.deploy.folder import Capacity, ClientSettings, extra, settings
from fedloom.deploy.messages import read, write
from fedloom.errors import InputError
from fedloom.settings import value_of

try:
    from flwr.app import ConfigRecord, Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise extra("deploy", error) from error

from fedloom import wire

__all__ = ["client_app", "describe", "device_of", "server_app"]

LARGEST = 2**31  # bytes of a request that a device would read

client_app = ClientApp()
server_app = ServerApp()


@lru_cache(maxsize=4)
def device_of(
    name: str, data: str, keys: str, capacity: float, allow: tuple[str, ...], device: str, validation: float
) -> Device:
    """The device that these settings describe, made once a process."""
    return Device(
        name, Path(data), Path(keys) / "state", capacity=capacity, allow=allow, device=device, validation=validation
    )


def _device(config: dict[str, Any]) -> Device:
    if not {"name", "data", "keys"} <= config.keys():
        raise InputError("a node of fedloom needs name, data and keys in its configuration (--node-config)")
    own = settings(Path(str(config["keys"])) / "client.toml", ClientSettings)
    allow = tuple(str(config["allow"]).split()) if config.get("allow") else own.allow
    capacity = value_of("capacity", config.get("capacity", own.capacity), Capacity)
    rest = str(config.get("device", "cpu")), value_of("validation", config.get("validation", 0.1), float)
    return device_of(str(config["name"]), str(config["data"]), str(config["keys"]), capacity, allow, *rest)


def describe(config: dict[str, Any]) -> str:
    """Load the device's data now, so that whatever is wrong with them is said at once; what they are, in a line."""
    return _device(config).described


@client_app.query("hello")
@client_app.query("setup")
@client_app.query("ask")
@client_app.query("end")
@client_app.train("work")
def answer(message: Message, context: Context) -> Message:
    """Whatever the server asks, answered by the device."""
    device = _device(dict(context.node_config))
    tree = read(message.content, LARGEST, device.device)
    body = device.answer(str(tree.get("kind")), tree.get("body") or {})
    return Message(write(wire.pack({"ticket": tree.get("ticket"), "body": body})), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """A study over the grid."""
    from fedloom.deploy.serve import conduct

    folder = conduct(grid, dict(context.run_config))
    context.state["fedloom"] = ConfigRecord({"run_dir": str(folder)})
