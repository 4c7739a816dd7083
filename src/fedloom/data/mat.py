"""SVHN from its MATLAB files (Netzer et al. 2011), format 2 (cropped 32x32). The label 10 stands for the digit 0."""

from __future__ import annotations

import string
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Arrays, Dataset, Limit, Size, build
from fedloom.data.files import Download, Finder, damaged, gather
from fedloom.errors import InputError
from fedloom.registry import register

__all__ = ["read_mat", "svhn"]

URL = "http://ufldl.stanford.edu/housenumbers/"
DOWNLOADS = [
    Download(f"{URL}train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
    Download(f"{URL}test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
]


@register("dataset", "svhn", paper="Netzer et al., Reading digits in natural images, NIPS workshop 2011")
def svhn(size: Size = None, limit: Limit = None) -> Dataset:
    """SVHN house numbers, cropped digits, 32x32 colour, 73,257 / 26,032."""
    found = gather(
        "svhn",
        lambda finder: read_mat(finder, "train_32x32.mat", "test_32x32.mat"),
        wanted="train_32x32.mat and test_32x32.mat",
        downloads=DOWNLOADS,
    )
    return build("svhn", found, size=size, limit=limit)


def read_mat(finder: Finder, train: str, test: str) -> Arrays | None:
    """Read a training and a test file with images `X` (H, W, 3, N) and labels `y`."""
    train_path, test_path = finder.find(train), finder.find(test)
    if train_path is None:
        return None
    if test_path is None:
        raise InputError(f"{train_path.parent} has {train} but not {test}")
    return Arrays(train_path.parent, *_read(train_path), *_read(test_path), class_names=tuple(string.digits))


def _read(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        content = loadmat(path, variable_names=["X", "y"])
        x, y = content["X"], content["y"].ravel()
    except KeyError as error:
        raise damaged(path, f"it has no variable {error}") from error
    except (MatReadError, OSError, EOFError, ValueError, TypeError, NotImplementedError, zlib.error) as error:
        raise damaged(path, error) from error
    if x.ndim != 4 or x.shape[2] != 3:
        raise damaged(path, f"X has shape {x.shape}, expected (32, 32, 3, N)")
    return x.transpose(3, 0, 1, 2), y.astype(np.int64) % 10
