"""Mean and standard deviation of colour channels, exact and in one pass: pixels are counted per grey level."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Dataset, Images, Ints

__all__ = ["count_levels", "group_levels", "moments"]

Floats = npt.NDArray[np.float64]
AT_ONCE = 4096  # images counted in one go: bounds the copy that picking rows makes


def count_levels(x: Images, rows: Ints | None = None) -> Ints:
    """(C, 256): how often each grey level occurs in each channel of these images (default: all)."""
    counts = np.zeros((x.shape[1], 256), np.int64)
    for start in range(0, len(x) if rows is None else len(rows), AT_ONCE):
        part = x[start : start + AT_ONCE] if rows is None else x[rows[start : start + AT_ONCE]]
        for channel, of_channel in enumerate(counts):
            of_channel += np.bincount(part[:, channel].reshape(-1), minlength=256)
    return counts


def group_levels(dataset: Dataset) -> Ints:
    """(groups, C, 256) of the training images of every group; without groups all images are one."""
    if dataset.group_levels is not None:
        return dataset.group_levels
    if dataset.groups is None:
        return count_levels(dataset.x[: dataset.trained])[None]
    rows = [np.flatnonzero(dataset.groups[: dataset.trained] == group) for group in range(len(dataset.group_names))]
    return np.stack([count_levels(dataset.x, of) for of in rows])


def moments(levels: Ints) -> tuple[Floats, Floats]:
    """Mean and population standard deviation of every channel, on the scale 0..1; a constant channel has 1.

    >>> moments(np.eye(256, dtype=np.int64)[[0]] + np.eye(256, dtype=np.int64)[[255]])
    (array([0.5]), array([0.5]))
    """
    scale, total = np.arange(256) / 255, np.maximum(levels.sum(-1), 1)
    mean = (levels * scale).sum(-1) / total
    variance = (levels * (scale - mean[..., None]) ** 2).sum(-1) / total
    # A channel of one level has nothing to scale; the mean of equal numbers may be off in the last bit.
    return mean, np.where((levels > 0).sum(-1) > 1, np.sqrt(variance), 1.0)
