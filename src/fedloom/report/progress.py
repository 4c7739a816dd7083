"""Progress of a run: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

__all__ = ["numbers_of", "watching"]


def numbers_of(row: Mapping[str, Any]) -> str:
    """A round's numbers in a few words."""
    parts = []
    for key, word in (("global_accuracy", "global"), ("local_accuracy", "local")):
        if row.get(key) is not None:
            parts.append(f"{word} {row[key]:.1%}")
    if row.get("train_loss") is not None:
        parts.append(f"loss {row['train_loss']:.3f}")
    if row.get("failures"):
        parts.append(f"failed {row['failures']}")
    return "  ".join(parts)


class _Bar(Progress):
    """One run: a bar with its times, and below it the numbers, so that both fit into 80 columns."""

    def __init__(self, console: Console, label: str, rounds: int, done: int) -> None:
        super().__init__(
            TextColumn("[bold]{task.description}", table_column=Column(max_width=20, no_wrap=True)), BarColumn(16),
            MofNCompleteColumn(), TextColumn("{task.fields[within]}"), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._run = self.add_task(label, total=rounds, completed=done, within="starting")
        self._known: dict[str, Any] = {}
        self._round, self._over, self._job = done, 0, ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and what is known."""
        yield from super().get_renderables()
        if numbers := numbers_of(getattr(self, "_known", {})):  # the first are asked for before anything is
            yield Text(numbers, no_wrap=True, overflow="ellipsis")

    def __call__(self, row: Mapping[str, Any]) -> None:
        """A round is over."""
        self._known.update({key: value for key, value in row.items() if value is not None})
        self._round, self._over, self._job = row["round"], 0, ""
        self.update(self._run, completed=self._round, within="")

    def heard(self, asked: int, job: str) -> None:
        """A task is over, of a round that asks about so many clients."""
        self._over = self._over + 1 if job == self._job else 1
        self._job = job
        if job != "work":
            self.update(self._run, within=f"{job} {self._over}")
        elif self._over <= asked:
            within = f"{self._over}/{asked} clients"
            self.update(self._run, completed=self._round + self._over / (asked + 1), within=within)
        else:  # stage after stage
            self.update(self._run, within=f"{self._over} tasks")


@contextmanager
def watching(label: str, rounds: int, done: int = 0) -> Iterator[Any]:
    """Something to call with every round's row; writes to standard error, so that results can be piped.

    A run that goes on has some rounds `done`.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with _Bar(console, label, rounds, done) as bar:
            yield bar
        return

    def line(row: Mapping[str, Any]) -> None:
        if "local_accuracy" in row or row["round"] == rounds:
            sys.stderr.write(f"{label}  round {row['round']}/{rounds}  {numbers_of(row)}\n")

    yield line
