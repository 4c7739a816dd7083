"""How does a step move tensors? PyTorch's formulas over named tensors, in place, with the learning rate as a tensor.

So one captured step serves every round. Where clients are stacked (`engine/stacked.py`) every tensor has one more axis
in front, and a number such as that of the steps taken is one a client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.types import Tensors, Train

__all__ = ["SGD", "Adam", "Optimizer", "optimizer_of"]


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum and weight decay (as torch.optim.SGD, no dampening)."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    def slots(self, tensors: Tensors) -> dict[str, Tensors]:
        """Momentum buffers, if there is momentum."""
        return {"momentum": {n: torch.zeros_like(t) for n, t in tensors.items()}} if self.momentum else {}

    def update(self, tensors: Tensors, slots: dict[str, Tensors], grads: Tensors, lr: Tensor) -> None:
        """Move the tensors that have a gradient, in place."""
        weights, moves = [tensors[name] for name in grads], list(grads.values())
        if self.weight_decay:
            moves = list(torch._foreach_add(moves, weights, alpha=self.weight_decay))
        if self.momentum:
            buffers = [slots["momentum"][name] for name in grads]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, moves)
            moves = buffers
        torch._foreach_sub_(weights, torch._foreach_mul(moves, lr))


@dataclass(frozen=True)
class Adam:
    """Adam (as torch.optim.Adam), with decoupled weight decay it is AdamW."""

    weight_decay: float = 0.0
    decoupled: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def slots(self, tensors: Tensors) -> dict[str, Tensors]:
        """First and second moments, and the number of steps taken."""
        zeros = {kind: {n: torch.zeros_like(t) for n, t in tensors.items()} for kind in ("first", "second")}
        some = next(iter(tensors.values()))
        return zeros | {"taken": {"steps": torch.zeros((), dtype=torch.float64, device=some.device)}}

    def update(self, tensors: Tensors, slots: dict[str, Tensors], grads: Tensors, lr: Tensor) -> None:
        """Move the tensors that have a gradient, in place."""
        taken = slots["taken"]["steps"].add_(1)
        weights, moves = [tensors[name] for name in grads], list(grads.values())
        if self.weight_decay and self.decoupled:
            torch._foreach_mul_(weights, 1 - lr * self.weight_decay)
        elif self.weight_decay:
            moves = list(torch._foreach_add(moves, weights, alpha=self.weight_decay))
        first, second = ([slots[kind][name] for name in grads] for kind in ("first", "second"))
        torch._foreach_lerp_(first, moves, 1 - self.beta1)
        torch._foreach_mul_(second, self.beta2)
        torch._foreach_addcmul_(second, moves, moves, 1 - self.beta2)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, _each((1 - self.beta2**taken).sqrt().to(lr.dtype), weights))
        torch._foreach_add_(roots, self.epsilon)
        scaled = torch._foreach_div(first, roots)
        torch._foreach_mul_(scaled, _each((lr / (1 - self.beta1**taken)).to(lr.dtype), weights))
        torch._foreach_sub_(weights, scaled)


def _each(number: Tensor, weights: Sequence[Tensor]) -> Any:
    """One number for all weights; or, where clients are stacked and have each their own, shaped for every weight."""
    return [number.reshape(-1, *(1,) * (weight.ndim - 1)) for weight in weights] if number.ndim else number


Optimizer = SGD | Adam
OPTIMIZERS: dict[str, Callable[[Train], Optimizer]] = {
    "sgd": lambda train: SGD(train.momentum, train.weight_decay),
    "adam": lambda train: Adam(train.weight_decay),
    "adamw": lambda train: Adam(train.weight_decay, decoupled=True),
}


def optimizer_of(train: Train) -> Optimizer:
    """The optimiser that a task's training settings name."""
    return OPTIMIZERS[train.optimizer](train)
