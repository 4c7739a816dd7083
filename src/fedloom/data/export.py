"""Write a split as one `.npz` a client, in the layout that `npz` reads, for use outside fedloom or on real devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedloom.data.dataset import Dataset, Images, Ints
from fedloom.data.rows import Rows
from fedloom.data.split import PARTS, Split

__all__ = ["export"]


def export(dataset: Dataset, split: Split, folder: Path | str) -> list[Path]:
    """One file a client with x_, y_ of train, validation and test.

    For the server, where there are such images: `public.npz`, and `test.npz` with the data set's own test set.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    digits = len(str(max(0, len(split.train) - 1)))
    parts: dict[str, Rows] = {part: getattr(split, part) for part in PARTS}
    written = []
    for client in range(len(split.train)):
        path = target / f"client_{client:0{digits}d}.npz"
        _write(path, dataset, {part: rows[client] for part, rows in parts.items()})
        written.append(path)
    if len(split.public):
        _write(target / "public.npz", dataset, {"train": split.public})
        written.append(target / "public.npz")
    if len(dataset.test_rows):
        _write(target / "test.npz", dataset, {"train": dataset.test_rows})
        written.append(target / "test.npz")
    return written


def _write(path: Path, dataset: Dataset, parts: dict[str, Ints]) -> None:
    arrays: dict[str, np.ndarray] = {"class_names": np.array(dataset.class_names)}
    for part, rows in parts.items():
        arrays |= {f"x_{part}": _layout(dataset.x[rows]), f"y_{part}": dataset.y[rows]}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def _layout(x: Images) -> Images:
    return x[:, 0] if x.shape[1] == 1 else np.ascontiguousarray(x.transpose(0, 2, 3, 1))
