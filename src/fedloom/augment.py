"""Augmentation of a client's training images: an epoch in one pass, drawn from the client's own generator.

Draws happen on the CPU, pixels move on the device. What comes out are images of the same kind (uint8, not normalised).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["AUGMENTATIONS", "Augmentation", "crop", "crop_flip"]

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
PADDING = 4


def crop(x: Tensor, generator: torch.Generator, flip: bool = False) -> Tensor:
    """Shift every image by up to 4 pixels each way, black coming in; with `flip`, mirror half of them."""
    count, _, height, width = x.shape
    shifts = torch.randint(2 * PADDING + 1, (2, count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5 if flip else torch.zeros(count, 1, dtype=torch.bool)
    rows, columns = shifts[0] + torch.arange(height), shifts[1] + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = F.pad(x, (PADDING,) * 4)
    which, rows, columns = (part.to(x.device) for part in (torch.arange(count), rows, columns))
    return padded[which[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def crop_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Random crop, and a mirror image half of the time: for natural images."""
    return crop(x, generator, flip=True)


AUGMENTATIONS: dict[str, Augmentation] = {"crop": crop, "crop_flip": crop_flip}
