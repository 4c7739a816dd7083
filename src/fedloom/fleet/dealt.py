"""Which model does a device get, where a study names several? The stronger, the larger."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["dealt"]


def dealt(capacity: np.ndarray, costs: Sequence[int]) -> np.ndarray:
    """For each client the place of its model in the list: shares as equal as can be, the costliest to the strongest.

    `costs` are the models'. Of devices of equal capacity those with smaller numbers come first.

    >>> dealt(np.array([0.25, 1.0, 0.5, 1.0]), [10, 300]).tolist()
    [0, 1, 0, 1]
    """
    strongest = np.argsort(-capacity, kind="stable")
    costliest = np.argsort(-np.asarray(costs), kind="stable")
    kinds = np.empty(len(capacity), np.int64)
    kinds[strongest] = costliest[np.arange(len(capacity)) * len(costs) // len(capacity)]
    return kinds
