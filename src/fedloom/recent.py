"""A cache that forgets: sizes that evolve are new in every round."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Recent"]

Key = TypeVar("Key")
Kept = TypeVar("Kept")


class Recent(dict[Key, Kept]):
    """A dict of at most so many entries; the one that was made first goes first.

    >>> cache = Recent(2)
    >>> cache[1], cache[2], cache[3] = "a", "b", "c"
    >>> cache
    {2: 'b', 3: 'c'}
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Kept) -> None:
        """Make room first."""
        while len(self) >= self.most and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)
