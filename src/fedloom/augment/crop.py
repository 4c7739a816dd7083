"""Random crops and mirror images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.copies import to_device

__all__ = ["crop", "crop_flip"]

PADDING = 4


def crop(x: Tensor, generator: torch.Generator, flip: bool = False) -> Tensor:
    """Shift every image by up to 4 pixels each way, black coming in; with `flip`, mirror half of them."""
    count, _, height, width = x.shape
    shifts = torch.randint(2 * PADDING + 1, (2, count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5 if flip else torch.zeros(count, 1, dtype=torch.bool)
    rows, columns = shifts[0] + torch.arange(height), shifts[1] + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = F.pad(x, (PADDING,) * 4)
    which, rows, columns = to_device([torch.arange(count), rows, columns], x.device)
    return padded[which[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def crop_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Random crop, and a mirror image half of the time: for natural images."""
    return crop(x, generator, flip=True)
