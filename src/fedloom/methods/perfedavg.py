"""Per-FedAvg: Fallah et al., Personalized federated learning with theoretical guarantees, NeurIPS 2020.

The common model is one from which every client gets far in one gradient step of its own. Algorithm 1 with two
approximations of the Hessian (section 5): `first` (FO) leaves it out, `hessian_free` (HF) takes a difference of
gradients. alpha is `inner_rate`; beta is the study's `train.lr`, and the study's optimiser takes the outer step. D, D'
and D'' are different batches of one permutation. The server's mean is uniform, as in the paper. A client uses the
model after `steps` gradient steps of size alpha. Statistics of batch norm follow the pass over D' alone.

Known ports differ: one forces beta to the study's rate and runs two passes a round, one never writes the updated
weights back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedloom.client import Client
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.merge import Mean, Merge
from fedloom.policies.objective import Objective
from fedloom.policies.optimizer import SGD, Optimizer, optimizer_of
from fedloom.registry import register
from fedloom.steps import Descent, clip_, still
from fedloom.types import Batch, Fit, Fixed, Model, Plan, Step, Task, Tensors, Work


@dataclass(frozen=True)
class MetaStep:
    """w <- w - beta (v - alpha d), with v the gradient after an inner step and d that of the Hessian along v, or 0."""

    objective: Objective
    optimizer: Optimizer
    inner_rate: float
    delta: float | None  # None: first-order
    clip: float | None = None

    @property
    def passes(self) -> float:
        """The inner and the outer gradient; and two more for the Hessian."""
        return 2 if self.delta is None else 4

    def slots(self, tensors: Tensors) -> dict[str, Tensors]:
        """The optimiser's memory."""
        return self.optimizer.slots(tensors)

    def seen(self, tensors: Tensors, fixed: Fixed) -> Tensors:
        """The whole model."""
        return tensors

    def __call__(
        self, model: Model, tensors: Tensors, slots: dict[str, Tensors], fixed: Fixed, batches: Sequence[Batch]
    ) -> Tensor:
        """One meta-update; gives the losses of D before it."""
        first, second, *third = batches

        def gradient(at: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
            return model.grad(lambda current: self.objective(model, current, batch, fixed), at)

        inner, losses = gradient(still(tensors, model), first)
        v, _ = gradient(moved(tensors, inner, -self.inner_rate), second)
        if self.delta is not None:
            ahead, behind = (
                gradient(moved(still(tensors, model), v, step), third[0])[0] for step in (self.delta, -self.delta)
            )
            scale = self.inner_rate / (2 * self.delta)
            v = {name: slope - scale * (ahead[name] - behind[name]) for name, slope in v.items()}
        if self.clip is not None:
            clip_(v, self.clip)
        self.optimizer.update(tensors, slots, v, fixed["lr"])
        return losses


def moved(tensors: Tensors, along: Tensors, by: float) -> Tensors:
    """The model so far along a direction, to be differentiated there; what has no direction stays the same tensor."""
    steps = {name: torch.add(tensors[name], way, alpha=by).detach().requires_grad_() for name, way in along.items()}
    return {name: steps.get(name, tensor) for name, tensor in tensors.items()}


@register("method", "perfedavg", paper="Fallah et al., NeurIPS 2020")
@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """A common model from which every client gets far in one step of its own."""

    inner_rate: Annotated[float, Ge(0), "size of the inner and of the personal step, alpha"] = 0.01
    hessian: Annotated[Literal["first", "hessian_free"], "left out, or a difference of gradients"] = "first"
    delta: Annotated[float, Gt(0), "distance of that difference, along the gradient"] = 1e-3
    steps: Annotated[int, Ge(0), "personal steps before a client uses the model"] = 1
    merge: Merge = Mean(weights="equal")

    def step(self, client: Client) -> Step:
        """Algorithm 1, lines 7 to 9."""
        delta = self.delta if self.hessian == "hessian_free" else None
        train = client.task.train
        return MetaStep(self.loss(), optimizer_of(train), self.inner_rate, delta, train.clip)

    def plan(self, client: Client) -> Plan:
        """D and D', for the Hessian D'' too."""
        return client.plan((client.train,) * (3 if self.hessian == "hessian_free" else 2))

    def final(self, client: Client, task: Task) -> Work[Tensors]:
        """The common model after the client's own steps."""
        tensors: Tensors = yield from super().final(client, task)
        if not self.steps:
            return tensors
        plan = client.plan(train=replace(task.train, steps=self.steps), purpose="final")
        fixed = self.fixed(client, tensors) | {"lr": client.network.scalar(self.inner_rate)}
        fit = yield Fit(tensors, Descent(self.loss(), SGD()), plan, fixed)
        own: Tensors = fit.tensors
        return own
