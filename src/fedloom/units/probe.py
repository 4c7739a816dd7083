"""Scores of units, read at the inputs of the layers that consume them.

That is after the non-linearity and after a residual sum, also where these are plain functions in `forward`. A tensor
that several layers read (the first convolution of a block and its projection) is one point. Axis 0 is the samples.
The module runs in the mode (train, eval) it is in, and no tensor of it or of `tensors` is changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.units.table import Axis, Point, Units

__all__ = ["activations", "gradients"]


def activations(units: Units, module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """Per unit, the sum over samples of its mean magnitude over positions; averaged over the points of its group."""
    score, seen = units.row(x.device), units.row(x.device)

    # Reduced at once: keeping the activations of all layers would take the memory that inference saves.
    def read(point: Point, h: Tensor) -> None:
        positions = h[0].numel() // len(point.unit)
        magnitude = _per_position(h.abs(), point.axis).to(score)
        score.index_add_(0, point.unit, magnitude / (positions * point.extent))
        seen.index_add_(0, point.unit, 1 / point.extent.to(seen))

    with torch.no_grad():
        _run(units, module, tensors, x, read)
    return units.split((score / seen)[:-1])


def gradients(
    units: Units,
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    *,
    loss: Callable[[Any, Tensor], Tensor],
) -> dict[str, Tensor]:
    """Per unit, the sum over positions of |sum over samples of d loss / d h|, summed over the points of its group."""
    points: list[tuple[Point, Tensor]] = []
    with torch.enable_grad():
        output = _run(units, module, tensors, x, lambda point, h: points.append((point, h)))
        slopes = torch.autograd.grad(loss(output, y), [h for _, h in points], allow_unused=True)
    score = units.row(x.device)
    for (point, _), slope in zip(points, slopes, strict=True):
        if slope is not None:
            per_position = _per_position(slope.sum(0, keepdim=True).abs(), point.axis)
            score.index_add_(0, point.unit, per_position.to(score))
    return units.split(score[:-1])


def _per_position(h: Tensor, axis: Axis) -> Tensor:
    return h.movedim(axis.dim, -1).flatten(0, -2).sum(0)


def _run(
    units: Units, module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, read: Callable[[Point, Tensor], None]
) -> Any:
    """Run the module, and call `read` once for each tensor that consumers of a group get."""
    seen: list[tuple[weakref.ref[Tensor], int]] = []

    def hook(point: Point) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def pre(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            h: Tensor = inputs[0]
            # The version tells what a tensor held before an in-place operation from what it holds after.
            if not any(other() is h and version == h._version for other, version in seen):
                seen.append((weakref.ref(h), h._version))
                read(point, h)

        return pre

    full = {**dict(module.named_parameters()), **dict(module.named_buffers()), **tensors}
    own = {
        # Training mode writes running statistics, and buffers of the module's own may lie elsewhere; parameters that
        # need a gradient give one to all activations.
        name: tensor.detach().requires_grad_() if name in units.parameters else tensor.detach().to(x.device, copy=True)
        for name, tensor in full.items()
    }
    with ExitStack() as hooks:
        for point in units.points_on(x.device):
            hooks.enter_context(module.get_submodule(point.axis.owner).register_forward_pre_hook(hook(point)))
        return functional_call(module, own, (x,))
