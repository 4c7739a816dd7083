"""FedRolex: Alam et al., Model-heterogeneous federated learning with rolling sub-model extraction, NeurIPS 2022.

The window of units moves forward by one a round, as in the paper (the released code moves it backwards). A true counted
mean everywhere: the released code weighs norm and output tensors by a counter that grows within a round. The other
training details are HeteroFL's, so that methods differ in the cut alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg
from fedloom.policies.cut import Cut, Rolling
from fedloom.policies.merge import Mean, Merge
from fedloom.policies.objective import Masked, Objective
from fedloom.policies.share import Share, Static
from fedloom.registry import register


@register("method", "fedrolex", paper="Alam et al., NeurIPS 2022")
@dataclass(frozen=True)
class FedRolex(FedAvg):
    """Weak clients train a window of units that rolls on every round."""

    cut: Cut = Rolling()
    objective: Objective = Masked()
    share: Share = Static()
    merge: Merge = Mean(by_class=True)
