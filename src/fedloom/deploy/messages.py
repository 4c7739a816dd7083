"""What travels between server and client, as Flower messages.

A Flower message holds one record with one frame of `fedloom.wire`: plain data, arrays with names, shapes and types, no
code. Every request carries a fresh ticket that its answer must repeat, so that an old answer cannot be sent again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import torch

from fedloom import wire

# Before Flower is first imported: no telemetry, no look for updates.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

__all__ = ["KINDS", "PROTOCOL", "SMALL", "Letter", "body_of", "read", "write"]

PROTOCOL = 1
SMALL = 2**20  # bytes of a message without a model
# hello: who are you? setup: this is the study. work, ask: a task. end: the run is over.
KINDS = {"hello": "query.hello", "setup": "query.setup", "work": "train.work", "ask": "query.ask", "end": "query.end"}


@dataclass(frozen=True)
class Letter:
    """A request before it is sent."""

    kind: str
    body: dict[str, Any]
    ticket: str = field(default_factory=lambda: token_hex(16))

    @property
    def frame(self) -> bytes:
        """Its bytes."""
        return wire.pack({"kind": self.kind, "ticket": self.ticket, "body": self.body})


def write(frame: bytes) -> Any:
    """A frame as the content of a Flower message."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({"fedloom": ConfigRecord({"frame": frame})})


def read(content: Any, limit: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The tree in a Flower message, tensors on a device; WireError for anything else, and for anything too large."""
    try:
        frame = content["fedloom"]["frame"]
    except (KeyError, TypeError) as error:
        raise wire.WireError("a message holds no frame") from error
    if not isinstance(frame, bytes):
        raise wire.WireError("a message holds no frame")
    if len(frame) > limit:
        raise wire.WireError(f"a message has {len(frame)} bytes, the limit is {limit}")
    tree = wire.unpack(frame, device)
    if not isinstance(tree, dict):
        raise wire.WireError("a message holds no dictionary")
    return tree


def body_of(tree: dict[str, Any], ticket: str) -> dict[str, Any]:
    """What an answer says, if it answers this request."""
    if tree.get("ticket") != ticket:
        raise wire.WireError("it answers another request: an old report was sent again")
    body = tree.get("body")
    if not isinstance(body, dict):
        raise wire.WireError("an answer has no body")
    return body
