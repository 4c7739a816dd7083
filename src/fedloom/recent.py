"""A cache that forgets: sizes that evolve are new in every round."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Recent"]

Key = TypeVar("Key")
Kept = TypeVar("Kept")


class Recent(dict[Key, Kept]):
    """A dict of at most so many entries; the one that was not used for longest goes first.

    >>> cache = Recent(2)
    >>> cache[1], cache[2] = "a", "b"
    >>> cache[1], cache.setdefault(3, "c"), cache
    ('a', 'c', {1: 'a', 3: 'c'})
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __getitem__(self, key: Key) -> Kept:
        """Used now."""
        value = self.pop(key)
        super().__setitem__(key, value)
        return value

    def setdefault(self, key: Key, value: Kept) -> Kept:
        """What is there, or else this."""
        if key not in self:
            self[key] = value
        return self[key]

    def __setitem__(self, key: Key, value: Kept) -> None:
        """Make room first."""
        while len(self) >= self.most and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)
