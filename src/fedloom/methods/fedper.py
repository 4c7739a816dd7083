"""FedPer: Arivazhagan et al., Federated learning with personalization layers, arXiv:1912.00818.

The last layers (`share.head`, K_P in the paper) stay with the client, everything below is FedAvg's; both are trained
together. The server's head stays at its first values, so there is no global model.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg
from fedloom.policies.share import Body, Share
from fedloom.registry import register


@register("method", "fedper", paper="Arivazhagan et al., arXiv:1912.00818")
@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedAvg in which every client keeps its own last layers."""

    share: Share = Body()
