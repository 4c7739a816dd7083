"""FedAvg with an optimiser at the server: FedAvgM (Hsu et al., 2019), FedAdam and FedYogi (Reddi et al., ICLR 2021).

They are one composition: FedAvg with another merge, whose settings are the study's [merge] section.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg
from fedloom.policies.merge import Merge
from fedloom.policies.server import Adaptive, Momentum
from fedloom.registry import register


@register("method", "fedavgm", paper="Hsu et al., arXiv:1909.06335")
@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum at the server."""

    merge: Merge = Momentum()


@register("method", "fedadam", paper="Reddi et al., ICLR 2021")
@dataclass(frozen=True)
class FedAdam(FedAvg):
    """FedAvg with Adam at the server."""

    merge: Merge = Adaptive()


@register("method", "fedyogi", paper="Reddi et al., ICLR 2021")
@dataclass(frozen=True)
class FedYogi(FedAvg):
    """FedAvg with Yogi at the server."""

    merge: Merge = Adaptive(yogi=True)
