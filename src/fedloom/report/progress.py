"""Progress of a run: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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


@contextmanager
def watching(label: str, rounds: int, done: int = 0) -> Iterator[Any]:
    """Something to call with every round's row; writes to standard error, so that results can be piped.

    A run that goes on has some rounds `done`.
    """
    console = Console(stderr=True)
    if not console.is_terminal:

        def line(row: Mapping[str, Any]) -> None:
            if "local_accuracy" in row or row["round"] == rounds:
                sys.stderr.write(f"{label}  round {row['round']}/{rounds}  {numbers_of(row)}\n")

        yield line
        return
    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(label, total=rounds, completed=done, numbers="starting")
        known: dict[str, Any] = {}

        def move(row: Mapping[str, Any]) -> None:
            known.update({key: value for key, value in row.items() if value is not None})
            progress.update(bar, completed=row["round"], numbers=numbers_of(known))

        yield move
