"""Curves per client and a table per client and domain, from the runs of `fedloom reproduce fedcpn-...`.

python bench/feature_shift.py runs/fedcpn-joined-paper docs/pictures/fedcpn-joined.png > table.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from statistics import fmean, stdev

import matplotlib.pyplot as plt
import pandas as pd

CURVES = ("FedCPN", "FedBN", "FedProx", "FedAvg")
DOMAINS = ("mnist", "mnist_m", "svhn", "synth_digits", "usps")


def runs_of(folder: Path) -> dict[str, list[Path]]:
    """Finished runs by the row of the table they belong to, one a seed."""
    found: dict[str, list[Path]] = {}
    for summary in sorted(folder.glob("*/summary.json")):
        seed = json.loads((summary.parent / "study.json").read_text())["run"]["seed"]
        found.setdefault(summary.parent.name.removesuffix(f"-{seed}"), []).append(summary.parent)
    return found


def trained_domains(run: Path) -> list[str]:
    """The clients' domains, in their order."""
    unseen = json.loads((run / "study.json").read_text())["data"].get("unseen", "")
    return [name for name in DOMAINS if name not in unseen.split(",")]


def asked(run: Path) -> pd.DataFrame:
    """What clients answered when they were evaluated; rounds from 1."""
    ledger = pd.read_parquet(run / "clients.parquet")
    answers = ledger[ledger["job"] == "evaluate"].copy()
    answers["round"] += 1
    return answers


def spread(values: list[float]) -> str:
    """In per cent, with the deviation over seeds."""
    per_cent = [100 * value for value in values if not isnan(value)]  # no global model: not a number
    if not per_cent:
        return "-"
    return f"{fmean(per_cent):.1f}" + (f" ± {stdev(per_cent):.1f}" if len(per_cent) > 1 else "")


def table(runs: Mapping[str, list[Path]]) -> str:
    """Last round: every client's model on the joined test sets, their mean, the global model, and each domain."""
    some = next(iter(runs.values()))[0]
    clients, tested = trained_domains(some), [name for name in DOMAINS if f"accuracy_{name}" in asked(some)]
    heads = ["", *(f"client {name}" for name in clients), "mean", "global", *(f"on {name}" for name in tested)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row, folders in runs.items():
        cells: list[list[float]] = [[] for _ in heads[1:]]
        for folder in folders:
            answers, last = asked(folder), pd.read_parquet(folder / "metrics.parquet").iloc[-1]
            answers = answers[answers["round"] == answers["round"].max()].sort_values("client")
            own = answers["accuracy"].tolist()
            whole = last["global_accuracy"]
            found = [*own, fmean(own), float("nan") if whole is None else float(whole)]
            found += [float(answers[f"accuracy_{name}"].mean()) for name in tested]
            for cell, value in zip(cells, found, strict=True):
                cell.append(value)
        lines.append("| " + " | ".join([row, *map(spread, cells)]) + " |")
    return "\n".join(lines) + "\n"


def curves(runs: Mapping[str, list[Path]], path: Path) -> None:
    """One panel a client and one for the global model: mean over seeds."""
    clients = trained_domains(next(iter(runs.values()))[0])
    figure, axes = plt.subplots(1, len(clients) + 1, figsize=(3 * (len(clients) + 1), 3), dpi=70, sharey=True)
    for row in (row for row in CURVES if row in runs):
        answers = pd.concat([asked(folder) for folder in runs[row]])
        for client, name in enumerate(clients):
            mean = answers[answers["client"] == client].groupby("round")["accuracy"].mean()
            axes[client].plot(mean.index, 100 * mean, label=row)
            axes[client].set_title(f"client {name}", fontsize=9)
        metrics = pd.concat([pd.read_parquet(folder / "metrics.parquet") for folder in runs[row]])
        whole = metrics.dropna(subset=["global_accuracy"]).groupby("round")["global_accuracy"].mean()
        axes[-1].plot(whole.index, 100 * whole.astype(float), label=row)
    axes[-1].set_title("global model", fontsize=9)
    axes[0].set_ylabel("accuracy, %")
    axes[0].legend(fontsize=8)
    for place in axes:
        place.set_xlabel("round", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    runs = runs_of(Path(sys.argv[1]))
    curves(runs, Path(sys.argv[2]))
    sys.stdout.write(table(runs))
