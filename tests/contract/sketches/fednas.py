"""Sketch of FedNAS: weights by SGD on training batches, architecture by Adam on validation batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.client import Client
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.objective import CrossEntropy
from fedloom.registry import register
from fedloom.steps import SGD, Adam
from fedloom.types import Batch, Fit, Fixed, Model, Report, Task, Tensors, Work


class SuperNet(nn.Module):
    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(1e-3 * torch.randn(2))
        self.operations = nn.ModuleList([nn.Conv2d(channels, 4, 3, padding=1), nn.Conv2d(channels, 4, 1)])
        self.head = nn.Linear(4 * size * size, classes)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.alpha.softmax(0)
        mixed = shares[0] * self.operations[0](x) + shares[1] * self.operations[1](x)
        return self.head(torch.relu(mixed).flatten(1))


@dataclass(frozen=True)
class Bilevel:
    weights: SGD = SGD(momentum=0.9)
    architecture: Adam = Adam(beta1=0.5, weight_decay=1e-3)
    passes: int = 2

    def seen(self, tensors: Tensors, fixed: Fixed) -> Tensors:
        return tensors

    def slots(self, tensors: Tensors) -> dict[str, Tensors]:
        return {**self.weights.slots(tensors), **self.architecture.slots(tensors)}

    def __call__(self, model: Model, tensors: Tensors, slots: dict, fixed: Fixed, batches: list[Batch]) -> Tensor:
        train, validation = (lambda seen, batch=batch: CrossEntropy()(model, seen, batch, fixed) for batch in batches)
        slopes, _ = model.grad(validation, tensors)
        self.architecture.update(tensors, slots, {"alpha": slopes["alpha"]}, fixed["alpha_lr"])
        grads, losses = model.grad(train, tensors)
        self.weights.update(tensors, slots, {n: grad for n, grad in grads.items() if n != "alpha"}, fixed["lr"])
        return losses


@register("method", "sketch_fednas")
@dataclass(frozen=True)
class SketchFedNAS(FedAvg):
    def work(self, client: Client, task: Task) -> Work[Report]:
        tensors = yield from self.start(client)
        plan, fixed = client.plan([client.train, client.validation]), client.fixed(alpha_lr=client.network.scalar(3e-3))
        fit = yield Fit(tensors, Bilevel(), plan, fixed)
        return self.report(client, fit)
