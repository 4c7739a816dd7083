"""Sums of reports whose bits do not depend on who made them.

Sums of floating-point numbers depend on their order. So reports are added up in blocks of so many consecutive tasks,
and the sums of the blocks one after another. Whoever adds up a block, this process or a worker, finds the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

from fedloom.types import Outcome, Report, Task, Tensors

__all__ = ["BLOCK", "Blocks", "Joined", "Reduction", "Summed", "Sums"]

BLOCK = 16  # tasks

Sums = Mapping[str, Any]  # plain data


class Joined(Protocol):
    """A merge under way."""

    def add(self, report: Report) -> None:
        """Take one report in."""

    def result(self) -> Tensors:
        """The server's next tensors."""


@runtime_checkable
class Summed(Joined, Protocol):
    """A merge that is made of sums: memory does not grow with the cohort, and parts may be added up elsewhere."""

    def sums(self) -> Sums:
        """What was added up so far."""

    def combine(self, sums: Sums) -> None:
        """Add sums that were made elsewhere; they stay as they are."""


class Reduction(Protocol):
    """A merge whose reports are added up where they were made: the sums travel, the reports do not."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks; their reports have no tensors any more."""

    def add(self, report: Report) -> None:
        """The last outcome's report counts."""

    def sums(self) -> Sums:
        """All that count, added up."""


class Blocks:
    """Reports added up block by block, as they come; the sums of some blocks may have been made elsewhere."""

    def __init__(
        self,
        run: Callable[[Iterable[Task]], Iterator[Outcome]],
        begin: Callable[[], Any],  # an empty merge that is made of sums
        made: MutableMapping[int, Sums] | None = None,  # by block; there before its outcomes are
    ) -> None:
        self._run, self._begin = run, begin
        self._made: MutableMapping[int, Sums] = {} if made is None else made
        self._whole: Summed = begin()
        self._block: Summed = begin()
        self._number = 0

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks."""
        for number, outcome in enumerate(self._run(tasks)):
            if number // BLOCK > self._number:
                self._close()
                self._number = number // BLOCK
            yield outcome

    def add(self, report: Report) -> None:
        """The last outcome's report counts."""
        if self._number not in self._made:
            self._block.add(report)

    def sums(self) -> Sums:
        """All that count, added up."""
        self._close()
        return self._whole.sums()

    def _close(self) -> None:
        made = self._made.pop(self._number, None)
        self._whole.combine(self._block.sums() if made is None else made)
        self._block = self._begin()
