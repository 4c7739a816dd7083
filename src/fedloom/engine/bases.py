"""What the tasks of a round share: an engine moves it to a worker once."""

from __future__ import annotations

from collections.abc import Mapping

from fedloom.types import Tensors

__all__ = ["Parts", "same_parts"]

Parts = Mapping[str, Tensors]


def same_parts(one: Parts | None, two: Parts | None) -> bool:
    """Whether two bases are made of the very same tensors."""
    if one is None or two is None or one is two:
        return one is two
    return one.keys() == two.keys() and all(
        one[part].keys() == two[part].keys() and all(tensor is two[part][name] for name, tensor in one[part].items())
        for part in one
    )
