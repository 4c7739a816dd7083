"""Activation profiles of clients, drawn pair by pair."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np

from fedloom.runs.profiles import Profiles

__all__ = ["draw_profiles", "overlap"]

GROUPS = 6  # drawn at most; a deep network's are taken evenly


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    """How alike two profiles are: the correlation of the units' activations; NaN where one does not vary.

    >>> round(overlap(np.array([0.0, 1.0, 2.0]), np.array([0.0, 2.0, 4.0])), 6)
    1.0
    """
    if one.std() == 0 or other.std() == 0:
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])


def draw_profiles(found: Profiles, path: Path) -> Path:
    """One row a pair of clients, one column a group of units."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(next(iter(found.values())))
    groups = [names[int(at)] for at in np.unique(np.linspace(0, len(names) - 1, min(GROUPS, len(names))).round())]
    pairs = list(combinations(found, 2))
    figure, axes = pyplot.subplots(
        len(pairs), len(groups), figsize=(3.4 * len(groups), 1.5 * len(pairs) + 0.6), squeeze=False,
        layout="constrained", sharex="col",
    )  # fmt: skip
    for row, pair in zip(axes, pairs, strict=True):
        for axis, group in zip(row, groups, strict=True):
            lines = [found[client][group] for client in pair]
            for client, line, colour in zip(pair, lines, ("tab:blue", "tab:orange"), strict=True):
                axis.plot(line, label=f"client {client}", linewidth=1.2, color=colour)
            axis.text(0.99, 0.95, f"r = {overlap(*lines):.2f}", transform=axis.transAxes, ha="right", va="top", size=8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=7)
        row[0].set_ylabel(f"{pair[0]} and {pair[1]}", size=9)
    for axis, group in zip(axes[0], groups, strict=True):
        axis.set_title(f"{group} ({len(next(iter(found.values()))[group])} units)", size=9)
    for axis in axes[-1]:
        axis.set_xlabel("unit", size=8)
    lines, labels = axes[0][0].get_lines(), ["first client", "second client"]
    figure.legend(handles=lines, labels=labels, loc="outside lower right", ncols=2, frameon=False, fontsize=8)
    figure.supylabel("mean activation", size=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
