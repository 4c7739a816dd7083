"""Grey levels counted: exact sums from which images are normalised, and which can be added up over devices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Images, Ints

__all__ = ["levels", "normalisation"]

Floats = npt.NDArray[np.float64]


def levels(x: Images) -> Ints:
    """How often each grey level occurs in each channel of some images: (channels, 256)."""
    return np.stack([np.bincount(x[:, channel].reshape(-1), minlength=256) for channel in range(x.shape[1])])


def normalisation(counts: Ints) -> tuple[Floats, Floats]:
    """Mean and standard deviation of each channel, on the scale 0..1.

    >>> [value.tolist() for value in normalisation(levels(np.full((2, 1, 3, 3), 51, np.uint8)))]
    [[0.2], [1.0]]
    """
    scale, total = np.arange(256) / 255, counts.sum(1)
    mean = np.array([(count * scale).sum() / of_all for count, of_all in zip(counts, total, strict=True)])
    square = np.array([(count * scale**2).sum() / of_all for count, of_all in zip(counts, total, strict=True)])
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return mean, np.where(std > 0, std, 1.0)
