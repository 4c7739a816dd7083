"""RandAugment: E transformations an image, drawn uniformly with replacement from fourteen, at one strength F.

Cubuk et al., 2020, as FedCPN uses it: E = 2 and F = 10 on a scale 0..10. Draws are per image, from the client's
generator; images are grouped by the operation they drew, so that an epoch costs fourteen calls a transformation
however many images it has. (kornia's own class draws once a batch, has other operations and takes no generator.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.copies import to_device

if TYPE_CHECKING:
    from fedloom.augment.operations import Operation

__all__ = ["STRONGEST", "RandAugment", "applied"]

STRONGEST = 10
AT_ONCE = 4096  # images that an operation takes together: bounds the float copies


@dataclass(frozen=True)
class RandAugment:
    """E random transformations of every image."""

    transforms: int = 2
    strength: int = STRONGEST

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Copies of uint8 images, transformed."""
        from fedloom.augment.operations import OPERATIONS  # kornia is loaded where it is used

        x, operations = x.clone(), list(OPERATIONS.values())
        drawn = torch.randint(len(operations), (self.transforms, len(x)), generator=generator)
        signs = 2.0 * torch.randint(2, (self.transforms, len(x)), generator=generator) - 1
        # Sorted by operation on the host and copied together: a GPU is not waited for at each of them.
        order = drawn.argsort(dim=1, stable=True)
        (placed,) = to_device([order], x.device)
        (strengths,) = to_device([(signs * (self.strength / STRONGEST)).gather(1, order)], x.device)
        for which, rows, strength in zip(drawn, placed, strengths, strict=True):
            counts = which.bincount(minlength=len(operations)).tolist()
            for operation, place, strong in zip(operations, rows.split(counts), strength.split(counts), strict=True):
                for some, much in zip(place.split(AT_ONCE), strong.split(AT_ONCE), strict=True):
                    x[some] = applied(operation, x[some], much)
        return x


def applied(operation: Operation, x: Tensor, strength: Tensor) -> Tensor:
    """An operation on uint8 images; levels are rounded after it, as in a library that keeps images as bytes."""
    if not len(x):
        return x
    return operation(x.float() / 255, strength).mul(255).round().clamp(0, 255).to(torch.uint8)
