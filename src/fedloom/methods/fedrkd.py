"""FedRKD: a ring without a server, its direction turned around every round (algorithm 3.4.1).

Everybody trains alone once. Then each round has K - 1 hops, in each of which all hand their model to the next at once:
clockwise from j to j + 1 in the first round, back in the second, as the text says (the algorithm writes the opposite
sign). Who receives a model measures it and its own on its own validation part and learns from it with weight

    lambda = lambda0 * 10^(min(1, 10 (acc_teacher - acc_own)) - 1)      (equation 3.6), 0 if the teacher is worse.

Every hop trains as long as the study's [train] says (ours; the paper does not say). With another topology the same rule
holds for every model that is received, one after another. A ring of one trains once and then changes nothing. Who
missed the first round starts from the common initial model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from fedloom.client import Client
from fedloom.methods.peers import Peer, accuracy, distilling, taught
from fedloom.policies.distil import Features
from fedloom.policies.objective import Objective
from fedloom.policies.topology import Ring, Stages, Topology
from fedloom.registry import register
from fedloom.types import Fitted, Report, Task, Work

__all__ = ["FedRKD", "strength"]


def strength(teacher: float, own: float, lambda0: float = 1.0) -> float:
    """Equation 3.6, from accuracies as shares.

    >>> [round(strength(*pair), 4) for pair in ((0.9, 0.8), (0.95, 0.9), (0.7, 0.7), (0.7, 0.71))]
    [1.0, 0.3162, 0.1, 0.0]
    """
    return 0.0 if teacher < own else lambda0 * 10 ** (min(1.0, 10 * (teacher - own)) - 1)


@register("method", "fedrkd", paper="FedRKD (two-way ring distillation)")
@dataclass(frozen=True)
class FedRKD(Peer):
    """Models travel around a ring, one way and then the other, and everybody learns from those that are better."""

    lambda0: Annotated[float, Ge(0), "weight of a teacher that is better by 0.1 or more"] = 1.0
    topology: Topology = Ring()
    objective: Objective = Features()
    validates: ClassVar[bool] = True

    def check(self) -> None:
        """It needs a teacher's objective."""
        super().check()
        distilling(self.objective, "fedrkd")

    def stages(self, round: int, members: Sequence[int]) -> Stages:
        """Alone first, once; then the hops."""
        alone = [[(member, member) for member in members]] if round == 0 else []
        hops = self.topology.stages(round, members) if len(members) > 1 else []
        return alone + hops

    def work(self, client: Client, task: Task) -> Work[Report]:
        """One hop, or the training alone."""
        objective, own, weight = distilling(self.objective, "fedrkd"), client.whole, 0.0
        fits: list[Fitted] = []
        for number, teacher in enumerate([self.sent_by(task.inbox[each], own) for each in sorted(task.inbox)] or [own]):
            if task.inbox:
                theirs, mine = yield from accuracy(client, teacher, own)
                weight = strength(theirs, mine, self.lambda0)
            plan = client.plan(purpose=f"fit {number}" if number else "fit")
            fits.append((yield from taught(objective, client, own, teacher, weight, plan)))
            own = fits[-1].tensors
        return self.handed(client, fits, **{"lambda": weight})
