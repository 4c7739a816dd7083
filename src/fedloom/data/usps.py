"""USPS from the libsvm text files (.bz2) or the .h5 release.

Hull, A database for handwritten text recognition research, 1994. The text files hold labels 1 .. 10 and pixels in
[-1, 1], the .h5 labels 0 .. 9 and pixels in [0, 1]; both become 0 .. 9 and bytes.
"""

from __future__ import annotations

import bz2
import string
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Arrays, Dataset, Limit, Size, build
from fedloom.data.files import Download, Finder, damaged, gather
from fedloom.errors import InputError
from fedloom.registry import register

__all__ = ["usps"]

URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
DOWNLOADS = [
    Download(f"{URL}usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197"),
    Download(f"{URL}usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118"),
]


@register("dataset", "usps", paper="Hull, A database for handwritten text recognition research, 1994")
def usps(size: Size = None, limit: Limit = None) -> Dataset:
    """USPS handwritten digits, 16x16 grey, 7,291 / 2,007."""
    found = gather("usps", _find, wanted="usps.bz2 and usps.t.bz2, or usps.h5", downloads=DOWNLOADS)
    return build("usps", found, size=size, limit=limit)


def _find(finder: Finder) -> Arrays | None:
    train, test, h5 = finder.find("usps.bz2"), finder.find("usps.t.bz2"), finder.find("usps.h5")
    if train is None and h5 is None:
        return None
    if train is None:
        parts, origin = _read_h5(h5 or finder.root), h5 or finder.root
    elif test is None:
        raise InputError(f"{train.parent} has usps.bz2 but not usps.t.bz2")
    else:
        parts, origin = [*_read_text(train), *_read_text(test)], train.parent
    x_train, y_train, x_test, y_test = parts
    return Arrays(origin, x_train, y_train, x_test, y_test, class_names=tuple(string.digits))


def _read_text(path: Path) -> list[npt.NDArray[Any]]:
    """Lines of a label and `index:value` pairs; a pair left out is 0."""
    try:
        lines = bz2.decompress(path.read_bytes()).decode("ascii").splitlines()
        x, y = np.zeros((len(lines), 256)), np.empty(len(lines), np.int64)
        for row, line in enumerate(lines):
            label, *pairs = line.split()
            y[row] = int(label) - 1
            for pair in pairs:
                index, value = pair.split(":")
                if not 1 <= int(index) <= 256:
                    raise ValueError(f"pixel {index} in line {row + 1} is outside 1 .. 256")
                x[row, int(index) - 1] = float(value)
    except (OSError, EOFError, ValueError) as error:
        raise damaged(path, error) from error
    return [_bytes((x + 1) / 2), y]


def _read_h5(path: Path) -> list[npt.NDArray[Any]]:
    try:
        import h5py
    except ImportError:
        raise InputError(f"reading {path} needs h5py: pip install 'fedloom[h5]'") from None
    try:
        with h5py.File(path) as file:
            parts = [np.asarray(file[part][key]) for part in ("train", "test") for key in ("data", "target")]
    except (OSError, KeyError, TypeError) as error:
        raise damaged(path, error) from error
    for x in parts[::2]:
        if x.ndim != 2 or x.shape[1] != 256:
            raise damaged(path, f"data has shape {x.shape}, expected (N, 256)")
    return [_bytes(parts[0]), parts[1].astype(np.int64), _bytes(parts[2]), parts[3].astype(np.int64)]


def _bytes(x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.asarray(np.rint(np.clip(x, 0, 1) * 255), np.uint8).reshape(-1, 16, 16)
