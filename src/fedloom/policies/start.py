"""How does a client start? From what it received, from what it has, or from a mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedloom.client import Client
from fedloom.network import Network
from fedloom.registry import register
from fedloom.types import Tensors, Work

__all__ = ["Replace", "Start"]


class Start(Protocol):
    """A rule that makes the tensors a client starts from; may ask for fits and measures."""

    def __call__(self, client: Client) -> Work[Tensors]:
        """The starting tensors, in the network's order."""

    def keeps(self, network: Network) -> frozenset[str]:
        """Names of the trained tensors that the client remembers for its next start."""


@register("start", "replace")
@dataclass(frozen=True)
class Replace:
    """The received tensors replace the client's; those that never travel are its own."""

    def keeps(self, network: Network) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    def __call__(self, client: Client) -> Work[Tensors]:
        """Received and own tensors together, the own ones cut like the received."""
        received = client.received()
        names = client.task.only or client.network.names
        own = client.own(frozenset(names) - received.keys())
        if client.task.where:
            own = client.network.units.take(own, client.task.where)
        return {name: received[name] if name in received else own[name] for name in names}
        yield
