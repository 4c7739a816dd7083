"""Sketch of FjORD: every step draws a width and trains a view of the same tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from fedloom.client import Client
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.cut import Cut, Prefix
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Fit, Report, Task, Tensors, Where, Work
from fedloom.units import Units


def view(units: Units, outer: Where, inner: Where, tensors: Tensors) -> Tensors:
    """The inner prefix of a model that was cut to the outer prefix already."""
    shapes = units.shapes({group: len(kept) for group, kept in inner.items()})
    return {n: t[tuple(slice(size) for size in shapes[n])] if t.shape != shapes[n] else t for n, t in tensors.items()}


@register("method", "sketch_fjord")
@dataclass(frozen=True)
class SketchFjord(FedAvg):
    """Ordered dropout: a prefix whose width is drawn anew for every step."""

    cut: Cut = Prefix()
    widths: tuple[float, ...] = (0.25, 0.5, 1.0)

    def work(self, client: Client, task: Task) -> Work[Report]:
        """As FedAvg, with one step a width the client can afford."""
        units, nothing = client.network.units, torch.Generator()
        tensors = yield from self.start(client)
        outer = task.where or {}
        widths = [width for width in self.widths if width < client.capacity]
        cuts = [self.cut(client.network, width, task.round, nothing) or {} for width in widths]
        steps = [Descent.of(self.loss(), task.train, partial(view, units, outer, inner)) for inner in cuts]
        steps.append(Descent.of(self.loss(), task.train))
        plan = client.plan(variants=len(steps))
        fit = yield Fit(tensors, steps, plan, {"lr": client.rate})
        return self.report(client, fit, task.where)
