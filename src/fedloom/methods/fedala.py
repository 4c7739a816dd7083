"""FedALA: Zhang et al., FedALA: adaptive local aggregation for personalized federated learning, AAAI 2023.

FedAvg whose clients start between their own last model and the global one (`policies/adaptive.py`). As published: p = 2
counts tensors (the last linear layer), eta = 1, weights are learned on a row of neighbours that makes up 80 % of the
data, in order, and have settled when the losses of the last batch of ten passes differ by less than 0.1 (the code's
number; the paper says 0.01). Statistics of norm layers stay at the client. A client is judged by the model it starts
from. Differences: a limit of passes, and clients that are not selected learn no weights in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.fedavg import FedAvg
from fedloom.policies.adaptive import Adaptive
from fedloom.policies.share import Parameters, Share
from fedloom.policies.start import Start
from fedloom.registry import register


@register("method", "fedala", paper="Zhang et al., AAAI 2023")
@dataclass(frozen=True)
class FedALA(FedAvg):
    """Clients start from a learned mixture of their own and the global model."""

    start: Start = Adaptive(top=2, count="tensors", block=True, losses="last_batch")
    share: Share = Parameters()
