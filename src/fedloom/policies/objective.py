"""How does a client learn? An objective is a scalar to descend and the loss of every sample; terms add to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.registry import register
from fedloom.types import Batch, Fixed, Model, Tensors

__all__ = ["CrossEntropy", "Masked", "Objective", "Proximal", "Slope", "Sum", "Term"]


class Objective(Protocol):
    """What a step descends."""

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """The scalar to descend, and the plain loss of every sample (detached)."""


class Term(Protocol):
    """Something that a method adds to any objective, independent of the batch."""

    def __call__(self, tensors: Tensors, fixed: Fixed) -> Tensor:
        """A scalar."""


@register("objective", "cross_entropy")
@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross-entropy over the batch."""

    scaler: Annotated[bool, "divide outputs of cut layers by the share of units kept, in training only"] = False

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """Mean and every sample's loss."""
        losses = F.cross_entropy(model(tensors, batch.x, scaler=self.scaler), batch.y, reduction="none")
        return losses.mean(), losses.detach()


@register("objective", "masked", paper="Diao et al., HeteroFL, ICLR 2021")
@dataclass(frozen=True)
class Masked:
    """Cross-entropy in which the logits of classes that the client does not hold are masked out.

    `zero` fills them with 0, as the paper's code does: they stay in the denominator as e^0 and get no gradient.
    `minus_infinity` takes them out of the softmax.
    """

    fill: Annotated[Literal["zero", "minus_infinity"], "what takes the place of a masked logit"] = "zero"
    scaler: Annotated[
        bool | None,
        "divide outputs of cut layers by the share of units kept, in training only; unset: under static batch norm",
    ] = None

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """Mean and every sample's loss over the masked logits."""
        # Without norm layers behind them the divisions multiply up: 16 times a layer at a capacity of 1/16.
        scaler = bool(model.network.norms) if self.scaler is None else self.scaler
        losses = F.cross_entropy(self.mask(model(tensors, batch.x, scaler=scaler), fixed), batch.y, reduction="none")
        return losses.mean(), losses.detach()

    def mask(self, logits: Tensor, fixed: Fixed) -> Tensor:
        """The logits with the fill in place of classes that the client does not hold."""
        # Not infinity itself: between two masked predictions a divergence would be 0 times infinity.
        return logits.masked_fill(~fixed["held"], 0.0 if self.fill == "zero" else torch.finfo(logits.dtype).min)


@dataclass(frozen=True)
class Sum:
    """An objective and a term on top of it."""

    objective: Objective
    term: Term

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """The sum; the samples' losses stay those of the objective."""
        total, losses = self.objective(model, tensors, batch, fixed)
        return total + self.term(tensors, fixed), losses


@dataclass(frozen=True)
class Proximal:
    """mu / 2 times the squared distance to fixed["anchor"], over all trained tensors."""

    mu: float

    def __call__(self, tensors: Tensors, fixed: Fixed) -> Tensor:
        """The pull back to where the client started."""
        gaps = [(tensors[name] - anchor).square().sum() for name, anchor in fixed["anchor"].items()]
        return self.mu / 2 * torch.stack(gaps).sum()


@dataclass(frozen=True)
class Slope:
    """<tensors, fixed["slope"]>: adds a constant to every gradient."""

    def __call__(self, tensors: Tensors, fixed: Fixed) -> Tensor:
        """The inner product over all tensors that have a slope."""
        return torch.stack([(tensors[name] * slope).sum() for name, slope in fixed["slope"].items()]).sum()
