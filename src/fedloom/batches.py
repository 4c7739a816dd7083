"""Rows in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

__all__ = ["batches_of", "sizes_of", "stream"]


def stream(pool: Sequence[Tensor], size: int, generator: torch.Generator, uses: int, shuffle: bool) -> Iterator[Tensor]:
    """Epoch after epoch over the pool's rows, each shuffled or in order; after the last, the last again."""
    for number in count():
        rows = pool[min(number, len(pool) - 1)]
        order = rows[torch.randperm(len(rows), generator=generator)] if shuffle else rows
        batches = batches_of(order, size)
        # Batches of one step come from one permutation, so that they share no sample: smaller ones where there are few
        # samples, unless these would be single.
        if len(batches) < uses <= len(order) // 2:
            batches = list(order.tensor_split(uses))
        yield from batches[: max(uses, len(batches) // uses * uses)]


def batches_of(rows: Tensor, size: int) -> list[Tensor]:
    """Rows in batches."""
    return list(torch.split(rows, sizes_of(len(rows), size)))


def sizes_of(number: int, size: int) -> list[int]:
    """How so many rows are batched: the last batch is short; one of a single row joins the one before it.

    >>> sizes_of(9, 4), sizes_of(10, 4)
    ([4, 5], [4, 4, 2])
    """
    sizes = [size] * (number // size) + ([number % size] if number % size else [])
    if size > 1 and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [size + 1]
    return sizes
