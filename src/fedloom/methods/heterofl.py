"""HeteroFL: Diao et al., HeteroFL: computation and communication efficient federated learning, ICLR 2021.

A client of capacity r trains the first ceil(r m) units of every group. Every element is averaged over those who trained
it; rows of the output layer over those who hold the class. Training uses masked cross-entropy, the scaler and static
batch norm, each a switch of its own (`objective.fill`, `objective.scaler`, `share`). We weigh clients by their samples
(the paper's code: equally, `merge.weights = "equal"`), and a client's capacity is fixed (there it may be redrawn).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg
from fedloom.policies.cut import Cut, Prefix
from fedloom.policies.merge import Mean, Merge
from fedloom.policies.objective import Masked, Objective
from fedloom.policies.share import Share, Static
from fedloom.registry import register


@register("method", "heterofl", paper="Diao et al., ICLR 2021")
@dataclass(frozen=True)
class HeteroFL(FedAvg):
    """Weak clients train the first units of every layer."""

    cut: Cut = Prefix()
    objective: Objective = Masked()
    share: Share = Static()
    merge: Merge = Mean(by_class=True)
