"""Ctrl-C and SIGTERM as one interruption that never comes between two things that belong together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Signals"]


class Signals:
    """Lets SIGTERM interrupt like Ctrl-C; while held, signals wait."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._holding = False

    def _interrupt(self, number: int, frame: Any) -> None:
        self.received.append(number)
        if not self._holding:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do something whole; a signal that came meanwhile interrupts right after it."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self.received:
            raise KeyboardInterrupt

    def __enter__(self) -> Signals:
        try:
            self._before = {n: signal.signal(n, self._interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # only the main thread may; elsewhere the caller handles signals
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
