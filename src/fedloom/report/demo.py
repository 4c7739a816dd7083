"""The demonstration: what label skew does to federated learning, in under a minute on bundled data."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from fedloom.report.plots import curves
from fedloom.report.progress import watching
from fedloom.report.tables import print_table, summary_rows
from fedloom.runs.start import run

__all__ = ["demo"]

METHODS = ("fedavg", "scaffold", "fedbn")
ROUNDS = 15


def demo(out: Path) -> None:
    """Three methods on 8x8 digits dealt unevenly to ten clients: a table, a picture, the next command."""
    console = Console()
    console.print("Ten clients share 1,438 pictures of digits; a Dirichlet draw (0.3) gives each its own few classes.")
    results = []
    for method in METHODS:
        with watching(method, ROUNDS) as watch:
            settings = {"train.lr": 0.1, "train.batch_size": 16, "evaluate.every": 1}
            results.append(
                run(
                    method,
                    watch=watch,
                    model="lenet5_bn",
                    partition="dirichlet:0.3",
                    rounds=ROUNDS,
                    out=out,
                    set=settings,
                )
            )
    print_table(console, "method", summary_rows([result.summary for result in results]))
    picture = curves(results, out / "demo.png")
    sys.stdout.write(
        f"picture: {picture}\nnext:    fedloom run fedavg --partition classes:2 --clients 20 --rounds 30\n"
    )
