"""What participants know of each other, and what they sent each other, for the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from fedloom.report.plots import heat_map
from fedloom.report.tables import Rows, print_table
from fedloom.report.traffic import traffic_rows
from fedloom.runs.knowledge import knowledge
from fedloom.runs.result import Result
from fedloom.runs.store import Store

__all__ = ["show_knowledge", "show_traffic"]


def show_knowledge(folder: Path, picture: Path | None, *, as_json: bool) -> None:
    """Ask everybody, draw the heat map, print the table."""
    known = knowledge(folder)
    drawn = heat_map(known, picture or folder / "knowledge.png")
    if as_json:
        parts = {"peers": known.peers, "classes": known.classes}
        plain = {
            name: [[None if np.isnan(value) else value for value in row] for row in part.tolist()]
            for name, part in parts.items()
        }
        own, others = known.own, None if np.isnan(known.others) else known.others
        sys.stdout.write(json.dumps({**plain, "own": own, "others": others, "picture": str(drawn)}) + "\n")
        return
    rows: Rows = {}
    for number, row in enumerate(known.peers):
        rows[str(number)] = {str(n): f"{100 * value:.1f}" for n, value in enumerate(row)}
    sys.stdout.write("right answers, %: a row's model on a column's test part; clients are numbered as in the ledger\n")
    print_table(Console(), "", rows)
    beside = "there are no others" if np.isnan(known.others) else f"others' data {known.others:.1%}"
    sys.stdout.write(f"own data {known.own:.1%}, {beside}\npicture: {drawn}\n")


def show_traffic(folders: Sequence[Path], *, as_json: bool) -> None:
    """One line a run."""
    same = len({folder.name for folder in folders}) < len(folders)
    runs = {str(folder) if same else folder.name: Result(Store.open(folder), {}) for folder in folders}
    rows = traffic_rows(runs)
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    # Turned around, so that a handful of runs fits the width of a terminal.
    heads = list(dict.fromkeys(head for row in rows.values() for head in row))
    print_table(Console(), "a round", {head: {run: row[head] for run, row in rows.items()} for head in heads})
