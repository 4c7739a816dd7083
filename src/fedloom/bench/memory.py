"""Whether memory stays flat over many rounds of a small federation with sub-models of five widths."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedloom.bench.federation import PICTURES, device_of, seconds_of_rounds

__all__ = ["grown", "memory", "plot"]

POINTS = 25  # how often memory is looked at
ROUNDS = {"cpu": 300, "cuda": 2500}
STUDY = {
    "method": {"name": "heterofl"},
    "data": {"name": PICTURES, "count": 400, "validation": 0.0},
    "model": {"name": "lenet5"},
    "fleet": {"name": "low", "clients": 10},
    "train": {"batch_size": 10, "momentum": 0.9},
}


def memory(device: str | None = None, rounds: int | None = None) -> list[dict[str, object]]:
    """Memory of this process and its workers, and of the GPU, every so many rounds.

    The last row tells the growth: the median of the last third of the rows less that of the middle third. Flat means
    that it is less than 2 %. The first third is start-up: captures, caches, allocators that find their size.
    """
    where = device_of(device)
    count = rounds or ROUNDS[where]
    every, rows = max(1, count // POINTS), list[dict[str, Any]]()

    def look(number: int) -> None:
        if number % every == 0:
            on_gpu = where == "cuda"
            rows.append(
                {"round": number, "process_mb": _resident() / 1e6,
                 "cuda_allocated_mb": torch.cuda.memory_allocated() / 1e6 if on_gpu else None,
                 "cuda_reserved_mb": torch.cuda.memory_reserved() / 1e6 if on_gpu else None}
            )  # fmt: skip

    seconds_of_rounds(STUDY, count, where, look)
    last: dict[str, Any] = {"round": "growth"}
    flat = True
    for name in ("process_mb", "cuda_allocated_mb", "cuda_reserved_mb"):
        if rows[0][name] is not None:
            last[name], share = grown([row[name] for row in rows])
            flat &= share < 0.02
    return [*rows, {**dict.fromkeys(rows[0]), **last, "flat": flat}]


def grown(values: Sequence[float]) -> tuple[float, float]:
    """By how much the last third lies above the middle third (medians), and that as a share.

    >>> grown([5, 9, 10, 10, 10, 11])
    (0.5, 0.05)
    """
    third = max(1, len(values) // 3)
    middle, end = median(values[third : -third or None] or values[:1]), median(values[-third:])
    return end - middle, (end - middle) / middle


def _resident() -> int:
    """Resident bytes of this process and its workers; what they share is counted in each. Linux only, else 0."""
    total = 0
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Memory over rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen = [row for row in rows if isinstance(row["round"], int)]
    figure, axis = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for name in ("process_mb", "cuda_allocated_mb", "cuda_reserved_mb"):
        if seen[0][name] is not None:
            axis.plot([row["round"] for row in seen], [row[name] for row in seen], label=name.removesuffix("_mb"))
    axis.set(xlabel="round", ylabel="MB", ylim=(0, None))
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
