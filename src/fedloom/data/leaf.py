"""FEMNIST from LEAF's JSON files (Caldas et al., arXiv:1812.01097): handwritten characters with their writers.

`train/*.json` and `test/*.json` as LEAF's preprocessing leaves them, or only `all_data/*.json`, of which a fixed fifth
of each writer's images becomes the test set. Ink is dark on light, as in LEAF.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Arrays, Dataset, Limit, Size, build
from fedloom.data.files import Finder, damaged, gather
from fedloom.registry import register

__all__ = ["femnist"]

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
Part = tuple[npt.NDArray[Any], npt.NDArray[Any], list[str]]


@register("dataset", "femnist", paper="Caldas et al., LEAF, arXiv:1812.01097")
def femnist(size: Size = None, limit: Limit = None) -> Dataset:
    """FEMNIST handwritten characters by writer, 62 classes, 28x28 grey."""
    found = gather("femnist", _find, wanted="LEAF's folders train and test with their .json files", flat=False)
    return build("femnist", found, size=size, limit=limit)


def _find(finder: Finder) -> Arrays | None:
    for folder in finder.folders():
        for base in (folder, folder / "data"):
            if any((base / "train").glob("*.json")):
                return _join(base, _read(base / "train"), _read(base / "test"))
            if any((base / "all_data").glob("*.json")):
                return _join(base, _read(base / "all_data"), None)
    return None


def _join(origin: Path, train: Part, test: Part | None) -> Arrays:
    names = sorted({*train[2], *(test[2] if test else ())})
    number = {name: index for index, name in enumerate(names)}
    groups = [np.array([number[writer] for writer in part[2]], np.int64) for part in (train, test) if part]
    return Arrays(
        origin,
        x_train=train[0],
        y_train=train[1],
        x_test=test[0] if test else None,
        y_test=test[1] if test else None,
        g_train=groups[0],
        g_test=groups[1] if test else None,
        class_names=CLASSES,
        group_names=tuple(names),
    )


def _read(folder: Path) -> Part:
    """Images, labels and writers of all files; each file is packed to bytes before the next is read."""
    x, y, writers = [np.empty((0, 28, 28), np.uint8)], [np.empty(0, np.int64)], list[str]()
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            for writer, data in content["user_data"].items():
                pixels = np.asarray(data["x"], np.float32).reshape(-1, 28, 28)
                labels = np.asarray(data["y"], np.int64)
                if len(pixels) != len(labels):
                    raise ValueError(f"writer {writer} has {len(pixels)} images but {len(labels)} labels")
                x.append(np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8))
                y.append(labels)
                writers += [writer] * len(labels)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise damaged(path, error) from error
    return np.concatenate(x), np.concatenate(y), writers
