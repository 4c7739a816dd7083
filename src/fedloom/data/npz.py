"""Bring your own data as one `.npz` file.

Layout: `x_train, y_train` and, optional, `x_test, y_test`: uint8 images (N, H, W) or (N, H, W, C) and integer labels;
optional `g_train, g_test` (group of each image: domain or writer), `class_names`, `group_names`.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Annotated

import numpy as np

from fedloom.data.dataset import Arrays, Dataset, Limit, Size, build
from fedloom.errors import InputError, choose
from fedloom.registry import register

__all__ = ["npz", "read_npz"]

KEYS = ("x_train", "y_train", "x_test", "y_test", "g_train", "g_test", "class_names", "group_names")
# An exported client file also holds its validation part; as a data set of its own it is read without.
IGNORED = ("x_validation", "y_validation")


@register("dataset", "npz")
def npz(
    path: Annotated[str, "the file: x_train, y_train, and x_test, y_test, g_train, g_test, class_names, group_names"],
    size: Size = None,
    limit: Limit = None,
    natural: Annotated[bool, "natural images: a horizontal flip keeps the label"] = False,
) -> Dataset:
    """Your own images and labels in one .npz file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"data set file '{path}' {'is a folder' if file.is_dir() else 'does not exist'}")
    return build(file.stem, read_npz(file), size=size, limit=limit, natural=natural, hold_out=False)


def read_npz(path: Path) -> Arrays:
    """Read the arrays of a file; never unpickles."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, KeyError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        # numpy would here advise to unpickle the file, which is the one thing not to do.
        why = "it holds something other than plain arrays" if "pickle" in str(error) else error
        raise InputError(f"{path} is damaged or not an .npz file: {why}") from error
    for key in arrays:
        if key not in KEYS + IGNORED:
            raise choose(f"array in {path}", key, KEYS)
    for key in ("x_train", "y_train"):
        if key not in arrays:
            raise InputError(f"{path} has no array '{key}'; it holds {', '.join(arrays) or 'nothing'}")
    names = {
        key: tuple(str(name) for name in arrays.pop(key)) for key in ("class_names", "group_names") if key in arrays
    }
    return Arrays(path, **{key: array for key, array in arrays.items() if key not in IGNORED}, **names)  # type: ignore[arg-type]
