"""Three participants that share seven digits; each holds one more that no other has."""

from __future__ import annotations

import numpy as np

from fedloom.data.dataset import Dataset
from fedloom.data.digits import digits

PARTICIPANTS = 3


def private_digits(size: int | None = None, limit: int | None = None) -> Dataset:
    """Digits 0 to 6 dealt to everybody, 7 to the first participant, 8 to the second, 9 to the third."""
    whole = digits(size=size, limit=limit)
    shared = np.arange(len(whole.y)) % PARTICIPANTS
    owner = np.where(whole.y < 7, shared, whole.y - 7)
    return Dataset(
        "private_digits", whole.x, whole.y, whole.trained, whole.class_names, owner, ("first", "second", "third")
    )
