"""Convergence curves of FedES's tables (figure 3): mean and range over seeds, with what was printed for the end.

python bench/evolution_curves.py evolution-mnist runs/papers/evolution-mnist-small out.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedloom.runs.papers import read_paper

MEASURES = {
    "onlooker_accuracy": "clients that look on: the global model",
    "local_accuracy": "clients that train: their own",
}


def read(path: Path, measure: str) -> dict[int, float]:
    """What was measured, by round, in percent."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["round"]: 100 * row[measure] for row in rows if row.get(measure) is not None}


def draw(table: str, folder: Path, picture: Path) -> None:
    """One panel a measure, one line a row of the table."""
    printed = next(each for each in read_paper(table).paper.tables if set(MEASURES) <= set(each.measures))
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(10, 3.6), layout="constrained")
    for axis, (measure, title) in zip(axes, MEASURES.items(), strict=True):
        for row in printed.rows:
            ended = sorted(folder.glob(f"{row}-?/summary.json"))
            runs = [read(path.with_name("metrics.jsonl"), measure) for path in ended]
            if not runs:
                continue
            rounds = sorted(runs[0])
            values = np.array([[run[number] for number in rounds] for run in runs])
            (line,) = axis.plot(rounds, values.mean(0), label=f"{row} ({len(runs)} seeds)")
            axis.fill_between(rounds, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
            published = printed.published.get(row, {}).get("", [])
            if len(published) == len(printed.measures):
                last = published[printed.measures.index(measure)]
                axis.axhline(last, color=line.get_color(), linestyle=":", linewidth=1)
        axis.set(title=title, xlabel="round", ylabel="accuracy, %")
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, fontsize="small", loc="lower right")
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    table, folder, picture = sys.argv[1:]
    draw(table, Path(folder), Path(picture))
