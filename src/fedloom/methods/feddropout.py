"""Federated Dropout: Caldas et al., Expanding the reach of federated learning, arXiv:1812.07210.

A fresh random choice of units for every client and round. One choice a residual stream: released baselines draw each
convolution on its own, so that additions mix different channels and even a full-size client computes another function.
The other training details are HeteroFL's, so that methods differ in the cut alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg
from fedloom.policies.cut import Cut, Random
from fedloom.policies.merge import Mean, Merge
from fedloom.policies.objective import Masked, Objective
from fedloom.policies.share import Share, Static
from fedloom.registry import register


@register("method", "feddropout", paper="Caldas et al., arXiv:1812.07210")
@dataclass(frozen=True)
class FedDropout(FedAvg):
    """Weak clients train random units, drawn anew each round."""

    cut: Cut = Random()
    objective: Objective = Masked()
    share: Share = Static()
    merge: Merge = Mean(by_class=True)
