"""How the time of a round grows: with the clients a round, with the size of the model, with the local steps.

Each row tells the exponent from the row above: 1 is linear growth, less is better. The first rows of a series are
mostly fixed costs, so their exponents are small; what must hold is that none is above 1 by more than the noise. Clients
of the first two series do two steps of ten pictures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from fedloom.bench.federation import PICTURES, device_of, seconds_of_rounds

__all__ = ["exponents", "plot", "scale"]

CLIENTS = (1, 10, 100, 1000)
WIDTHS = (0.125, 0.25, 0.5, 1.0)
STEPS = (1, 4, 16, 64)


def scale(device: str | None = None, rounds: int = 3, most: int = 1000) -> list[dict[str, object]]:
    """Seconds a round (median of `rounds`) along three series, up to `most` clients a round."""
    where, rows = device_of(device), list[dict[str, object]]()
    for series, points in _series(most):
        found = [(size, median(seconds_of_rounds(sections, rounds, where))) for size, sections in points]
        for (size, seconds), exponent in zip(found, exponents(found), strict=True):
            rows.append({"series": series, "size": size, "seconds": seconds, "exponent": exponent})
    return rows


def exponents(points: Sequence[tuple[float, float]]) -> list[float | None]:
    """Growth from point to point as a power: log of the times over log of the sizes; none for the first.

    >>> exponents([(1, 2.0), (10, 20.0), (100, 20.0)])
    [None, 1.0, 0.0]
    """
    pairs = itertools.pairwise(points)
    return [None, *(log(t / before) / log(n / size) for (size, before), (n, t) in pairs)]


def _series(most: int) -> Iterator[tuple[str, list[tuple[float, dict[str, Any]]]]]:
    """What grows, and the studies along it."""
    some = [number for number in CLIENTS if number <= most]
    yield "clients (LeNet-5)", [(number, _study("lenet5", number, 20 * number, 10)) for number in some]
    widths = [[round(width * full) for full in (64, 128, 256, 512)] for width in WIDTHS]
    yield "forward MACs (cnn4)", [(_macs(each), _study("cnn4", 10, 200, 10, widths=each)) for each in widths]
    yield "local steps (LeNet-5)", [(steps, _study("lenet5", 10, 200, 10, steps)) for steps in STEPS]


def _study(
    model: str, clients: int, images: int, batch: int, steps: int | None = None, **fields: Any
) -> dict[str, Any]:
    return {
        "data": {"name": PICTURES, "count": images, "validation": 0.0, "normalise": "fixed"},
        "model": {"name": model, **fields},
        "fleet": {"clients": clients},
        "train": {"batch_size": batch, "momentum": 0.9, **({"steps": steps} if steps else {})},
    }


def _macs(widths: Sequence[int]) -> int:
    """Forward multiply-accumulates of the four-block network on a picture of 28 x 28."""
    sides, inputs = (28, 14, 7, 3), (1, *widths[:-1])
    blocks = sum(9 * n * m * side * side for n, m, side in zip(inputs, widths, sides, strict=True))
    return blocks + 10 * widths[-1]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a series, both axes logarithmic, with the line of linear growth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = list(dict.fromkeys(row["series"] for row in rows))
    figure, axes = pyplot.subplots(1, len(series), figsize=(4 * len(series), 3.4), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], series, strict=True):
        own = [row for row in rows if row["series"] == name]
        sizes, seconds = [row["size"] for row in own], [row["seconds"] for row in own]
        axis.loglog(sizes, seconds, marker="o", label="measured")
        axis.loglog(sizes, [seconds[-1] * size / sizes[-1] for size in sizes], "--", color="grey", label="linear")
        axis.set(xlabel=name, ylabel="seconds a round")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
