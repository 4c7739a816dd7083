"""Digits: 1,797 real handwritten 8x8 digits that come with scikit-learn, so there is always something to train on.

E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI repository 1998 (its test part). It has no test
set of its own: a fixed stratified fifth is one.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Arrays, Dataset, Limit, Size, build
from fedloom.registry import register

__all__ = ["digits"]


@register("dataset", "digits", paper="Alpaydin & Kaynak, UCI Optical Recognition of Handwritten Digits, 1998")
def digits(size: Size = None, limit: Limit = None) -> Dataset:
    """Handwritten digits, 8x8 grey, 1,797 images, embedded: needs no download."""
    table = _table()
    x = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return build("digits", Arrays(Path("digits"), x, table[:, -1].astype(np.int64)), size=size, limit=limit)


def _table() -> npt.NDArray[np.float64]:
    """Rows of 64 pixels (0 .. 16) and a label."""
    # Importing scikit-learn takes over a second, reading its file 30 ms; every worker process pays for it.
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package else ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])
