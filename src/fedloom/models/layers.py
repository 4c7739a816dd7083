"""Rows of layers that the networks are put together from.

Every layer is a module of its own and no size is written into a forward pass, so that the unit graph can be traced and
narrower tensors can be put in. ReLUs are not in place: an activation that is read by a hook stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from fedloom.errors import InputError

__all__ = ["Positive", "Width", "convolution", "dense", "flat_features", "widened"]

Positive = Annotated[int, Field(gt=0)]
Width = Annotated[float, "factor on the width of every layer", Field(gt=0, allow_inf_nan=False)]


def widened(counts: Sequence[int], width: float) -> list[int]:
    """Counts of channels or neurons times a width, rounded up.

    >>> widened((64, 100), 0.5), widened((100,), 1.1)
    ([32, 50], [110])
    """
    return [max(1, ceil(round(count * width, 6))) for count in counts]  # rounded first: 100 * 1.1 is a little above 110


def convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, norm: bool = False
) -> list[nn.Module]:
    """Convolution, batch norm where asked for, ReLU.

    >>> [type(layer).__name__ for layer in convolution(3, 8, 5, norm=True)]
    ['Conv2d', 'BatchNorm2d', 'ReLU']
    """
    norms: list[nn.Module] = [nn.BatchNorm2d(outputs)] if norm else []
    return [nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding), *norms, nn.ReLU()]


def dense(sizes: Sequence[int], *, norm: bool = False) -> nn.Sequential:
    """Flatten, then fully connected layers from size to size; all but the last with (batch norm and) ReLU.

    >>> [type(layer).__name__ for layer in dense([16, 8, 2])]
    ['Flatten', 'Linear', 'ReLU', 'Linear']
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes[:-1]):
        layers += [nn.Linear(inputs, outputs), *([nn.BatchNorm1d(outputs)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def flat_features(features: nn.Sequential, channels: int, size: int) -> int:
    """How many numbers a row of convolutions and pools makes of one image.

    Arithmetic, not a trial run: that would start PyTorch's threads, and on its `meta` device import for a second.

    >>> flat_features(nn.Sequential(*convolution(1, 4, 3), nn.MaxPool2d(2)), channels=1, size=8)
    36
    """
    side = size
    for layer in features.modules():
        if isinstance(layer, nn.Conv2d):
            channels = layer.out_channels
            side = _steps(side, layer)
        elif isinstance(layer, nn.MaxPool2d):
            side = _steps(side, layer, up=layer.ceil_mode)
        elif isinstance(layer, nn.AdaptiveAvgPool2d):
            side = _side(layer.output_size)
        if side < 1:
            raise InputError(
                f"images of {size}x{size} pixels are too small for this network: nothing is left at {layer}"
            )
    return channels * side * side


def _steps(side: int, layer: nn.Conv2d | nn.MaxPool2d, *, up: bool = False) -> int:
    kernel, stride, padding = (_side(value) for value in (layer.kernel_size, layer.stride, layer.padding))
    return (side + 2 * padding - kernel + (stride - 1 if up else 0)) // stride + 1


def _side(value: Any) -> int:
    """A layer's setting for one of its two (equal) sides."""
    return int(value[0] if isinstance(value, tuple) else value)
