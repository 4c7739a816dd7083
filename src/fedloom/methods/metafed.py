"""MetaFed: Chen et al., MetaFed: federated learning among federations with cyclic knowledge distillation, TNNLS 2023.

No server; participants in a fixed circle, one after another. Warm-up: everybody trains alone. Common knowledge, round
after round: a participant whose model was never above `threshold` on its validation part takes over its predecessor's
and trains it; the others keep theirs and learn from the predecessor's features (weight lambda0). Personal knowledge:
the last participant's model teaches everybody, with

    lambda = lambda0 / 10 * 10^min(1, 5 (acc_teacher - acc_own)), 0 if the teacher is not better and below `floor`.

Personalisation is the model that a participant really uses (`final`), so it is made anew for every evaluation from the
common knowledge so far; the authors do it once, at the end. Its traffic is in the ledger under `evaluate`. Features are
those before the last layer, after their non-linearity.

`mode = "reference"` is the authors' code where it departs from the paper: the predecessor's model is copied at the
start of every local epoch, so that only the last epoch counts, and the model before personalisation is used where the
personal one is not better on the validation part. Not taken over: its second pass for features, which updates the
statistics of batch norm twice a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from fedloom.client import Client
from fedloom.encoding import dense
from fedloom.errors import InputError
from fedloom.methods.peers import Peer, accuracy, distilling, taught
from fedloom.policies.distil import Features
from fedloom.policies.objective import Objective
from fedloom.policies.topology import Chain, Ring, Stages, Topology
from fedloom.registry import name_of, register
from fedloom.types import Fitted, Plan, Report, Server, Task, Tensors, Work

__all__ = ["MetaFed", "personal_strength"]


def personal_strength(teacher: float, own: float, lambda0: float = 1.0, floor: float = 0.5) -> float:
    """How much the last participant's model counts, from accuracies as shares.

    >>> [round(personal_strength(0.6 + gap, 0.6, floor=0.3), 3) for gap in (0.2, 0.0, -0.2)]
    [1.0, 0.1, 0.01]
    """
    return 0.0 if teacher <= own and teacher < floor else lambda0 * 10 ** min(1.0, 5 * (teacher - own)) / 10


@register("method", "metafed", paper="Chen et al., MetaFed, TNNLS 2023")
@dataclass(frozen=True)
class MetaFed(Peer):
    """A model is handed around a circle and gathers what is common; at the end it teaches everybody."""

    mode: Annotated[Literal["paper", "reference"], "as printed, or as the authors' code does it"] = "paper"
    threshold: Annotated[float, Ge(0), "validation accuracy above which a participant keeps its own model"] = 0.6
    lambda0: Annotated[float, Ge(0), "weight of a teacher"] = 1.0
    floor: Annotated[float, Ge(0), "accuracy below which a teacher that is not better teaches nothing personal"] = 0.5
    warm_up: Annotated[int, Ge(0), "epochs that everybody trains alone before the first round"] = 30
    topology: Topology = Chain()
    objective: Objective = Features(layers=1, side="input")
    validates: ClassVar[bool] = True

    def check(self) -> None:
        """It needs a teacher's objective, and one predecessor for everybody."""
        super().check()
        distilling(self.objective, "metafed")
        if not isinstance(self.topology, Chain | Ring):
            raise InputError(
                f"metafed hands models around a circle and learns from one teacher at a time; got topology "
                f"'{name_of(self.topology)}', allowed: chain, ring"
            )

    def stages(self, round: int, members: Sequence[int]) -> Stages:
        """Alone first, once; then the circle."""
        alone = [[(member, member) for member in members]] if round == 0 and self.warm_up else []
        return alone + self.topology.stages(round, members)

    def work(self, client: Client, task: Task) -> Work[Report]:
        """The warm-up of who never trained; else one station of the circle."""
        own, fits = client.whole, list[Fitted]()
        if self.warm_up and "own" not in client.state:
            train = replace(task.train, epochs=self.warm_up, steps=None)
            plan = client.plan(train=train, purpose="warm up")
            fits.append((yield from taught(distilling(self.objective, "metafed"), client, own, own, 0.0, plan)))
        else:
            # Alone in a circle, one is one's own teacher; only the first of the first round has none.
            teachers = [self.sent_by(report, own) for report in task.inbox.values()] or [own]
            weight = self.lambda0 if task.inbox or task.round else 0.0
            fits.append((yield from self._learn(client, own, teachers[0], weight, client.plan())))
        (reached,) = yield from accuracy(client, fits[-1].tensors)
        client.state["good"] = bool(client.state.get("good", False) or reached > self.threshold)
        return self.handed(client, fits, validation_accuracy=reached, round=task.round, stage=task.stage)

    def final(self, client: Client, task: Task) -> Work[Tensors]:
        """Personalised by the last participant's model."""
        own, sent = client.whole, client.received()
        if not sent or "own" not in client.state:
            return own
        teacher = own | sent
        theirs, mine = yield from accuracy(client, teacher, own)
        weight = personal_strength(theirs, mine, self.lambda0, self.floor)
        fit = yield from self._learn(client, own, teacher, weight, client.plan(purpose="personal"))
        if self.mode == "reference":
            (after,) = yield from accuracy(client, fit.tensors)
            return fit.tensors if after > mine else own
        return fit.tensors

    def evaluation(self, server: Server) -> Tensors:
        """The model of the last participant in the circle who got through: the newest there is."""
        last = server.memory.get("last", {})
        if not last:
            return {}
        made = {client: (report.numbers["round"], report.numbers["stage"], client) for client, report in last.items()}
        return {name: dense(value) for name, value in last[max(made, key=made.__getitem__)].tensors.items()}

    def _learn(self, client: Client, own: Tensors, teacher: Tensors, weight: float, plan: Plan) -> Work[Fitted]:
        """By distance to the teacher for who was good once, by taking the teacher over for the others."""
        if client.state.get("good", False):
            return (yield from taught(distilling(self.objective, "metafed"), client, own, teacher, weight, plan))
        if self.mode == "reference" and teacher is not own:
            plan = replace(plan, steps=plan.steps[-plan.epoch :], variants=plan.variants[-plan.epoch :])
        return (yield from taught(distilling(self.objective, "metafed"), client, teacher, teacher, 0.0, plan))
