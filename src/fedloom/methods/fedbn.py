"""FedBN: Li et al., FedBN: federated learning on non-IID features via local batch normalization, ICLR 2021.

Norm layers stay at the client, found by their type (the original code matches "bn" in a tensor's name, which misses
other norms and differently named ones). The original averages with equal weights: `merge.weights = "equal"`; ours are
the clients' samples, as everywhere. The server's norm layers stay at their initial values, so there is no global model.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg
from fedloom.policies.share import NotNorms, Share
from fedloom.registry import register


@register("method", "fedbn", paper="Li et al., ICLR 2021")
@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg in which every client keeps its own norm layers."""

    share: Share = NotNorms()
