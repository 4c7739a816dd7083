"""How important is a unit? Scores that a cut can choose by; a reading that gives one number a unit of every group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.network import NORMS
from fedloom.policies.steady import steady
from fedloom.registry import register
from fedloom.types import Batch, Model, Tensors
from fedloom.units import activations, gradients

__all__ = ["Activation", "Gradient", "Magnitude", "Predictions", "Scale"]


@register("score", "activation", paper="FedDSE")
@dataclass(frozen=True)
class Activation:
    """Mean magnitude of a unit's activation, over samples, positions and the points where its group is read."""

    training: bool = True
    passes: ClassVar[int] = 1

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """Summed over the batch: the order of units is that of the mean."""
        with steady(model.network, tensors) as module:
            return activations(model.network.units, module, tensors, batch.x)


@register("score", "scale", paper="Liu et al., Network slimming, ICCV 2017")
@dataclass(frozen=True)
class Scale:
    """Magnitude of the scale by which a norm layer multiplies the unit; mean activation where a group has no norm."""

    training: bool = True
    passes: ClassVar[int] = 1

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """Times the batch's samples, so that the mean over samples is the scale itself."""
        network, sums = model.network, Activation(self.training)(model, tensors, batch)
        row, seen = network.units.row(batch.x.device), network.units.row(batch.x.device)
        for path, layer in network.module.named_modules():
            name = f"{path}.weight"
            if isinstance(layer, NORMS):
                for unit in network.units.units_of(name, row.device):
                    row.index_add_(0, unit, tensors[name].abs().to(row))
                    seen.index_add_(0, unit, torch.ones_like(row[unit]))
        scales, known = network.units.split(row[:-1] / seen[:-1]), network.units.split(seen[:-1] > 0)
        return {group: torch.where(known[group], scales[group] * len(batch.y), score) for group, score in sums.items()}


@register("score", "gradient", paper="FedGSE")
@dataclass(frozen=True)
class Gradient:
    """Magnitude of the loss's gradient by a unit's activation, summed over positions and points.

    `labels` replaces the samples' own labels, for data that have none or whose labels are a client's guesses; then the
    samples must come as one batch.
    """

    labels: Tensor | None = None
    training: bool = True
    passes: ClassVar[int] = 3

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """That of the batch's mean loss, times its samples, so that the mean over samples is the score itself."""
        labels = batch.y if self.labels is None else self.labels
        with steady(model.network, tensors) as module:
            scores = gradients(model.network.units, module, tensors, batch.x, labels, loss=F.cross_entropy)
        return {group: score * len(batch.y) for group, score in scores.items()}


@register("score", "magnitude")
@dataclass(frozen=True)
class Magnitude:
    """L1 norm of all weights that belong to a unit; looks at no data."""

    training: bool = False
    passes: ClassVar[int] = 0

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """Times the batch's samples, so that the mean over samples is the norm itself."""
        units = model.network.units
        row = units.row(batch.x.device)
        for name in sorted(units.parameters & units.axes.keys()):
            for axis, unit in zip(units.axes[name], units.units_of(name, row.device), strict=True):
                norms = tensors[name].abs().movedim(axis.dim, 0).reshape(len(unit), -1).sum(1).double()
                row.index_add_(0, unit, norms)
        return units.split(row[:-1] * len(batch.y))


@dataclass(frozen=True)
class Predictions:
    """The most likely class of every sample; for one batch only, since batches are added up."""

    training: bool = True
    passes: ClassVar[int] = 1

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """Under batch statistics, over all classes."""
        with steady(model.network, tensors):  # the module that `model` runs in
            return {"predicted": model(tensors, batch.x).argmax(1)}
