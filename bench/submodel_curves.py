"""Curves of some runs of one published table, with what was printed for the end of training.

python bench/submodel_curves.py submodels-3-4 CIFAR-10 out.png "FedDSE=runs/FedDSE-0/metrics.jsonl" ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from fedloom.runs.papers import read_paper

SMOOTH = 10  # rounds


def read(path: Path, name: str) -> tuple[list[int], list[float]]:
    """The rounds that have this number, and the numbers."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(row["round"], row[name]) for row in rows if row.get(name) is not None]
    return [number for number, _ in found], [value for _, value in found]


def smoothed(values: list[float]) -> list[float]:
    """The mean of the last rounds: every round trains other clients."""
    windows = [values[max(0, place - SMOOTH + 1) : place + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def draw(table: str, column: str, picture: Path, runs: dict[str, Path]) -> None:
    """Training loss of every round, and the accuracies that were measured."""
    printed = read_paper(table).paper.published
    figure, (losses, accuracies) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, path in runs.items():
        rounds, values = read(path, "train_loss")
        (line,) = losses.plot(rounds, smoothed(values), label=name)
        rounds, values = read(path, "global_accuracy")
        accuracies.plot(rounds, [100 * value for value in values], "o-", color=line.get_color())
        if column in printed.get(name, {}):
            accuracies.axhline(printed[name][column], color=line.get_color(), linestyle=":", linewidth=1)
    losses.set(xlabel="round", ylabel=f"training loss, mean of {SMOOTH} rounds", ylim=(0, None))
    accuracies.set(xlabel="round", ylabel="accuracy, %", ylim=(0, None), title="dotted: as published, after all rounds")
    accuracies.set_xlim(0, None)
    losses.legend(frameon=False, fontsize="small")
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    table, column, picture, *given = sys.argv[1:]
    pairs = (each.split("=", 1) for each in given)
    draw(table, column, Path(picture), {name: Path(path) for name, path in pairs})
