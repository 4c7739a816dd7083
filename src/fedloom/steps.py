"""One update of a fit: `Descent`, a gradient of the objective followed by an optimiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedloom.policies.distil import teaching
from fedloom.policies.objective import Objective
from fedloom.policies.optimizer import Optimizer, optimizer_of
from fedloom.types import Batch, Fixed, Model, Tensors, Train

__all__ = ["Descent", "View", "clip_", "still"]


class View(Protocol):
    """A part of a model's tensors to train in one step."""

    def __call__(self, tensors: Tensors) -> Tensors:
        """The part, in the same memory or copied."""

    def back(self, tensors: Tensors, seen: Tensors) -> None:
        """Put what was copied back."""


@dataclass(frozen=True)
class Descent:
    """The usual step: gradient of the objective over one batch, clipped, given to the optimiser.

    `view` may narrow the tensors before the model sees them (FjORD's width of the step): what the step does not see, it
    does not move, not by momentum or weight decay either. `make` makes the model where what is trained is not the model
    itself (mixing weights), of it and of what is fixed; statistics of its norms are not kept. `only` names the tensors
    that move; the others rest.
    """

    objective: Objective
    optimizer: Optimizer
    clip: float | None = None
    view: View | None = None
    passes: float = 1
    make: Callable[[Tensors, Fixed], Tensors] | None = None
    only: frozenset[str] | None = None

    @classmethod
    def of(cls, objective: Objective, train: Train, view: View | None = None) -> Descent:
        """As the round's training settings say; a teacher's pass costs a third of one that goes forward and back."""
        return cls(objective, optimizer_of(train), train.clip, view, 4 / 3 if teaching(objective) else 1)

    def slots(self, tensors: Tensors) -> dict[str, Tensors]:
        """The optimiser's memory."""
        return self.optimizer.slots(tensors)

    def seen(self, tensors: Tensors, fixed: Fixed) -> Tensors:
        """The tensors that the model sees."""
        tensors = self.view(tensors) if self.view else tensors
        return self.make(tensors, fixed) if self.make else tensors

    def moving(self, grads: Tensors) -> Tensors:
        """The gradients that count."""
        return grads if self.only is None else {name: grad for name, grad in grads.items() if name in self.only}

    def loss(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """The objective as a function of what is trained."""
        seen = still(self.make(tensors, fixed), model) if self.make else tensors
        return self.objective(model, seen, batch, fixed)

    def __call__(
        self, model: Model, tensors: Tensors, slots: dict[str, Tensors], fixed: Fixed, batches: Sequence[Batch]
    ) -> Tensor:
        """One update; gives the loss of every sample."""
        whole, memory = tensors, slots
        if self.view is not None:
            tensors = {name: tensor.detach() for name, tensor in self.view(tensors).items()}
            for name, tensor in tensors.items():
                tensor.requires_grad_(whole[name].requires_grad)
            slots = {k: self.view(slot) if slot.keys() <= whole.keys() else slot for k, slot in slots.items()}
        grads, losses = model.grad(lambda current: self.loss(model, current, batches[0], fixed), tensors)
        grads = self.moving(grads)
        if self.clip is not None:
            clip_(grads, self.clip)
        self.optimizer.update(tensors, slots, grads, fixed["lr"])
        if self.view is not None:
            self.view.back(whole, tensors)
            for kind, slot in slots.items():
                self.view.back(memory[kind], slot)
        return losses


def still(tensors: Tensors, model: Model) -> Tensors:
    """The same model with copies of its buffers: a pass in training mode writes statistics, which do not count then."""
    buffers = model.network.buffers
    return {name: tensor.clone() if name in buffers else tensor for name, tensor in tensors.items()}


def clip_(grads: Tensors, limit: float) -> None:
    """Scale all gradients together so that their joint norm is at most `limit` (as torch.nn.utils.clip_grad_norm_)."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads.values()))))
    scaled = torch._foreach_mul(list(grads.values()), (limit / (norm + 1e-6)).clamp(max=1.0))
    grads.update(zip(list(grads), scaled, strict=True))
