"""FedDSE: distribution-aware sub-model extraction by activations.

The client pulls the whole model, runs some of its samples through it, and keeps in every group the ceil(r m) units
that its data excite most (temperature 0), or draws them with probability softmax(h / T). It trains that sub-model and
uploads it with its indices. The score is the mean magnitude at the inputs of the layers that read a group: after the
non-linearity, and after the sum in residual stages. `cut.samples` limits the samples, `cut.score` takes other scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg
from fedloom.policies.cut import Cut, Scored
from fedloom.policies.merge import Mean, Merge
from fedloom.policies.objective import Masked, Objective
from fedloom.policies.share import Share, Static
from fedloom.registry import register


@register("method", "feddse", paper="FedDSE (sub-models by activations)")
@dataclass(frozen=True)
class FedDSE(FedAvg):
    """Weak clients train the units that their own data excite most."""

    cut: Cut = Scored(score="activation")
    objective: Objective = Masked()
    share: Share = Static()
    merge: Merge = Mean(by_class=True)
