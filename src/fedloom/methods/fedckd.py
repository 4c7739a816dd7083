"""FedCKD: the client distils instead of replacing (algorithms 3.3.1 and 3.3.2).

A client whose own model is better than mu0 on its validation part keeps it and learns from the global model: equation
3.2, cross-entropy plus squared distance of features. The others replace theirs and train as under FedAvg. The server
averages by training samples. A client uses its own model, so local evaluation is that of own models.

Ours: the distance is a mean over a layer's features (`objective.reduction = "sum"` for the formula as printed, which
diverges on wide layers at the printed rate). Under a cut, own model and teacher are cut like the received one; with
`objective.adapter`, a client that cuts for itself learns from the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from annotated_types import Ge

from fedloom.client import Client
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.peers import accuracy, distilling, taught
from fedloom.policies.cut import narrow
from fedloom.policies.distil import Features
from fedloom.policies.objective import Objective
from fedloom.registry import register
from fedloom.types import Report, Task, Tensors, Work


@register("method", "fedckd", paper="FedCKD (client-side distillation)")
@dataclass(frozen=True)
class FedCKD(FedAvg):
    """Clients that do well keep their model and learn from the global one."""

    mu0: Annotated[float, Ge(0), "validation accuracy above which a client keeps its model; above 1: FedAvg"] = 0.5
    objective: Objective = Features()
    validates: ClassVar[bool] = True

    def check(self) -> None:
        """It needs a teacher's objective."""
        super().check()
        distilling(self.objective, "fedckd")

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Algorithm 3.3.2."""
        objective, sent = distilling(self.objective, "fedckd"), (yield from self.start(client))
        received, where = yield from narrow(self.cut, client, sent)
        own = self._own(client, received)
        own = client.network.units.take(own, where) if where else own
        (reached,) = yield from accuracy(client, own)
        keeps, teacher = reached > self.mu0, sent if objective.widens else received
        fit = yield from taught(
            objective, client, own if keeps else received, teacher, 1.0 if keeps else 0.0, self.plan(client)
        )
        client.keep(fit.tensors, where)
        report = self.report(client, fit, where)
        return replace(report, numbers={**report.numbers, "validation_accuracy": reached, "kept": float(keeps)})

    def final(self, client: Client, task: Task) -> Work[Tensors]:
        """The own model, once there is one."""
        started = yield from self.start(client)
        return client.used(self._own(client, started)) if "own" in client.state else started

    def _own(self, client: Client, like: Tensors) -> Tensors:
        own = client.own(frozenset(like))
        return {name: own[name] for name in like}
