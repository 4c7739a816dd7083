"""DepthFL: Kim et al., DepthFL: depthwise federated learning for heterogeneous clients, ICLR 2023.

A client of depth d trains the first d stages, each with an exit. Its loss is the cross-entropy of all its exits, and
each exit also learns from the others: beta / (d - 1) times the divergence from every other exit's (fixed) prediction,
with beta = exp(-5 (1 - min(t, 300) / 300)^2). Tensors are averaged over those who hold them; the global model predicts
by the mean of all exits' logits. Under objective `masked` the logits of classes that a client does not hold are masked
in both parts of the loss, as in the other sub-model methods.

Differences: exits without attention (see models/exits.py); FedAvg's weighted mean, where the authors' code by default
uses FedDyn and averages without weights; depths are dealt to equal blocks of clients whatever the fleet, or follow the
capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, exp
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from fedloom.client import Client
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.unasked import refuse
from fedloom.models.exits import with_exits
from fedloom.policies.adaptive import Adaptive
from fedloom.policies.distil import Distilling
from fedloom.policies.objective import CrossEntropy, Masked, Objective
from fedloom.registry import name_of, register
from fedloom.types import Batch, Fixed, Model, Server, Task, Tensors


@dataclass(frozen=True)
class ExitsTogether:
    """Cross-entropy of every exit, and divergence from what the other exits say (DepthFL; no other model has exits)."""

    masked: Masked | None = None

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """Over stacked logits (exits, samples, classes); the samples' losses are those of the deepest exit."""
        logits = model(tensors, batch.x)
        if self.masked:
            logits = self.masked.mask(logits, fixed)
        exits = len(logits)
        losses = torch.stack([F.cross_entropy(each, batch.y, reduction="none") for each in logits])
        total = losses.mean(1).sum()
        if exits > 1:
            logs = logits.log_softmax(2)
            said = logs.detach()
            # Row i, column j: divergence of exit i from what exit j says; of itself it is 0.
            apart = (said.exp()[None] * (said[None] - logs[:, None])).sum(3).mean(2)
            total = total + fixed["beta"] / (exits - 1) * apart.sum()
        return total, losses[-1].detach()


@register("method", "depthfl", paper="Kim et al., ICLR 2023")
@dataclass(frozen=True)
class DepthFL(FedAvg):
    """Weak clients train the first stages of the network, with an exit after each."""

    depth: Annotated[Literal["blocks", "capacity"], "depths in equal blocks of clients, or ceil(capacity x stages)"] = (
        "blocks"
    )
    ramp: Annotated[int, Ge(1), "rounds until exits teach each other with full weight"] = 300
    objective: Objective = ExitsTogether()

    @property
    def adapts(self) -> bool:
        """Weak clients get fewer stages."""
        return True

    def check(self) -> None:
        """Units are cut in depth here."""
        super().check()
        refuse(self, ("cut",), "cuts in depth and cannot run under a cut of units")
        if isinstance(self.objective, CrossEntropy | Distilling):
            raise InputError(
                f"depthfl trains all exits at once, and objective '{name_of(self.objective)}' is about the answers of "
                "one; leave [objective] out, use masked, or bring one that takes stacked logits"
            )
        if isinstance(self.objective, Masked) and self.objective.scaler:
            raise InputError("depthfl narrows no layer and has nothing to scale; leave objective.scaler out")
        if isinstance(self.start, Adaptive):
            raise InputError("depthfl has several exits, and start 'adaptive' learns by one; leave [start] out")

    def adapt(self, build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
        """The model with exits."""
        return with_exits(build, shape, classes)

    def recipe(self, line: str, shape: tuple[int, ...], classes: int, found: Mapping[str, Any]) -> str:
        """With its exits."""
        return f"fedloom.models.exits.with_exits(lambda: {line}, {shape}, {classes})()"

    def task(self, server: Server, fleet: Fleet, client: int) -> Task:
        """The first stages and their exits."""
        model: Any = server.network.module
        stages, capacity = len(model.stages), float(fleet.columns["capacity"][client])
        depth = int(client) * stages // fleet.size + 1 if self.depth == "blocks" else ceil(capacity * stages - 1e-9)
        return fleet.task(client, {"model": self.sent(server)}, only=model.names(depth))

    def loss(self) -> Objective:
        """Of all exits, masked or as they are."""
        return ExitsTogether(self.objective) if isinstance(self.objective, Masked) else self.objective

    def fixed(self, client: Client, tensors: Tensors) -> dict[str, Any]:
        """Exits listen to each other more and more."""
        beta = exp(-5 * (1 - min(client.task.round, self.ramp) / self.ramp) ** 2)
        return super().fixed(client, tensors) | {"beta": torch.full_like(client.rate, beta)}
