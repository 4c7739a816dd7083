"""Distillation in series: how much is lost when every teacher was a student (FedRKD, section 3.4.2 and figure 3.5).

The first round trains a model on all training data. In each later round a new model, with first weights of its own,
learns from the one of the round before; then it is the teacher. So the curve of the global accuracy over rounds is the
knowledge that is left after so many hops. No federation: one place holds all data. `objective.hard = 0` lets students
learn from their teacher alone; with labels, each one can make good what its teacher had lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedloom.client import Client
from fedloom.methods.bounds import in_one_place
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.peers import distilling, taught
from fedloom.methods.unasked import refuse
from fedloom.policies.distil import Features
from fedloom.policies.objective import Objective
from fedloom.policies.select import First, Select
from fedloom.registry import register
from fedloom.seeds import seed_of
from fedloom.types import Report, Task, Work


@register("method", "serial", paper="FedRKD, section 3.4.2")
@dataclass(frozen=True)
class Serial(FedAvg):
    """Students in a row: each round's model is new and learns from that of the round before."""

    select: Select = First()
    objective: Objective = Features()
    pooled: ClassVar[bool] = True
    trainers: ClassVar[tuple[str, ...]] = ("reference", "taped", "graphs")  # one who trains: nothing to stack

    def check(self) -> None:
        """It needs a teacher's objective; one place holds all data."""
        super().check()
        in_one_place(self.select, "serial")
        refuse(self, ("cut", "start", "merge"), "trains whole new models in one place and joins nothing")
        distilling(self.objective, "serial")

    def work(self, client: Client, task: Task) -> Work[Report]:
        """A teacher first, then one student after another."""
        objective, teacher = distilling(self.objective, "serial"), (yield from self.start(client))
        later = task.round > 0
        student = (
            client.network.initial(seed_of(client.seed, task.round, 0, client.id, "student")) if later else teacher
        )
        fit = yield from taught(objective, client, student, teacher, float(later), self.plan(client))
        return self.report(client, fit)
