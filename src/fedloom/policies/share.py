"""Which tensors travel? The rest are the client's own: kept full-size in its state, never in a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedloom.network import Network
from fedloom.registry import register

__all__ = ["AllTensors", "NotNorms", "Share"]


class Share(Protocol):
    """A rule that says which tensors stay with the client."""

    def private(self, network: Network) -> frozenset[str]:
        """Names of the tensors that never travel."""


@register("share", "all")
@dataclass(frozen=True)
class AllTensors:
    """Everything travels, statistics of norm layers included."""

    def private(self, network: Network) -> frozenset[str]:
        """Nothing stays."""
        return frozenset()


@register("share", "fedbn", paper="Li et al., FedBN, ICLR 2021")
@dataclass(frozen=True)
class NotNorms:
    """Norm layers stay with the client: scale, shift, statistics and counter, by the type of the layer."""

    def private(self, network: Network) -> frozenset[str]:
        """All tensors of norm layers."""
        return network.norms
