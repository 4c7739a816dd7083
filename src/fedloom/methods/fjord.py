"""FjORD: Horvath et al., FjORD: fair and accurate federated learning under heterogeneous targets, NeurIPS 2021.

Ordered dropout: a client holds the first units up to its capacity, and every step trains a prefix whose width is drawn
uniformly from those the client can afford. With `distil`, each step trains the client's whole prefix on the labels and
the drawn one on what the whole one says. Differences: what lies outside a step's width rests (the authors' code lets
weight decay shrink it), and statistics of batch norm are asked for at evaluation instead of one set a width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.client import Client
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.cut import Cut, Prefix
from fedloom.policies.merge import Mean, Merge
from fedloom.policies.objective import Masked, Objective
from fedloom.policies.share import Share, Static
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Batch, Fit, Fixed, Model, Report, Task, Tensors, Work

View = Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class First:
    """Slices from the start of every axis; equal for equal shapes, so that a captured step is found again."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    def __call__(self, tensors: Tensors) -> Tensors:
        """Views of the same memory."""
        shapes = dict(self.shapes)
        return {name: tensor[tuple(slice(size) for size in shapes[name])] for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Distilled:
    """The whole prefix learns from labels, the narrow one from the whole one (section 4.2)."""

    objective: Objective
    narrow: View

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """The sum of both."""
        total, losses = self.objective(model, tensors, batch, fixed)
        with torch.no_grad():
            said = model(tensors, batch.x).softmax(1)
        return total + F.cross_entropy(model(self.narrow(tensors), batch.x), said), losses


@register("method", "fjord", paper="Horvath et al., NeurIPS 2021")
@dataclass(frozen=True)
class Fjord(FedAvg):
    """Ordered dropout: every step trains a prefix of another width."""

    widths: Annotated[tuple[float, ...], "capacities that steps draw from, beside the client's own"] = (
        0.0625, 0.125, 0.25, 0.5, 1.0,
    )  # fmt: skip
    distil: Annotated[bool, "the drawn width learns from the client's whole prefix"] = False
    cut: Cut = Prefix()
    objective: Objective = Masked()
    share: Share = Static()
    merge: Merge = Mean(by_class=True)

    def work(self, client: Client, task: Task) -> Work[Report]:
        """One step a width; the plan draws which."""
        tensors = yield from self.start(client)
        views = [self._view(client, width) for width in self.widths if width < client.capacity]
        whole = Descent.of(self.loss(), task.train)
        if self.distil:
            steps = [Descent.of(Distilled(self.loss(), view), task.train) for view in views]
        else:
            steps = [Descent.of(self.loss(), task.train, view) for view in views]
        fit = yield Fit(tensors, [*steps, whole], client.plan(variants=len(steps) + 1), self.fixed(client, tensors))
        return self.report(client, fit, task.where)

    def _view(self, client: Client, width: float) -> View:
        """The first units of a client's own tensors, as slices of the same memory."""
        shapes = client.network.units.shapes(client.network.units.kept(width))
        return First(tuple((name, tuple(shape)) for name, shape in shapes.items()))
