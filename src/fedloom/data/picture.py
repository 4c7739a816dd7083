"""A picture of a split: who holds how many images of which class.

Classes are rows and clients columns, as in most papers; above stand the clients' sizes by part. Beyond 200 clients the
first 100 are shown and the sizes of all become a histogram.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Dataset
from fedloom.data.rows import Rows
from fedloom.data.split import Split

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

MOST, SHOWN = 200, 100
INK, FAINT = "#22303c", "#8a97a3"
PARTS = {"train": "#1f6f8b", "validation": "#74b3c4", "test": "#f2a65a"}


def draw(split: Split, dataset: Dataset, path: Path | str, title: str = "") -> None:
    """Write the picture as PNG, SVG or PDF, by the path's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    clients = len(split.train)
    shown = clients if clients <= MOST else SHOWN
    counts = _counts(split.train, dataset, shown)
    width = float(np.clip(2.2 + 0.42 * shown, 6.4, 15))
    height = float(np.clip(0.3 * dataset.classes, 2.2, 8.5))
    # A figure of its own, not pyplot's: the caller's backend and open figures stay as they are.
    figure = Figure(figsize=(width, height + 2.9), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    top, main = figure.subplots(2, 1, height_ratios=[1.5, height], sharex=clients <= MOST)
    if clients <= MOST:
        _sizes(top, split)
        figure.legend(loc="outside upper right", frameon=False, fontsize=8, ncols=3, labelcolor=INK, borderpad=0)
    else:
        _histogram(top, split.train.sizes)
    _heat(main, counts, dataset)
    image = main.images[0]
    bar = figure.colorbar(image, ax=main, pad=0.01, aspect=30, fraction=0.04)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=FAINT)
    bar.set_label("training images", color=FAINT, fontsize=8)
    if shown <= 30:
        names = _groups(split.train, dataset) or [str(client) for client in range(shown)]
        main.set_xticks(np.arange(shown), names, rotation=0 if max(map(len, names)) * shown < 70 else 90)
    main.set_xlabel("client" if shown == clients else f"client (the first {shown} of {clients:,})", color=INK)
    total = f"{len(split.train.rows):,} training images, {clients:,} clients, {dataset.classes} classes"
    public = f", {len(split.public):,} public" if len(split.public) else ""
    figure.suptitle(title or dataset.name, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    top.set_title(total + public, loc="left", x=0, fontsize=9, color=FAINT, pad=8)
    figure.savefig(path, dpi=150)


def _counts(rows: Rows, dataset: Dataset, shown: int) -> npt.NDArray[np.int64]:
    """(classes, clients) numbers of training images."""
    until = int(rows.offsets[shown])
    cells = dataset.y[rows.rows[:until]] * shown + rows.owners[:until]
    return np.bincount(cells, minlength=dataset.classes * shown).reshape(dataset.classes, shown)


def _groups(rows: Rows, dataset: Dataset) -> list[str]:
    """What each client's only group is called; nothing where clients hold several."""
    if dataset.groups is None or rows.sizes.min() == 0:
        return []
    groups = [np.unique(dataset.groups[part]) for part in rows]
    return [dataset.group_names[group[0]] for group in groups] if all(len(group) == 1 for group in groups) else []


def _sizes(axes: Axes, split: Split) -> None:
    floor = np.zeros(len(split.train))
    for part, colour in PARTS.items():
        sizes = getattr(split, part).sizes
        axes.bar(np.arange(len(floor)), sizes, 0.82, bottom=floor, color=colour, label=part)
        floor += sizes
    _quiet(axes)
    axes.set_ylabel("images", color=INK)


def _histogram(axes: Axes, sizes: npt.NDArray[np.int64]) -> None:
    spread = sizes.max() / max(1, np.median(sizes)) > 10
    edges = (
        np.geomspace(max(1, sizes.min()), sizes.max() + 1, 50)
        if spread
        else np.linspace(sizes.min(), sizes.max() + 1, 50)
    )
    # Sizes are whole numbers: bins that start between them have no gaps.
    axes.hist(sizes, bins=(np.unique(np.floor(edges)) - 0.5).tolist(), color=PARTS["train"])
    if spread:
        axes.set_xscale("log")
    _quiet(axes)
    axes.set_xlabel("training images of a client", color=INK)
    axes.set_ylabel("clients", color=INK)


def _heat(axes: Axes, counts: npt.NDArray[np.int64], dataset: Dataset) -> None:
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    classes, shown = counts.shape
    water = LinearSegmentedColormap.from_list("water", ["#d7ecef", "#74b3c4", "#1f6f8b", "#0b3954"])
    colours = water.with_extremes(bad="#f6f7f8")  # nothing held: paper, not the palest colour
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, int(counts.max())))
    axes.imshow(np.ma.masked_equal(counts, 0), cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    if shown <= 30 and classes <= 30:
        for label, client in np.argwhere(counts):
            value = int(counts[label, client])
            text = f"{value:,}" if value < 10_000 else f"{value / 1000:.0f}k"
            light = norm(value) > 0.45
            axes.text(client, label, text, ha="center", va="center", fontsize=6.5, color="white" if light else INK)
    if shown <= 60 and classes <= 60:
        axes.set_xticks(np.arange(-0.5, shown), minor=True)
        axes.set_yticks(np.arange(-0.5, classes), minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2)
    step = 1 if classes <= 30 else -(-classes // 25)
    axes.set_yticks(np.arange(0, classes, step), [_short(name) for name in dataset.class_names[::step]])
    _quiet(axes)


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:16]}…"


def _quiet(axes: Axes) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(which="both", length=0, labelsize=8, colors=INK)
