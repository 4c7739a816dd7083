"""Sketch of FedRKD: a ring without a server; students learn from what the neighbour sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.client import Client
from fedloom.encoding import dense
from fedloom.method import Method
from fedloom.policies.objective import CrossEntropy, Objective
from fedloom.policies.topology import Ring, Stages, Topology
from fedloom.readings import Accuracy
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Batch, Fit, Fixed, Measure, Model, Report, Server, Task, Tensors, Work


@dataclass(frozen=True)
class Distilled:
    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        total, losses = CrossEntropy()(model, tensors, batch, fixed)
        with torch.no_grad():
            target = model({n: t.clone() for n, t in fixed["teacher"].items()}, batch.x)
        distance = (model({n: t.clone() for n, t in tensors.items()}, batch.x) - target).square().mean()
        return total + fixed["lambda"] * distance, losses


@register("method", "sketch_fedrkd")
@dataclass(frozen=True)
class SketchFedRKD(Method):
    """Everybody trains alone first; then models travel around the ring and are distilled."""

    topology: Topology = Ring()
    objective: Objective = Distilled()

    def stages(self, round: int, members: Sequence[int]) -> Stages:
        """Alone in the very first stage."""
        alone = [[(member, member) for member in members]] if round == 0 else []
        return alone + self.topology.stages(round, members)[:2]

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Distil from the teacher as far as it is better on the own validation part."""
        own, fixed, loss = client.own(frozenset(client.network.names)), {"lr": client.rate}, CrossEntropy()
        for report in task.inbox.values():
            teacher = {name: dense(value) for name, value in report.tensors.items()}
            theirs, mine = yield tuple(Measure(each, Accuracy(), client.validation) for each in (teacher, own))
            gap = (theirs["right"].sum() - mine["right"].sum()) / mine["samples"].sum()
            weight = 10 ** (torch.clamp(10 * gap, max=1) - 1) * (gap >= 0)
            fixed, loss = {**fixed, "teacher": teacher, "lambda": weight.to(client.rate)}, self.objective
        fit = yield Fit(own, Descent.of(loss, task.train), client.plan(), fixed)
        client.keep(fit.tensors)
        return Report(fit.tensors, float(client.samples), fit.numbers)

    def model(self, server: Server) -> Tensors | None:
        """There is no global model."""
        return None
