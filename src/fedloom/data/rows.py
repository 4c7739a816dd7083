"""Row numbers per client, kept as two arrays so that a hundred thousand clients cost no more than their samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Ints

__all__ = ["Rows"]


@dataclass(frozen=True, eq=False)
class Rows:
    """A ragged array: the row numbers of each client, one after the other.

    >>> Rows.of([[3, 5], [], [1]])[0].tolist()
    [3, 5]
    """

    rows: Ints
    offsets: Ints
    """Where each client's rows start, and where the last one's end: one more entry than clients."""

    @classmethod
    def of(cls, parts: Sequence[npt.ArrayLike]) -> Rows:
        """One sequence of row numbers per client."""
        arrays = [np.asarray(part, np.int64) for part in parts]
        return cls(
            np.concatenate([*arrays, np.empty(0, np.int64)]), _offsets(np.array([len(a) for a in arrays], np.int64))
        )

    @classmethod
    def owned(cls, owner: Ints, clients: int, rows: Ints | None = None) -> Rows:
        """From the owner of each row (-1: nobody's); every client's rows keep their order."""
        order = np.argsort(owner, kind="stable")
        order = order[np.searchsorted(owner[order], 0) :]
        return cls(order if rows is None else rows[order], _offsets(np.bincount(owner[owner >= 0], minlength=clients)))

    @property
    def sizes(self) -> Ints:
        """How many rows each client has."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> Ints:
        """The client of each entry of `rows`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Ints:
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def __iter__(self) -> Iterator[Ints]:
        return (self[client] for client in range(len(self)))


def _offsets(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
