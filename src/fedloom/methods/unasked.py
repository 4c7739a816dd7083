"""Slots that a method never asks or cannot go by: what a study puts there is refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterable

from fedloom.errors import InputError
from fedloom.method import Method

__all__ = ["refuse"]


def refuse(method: Method, slots: Iterable[str], reason: str) -> None:
    """Refuse whatever is in these slots but the method's own defaults."""
    for slot in slots:
        if getattr(method, slot) != getattr(type(method), slot):
            raise InputError(f"{type(method).__name__.lower()} {reason}; leave [{slot}] out")
