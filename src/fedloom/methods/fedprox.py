"""FedProx: Li et al., Federated optimization in heterogeneous networks, MLSys 2020.

Equation 2: the local objective plus mu / 2 ||w - w_t||^2, from the first step of every round and over all trained
tensors. Known ports differ: some take the norm without the square, some skip the first batch of each epoch. The paper's
clients that do less work are the study's (`train.uneven`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from fedloom.client import Client
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.objective import Objective, Proximal, Sum
from fedloom.registry import register
from fedloom.types import Tensors


@register("method", "fedprox", paper="Li et al., MLSys 2020")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients are held near the global model."""

    mu: Annotated[float, Ge(0), "weight of the proximal term, mu in equation 2"] = 0.01

    def loss(self) -> Objective:
        """Equation 2."""
        return Sum(self.objective, Proximal(self.mu))

    def fixed(self, client: Client, tensors: Tensors) -> dict[str, Any]:
        """The anchor is where the client starts."""
        return super().fixed(client, tensors) | {"anchor": client.trained(tensors)}
