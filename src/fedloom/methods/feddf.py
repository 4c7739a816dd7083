"""FedDF: Lin et al., Ensemble distillation for robust model fusion in federated learning, NeurIPS 2020.

Clients train the server's model of their architecture. The server averages the models of each
architecture, and every average then learns, on public images without labels, what all received models say together:
KL(softmax(mean of their logits) || student), Adam. Teachers are run as in evaluation.

The paper's code anneals the rate over 10,000 steps, looks at validation data of the server's every 100 and keeps the
best; here public images need no labels, so the steps are counted and the rate stays. Its average is uniform
(`merge.weights = "equal"`); ours is by samples, as FedAvg's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedloom.encoding import dense
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.consensus import Agree, Answers, divergence, lesson, numbered
from fedloom.policies.cut import Whole
from fedloom.policies.merge import Mean
from fedloom.policies.share import AllTensors
from fedloom.registry import register
from fedloom.types import Measure, Server, Tensors, Train


@register("method", "feddf", paper="Lin et al., NeurIPS 2020")
@dataclass(frozen=True)
class FedDF(FedAvg):
    """The average of each architecture learns from all clients' models together, on public images."""

    steps: Annotated[int, Ge(1), "steps of the server's distillation, every round and architecture"] = 1000
    lr: Annotated[float, Gt(0), "its rate, with Adam"] = 1e-3
    batch_size: Annotated[int, Ge(1), "its batch size"] = 64
    clip: Annotated[float, Gt(0), "largest norm of its gradients"] = 5.0
    public: ClassVar[bool] = True
    mixes: ClassVar[bool] = True

    def check(self) -> None:
        """Teachers are whole models, and their average is one."""
        super().check()
        if not isinstance(self.cut, Whole) or self.share != AllTensors():
            raise InputError("feddf learns from whole models; leave [cut] and [share] out")
        if type(self.merge) is not Mean or self.merge.by_class:
            raise InputError("feddf starts from the mean of whole models; [merge] takes 'mean' without by_class")

    def round(self, server: Server, fleet: Fleet) -> Server:
        """Train, average by architecture, distil from everybody."""
        sides = [server.of(kind) for kind in range(len(fleet.networks))]
        means, public = [self.merge.begin(side) for side in sides], numbered(fleet.home.public)
        # By architecture, so that the tensors of each travel to a worker once.
        cohort = sorted(self.select(fleet, server), key=fleet.kind)
        total, count = torch.zeros((), dtype=torch.float64, device=server.network.device), 0
        for report in fleet.run(self.task(sides[fleet.kind(client)], fleet, client) for client in cohort):
            kind = fleet.kind(report.client)
            means[kind].add(report)
            teacher = sides[kind].tensors | {name: dense(value) for name, value in report.tensors.items()}
            (read,) = fleet.solve(Measure(teacher, Answers(len(public)), public, kind=kind))
            total, count = total + read["logits"], count + 1
        students = [mean.result() for mean in means]
        if count:
            students = self.distilled(fleet, students, (total / count).to(server.network.dtype))
        if len(students) > 1:
            server.memory["models"] = students[1:]
        return server.next(students[0])

    def distilled(self, fleet: Fleet, students: Sequence[Tensors], table: Tensor) -> list[Tensors]:
        """Every student after it has learnt the joint logits of the public images."""
        train = Train(self.lr, self.batch_size, steps=self.steps, optimizer="adam", clip=self.clip)
        home = replace(fleet.home, task=replace(fleet.home.task, round=fleet.round))
        public = numbered(home.public)
        lessons = [
            lesson(home, student, table, public, Agree(divergence), train, kind)
            for kind, student in enumerate(students)
        ]
        return [fit.tensors for fit in fleet.solve(*lessons)]
