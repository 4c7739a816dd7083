"""What methods have in common whose participants own their models: no global one, teachers, decisions by validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedloom.client import Client
from fedloom.copies import to_host
from fedloom.encoding import dense
from fedloom.errors import InputError
from fedloom.method import Method
from fedloom.methods.unasked import refuse
from fedloom.policies.distil import Distilling, lesson
from fedloom.policies.objective import Objective
from fedloom.readings import Accuracy
from fedloom.registry import name_of
from fedloom.steps import Descent
from fedloom.types import Fit, Fitted, Measure, Plan, Report, Server, Task, Tensors, Work

__all__ = ["Peer", "accuracy", "distilling", "taught"]


@dataclass(frozen=True)
class Peer(Method):
    """Every participant has a whole model of its own; it hands on what is shared of it."""

    def check(self) -> None:
        """Everybody trains a whole model, and no server has one."""
        super().check()
        refuse(self, ("cut",), "trains whole models and cannot run under a cut")
        refuse(self, ("filter",), "has no server's model, whose changes a filter is about")
        refuse(self, ("start", "merge"), "has no server whose model clients start from or report to")
        if self.serverless:
            refuse(self, ("select",), "has no server that selects, and everybody who is there takes part")

    def sent_by(self, report: Report, own: Tensors) -> Tensors:
        """A neighbour's model; what it does not share is one's own."""
        return own | {name: dense(value) for name, value in report.tensors.items()}

    def handed(self, client: Client, fits: Sequence[Fitted], **told: float) -> Report:
        """The model after its last fit, kept as the own one, and what all fits tell together."""
        samples = sum(fit.samples for fit in fits)
        numbers = {
            "loss": sum(fit.loss * fit.samples for fit in fits) / samples,
            "squared_loss": sum(fit.squared_loss * fit.samples for fit in fits) / samples,
            "steps": sum(fit.steps for fit in fits),
            "samples": samples,
        }
        client.keep(fits[-1].tensors)
        return replace(self.report(client, fits[-1]), numbers=numbers | told)

    def final(self, client: Client, task: Task) -> Work[Tensors]:
        """The own model."""
        return client.whole
        yield

    def evaluation(self, server: Server) -> Tensors:
        """Nothing travels."""
        return {}

    def model(self, server: Server) -> Tensors | None:
        """There is no global model."""
        return None


def distilling(objective: Objective, name: str) -> Distilling:
    """The objective of a method that cannot do without a teacher."""
    if not isinstance(objective, Distilling):
        raise InputError(
            f"{name} learns from a teacher, so its objective is features or soft; got '{name_of(objective)}'. "
            "What it is added to is objective.to"
        )
    return objective


def accuracy(client: Client, *models: Tensors) -> Work[list[float]]:
    """How good models are on the client's validation part: shares of right answers."""
    read = yield tuple(Measure(each, Accuracy(), client.validation) for each in models)
    return [float(right.sum()) / len(client.validation) for right in to_host([each["right"] for each in read])]


def taught(
    objective: Distilling, client: Client, student: Tensors, teacher: Tensors, strength: float, plan: Plan
) -> Work[Fitted]:
    """A fit that learns from data and from a teacher, or from data alone where the teacher counts nothing."""
    train = client.task.train
    if not strength:
        fit: Fitted = yield Fit(student, Descent.of(objective.plain, train), plan, client.fixed())
        return fit
    maps = objective.adapters(client, student, teacher)
    fixed = client.fixed(**lesson(client, teacher, strength))
    fit = yield Fit({**student, **maps}, Descent.of(objective, train), plan, fixed)
    if maps:
        client.state["adapter"] = {name: fit.tensors[name] for name in maps}
    return replace(fit, tensors={name: fit.tensors[name] for name in student})
