"""Work that may be recorded: what it draws comes from torch, whose generators a record starts anew."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

__all__ = ["undrawn"]


@contextmanager
def undrawn() -> Iterator[None]:
    """Refuse work that draws with Python's or NumPy's own generator: a record of it would repeat the same numbers.

    Both generators end where they began.
    """
    before = _numbers()
    yield
    if _numbers() != before:
        python, numpy = pickle.loads(before)
        random.setstate(python)
        np.random.set_state(numpy)
        raise RuntimeError("it draws random numbers in Python, which a record of its operations would repeat")


def _numbers() -> bytes:
    """Where both generators stand."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
