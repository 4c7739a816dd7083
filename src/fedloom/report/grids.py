"""Comparisons while they run and when they are done."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedloom.errors import FedloomError
from fedloom.report.html import write_report
from fedloom.report.plots import curves
from fedloom.report.progress import numbers_of
from fedloom.report.statistics import verdict
from fedloom.report.tables import (
    ACCURACY,
    COST,
    NAMES,
    UNTIL,
    Measures,
    Rows,
    aims,
    brief,
    markdown,
    measure_of,
    print_table,
    spread,
    statistics_table,
)  # fmt: skip
from fedloom.runs.experiment import Watch
from fedloom.runs.grid import Cell, Grid, Ran, spreads
from fedloom.runs.result import Result

__all__ = ["announced", "refuse", "run_shown"]

Done = Sequence[tuple[Cell, Result]]


def announced(cell: Cell, number: int, count: int) -> Watch:
    """One line when a cell starts, one when its last round is done."""
    rounds, name = cell.study.run.rounds, f"[{number + 1}/{count}] {cell.label}"
    sys.stderr.write(f"{name}  {rounds} rounds\n")

    def watch(row: Mapping[str, Any]) -> None:
        if row["round"] == rounds or (sys.stderr.isatty() and "local_accuracy" in row):
            sys.stderr.write(f"{name}  round {row['round']}/{rounds}  {numbers_of(row)}\n")

    return watch


def run_shown(grid: Grid, folder: Path, *, as_json: bool, baseline: str | None = None, jobs: int = 0) -> None:
    """Run a comparison and show its tables; they, curves and a report are left in the folder."""
    ran = grid.run(folder, announced, jobs)
    baseline = None if baseline in ran.left_out else baseline
    order = [row for row in dict.fromkeys([baseline, *grid.rows]) if row and row not in ran.left_out]
    tables = _tables(ran, order)
    measure = measure_of([result for _, result in ran.done])
    tested = {row: by_seed(ran.done, row, measure) for row in order}
    winner, sentence = verdict(tested, NAMES[measure])
    if len(grid.seeds) > 1:
        tables[f"{NAMES[measure]} over seeds"] = statistics_table(tested, baseline)
    content = {
        "seeds": list(grid.seeds), "baseline": baseline, "methods": _numbers(ran, [*order, *ran.left_out]),
        "measure": measure, "winner": winner, "verdict": sentence, "left_out": ran.left_out, "folder": str(folder),
        "report": str(folder / "report.html"),
    }  # fmt: skip
    (folder / "table.json").write_text(json.dumps(content, indent=1) + "\n")
    text = "\n".join(f"### {title}\n\n{markdown('method', rows)}" for title, rows in tables.items())
    (folder / "table.md").write_text(f"{text}\n{sentence}\n")
    curves([result for cell, result in ran.done if cell.seed == grid.seeds[0]], folder / "curves.png")
    page = write_report([result.folder for _, result in ran.done], folder / "report.html", baseline)
    if as_json:
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        console = Console()
        for title, rows in tables.items():
            console.print(f"\n[italic]{title}[/italic]")
            print_table(console, "method", rows)
        sys.stdout.write(f"\n{sentence}\n{_seeds(grid, ran, order)}; runs, tables, curves: {folder}\nreport: {page}\n")
    for reason in ran.left_out.values():
        sys.stderr.write(f"fedloom: not in the table: {reason}\n")
    refuse(ran.failures)


def _seeds(grid: Grid, ran: Ran, order: Sequence[str]) -> str:
    words = [f"mean ± standard deviation over {len(grid.seeds)} seed(s)"]
    for row in order:
        ended = sum(cell.row == row for cell, _ in ran.done)
        if ended < len(grid.seeds):
            words.append(f"{row}: {ended} only")
    return "; ".join(words)


def _sections(done: Done) -> dict[str, Measures]:
    sections = {"accuracy": ACCURACY, "cost of the whole run": COST}
    if any("rounds_to_target" in result.summary for _, result in done):
        sections["until the target accuracy"] = UNTIL
    return sections


def _tables(ran: Ran, order: Sequence[str]) -> dict[str, Rows]:
    tables: dict[str, Rows] = {}
    marks = aims({row: [result.summary for cell, result in ran.done if cell.row == row] for row in order})
    for title, measures in _sections(ran.done).items():
        tables[title] = {row: dict(marks.get(row, {})) if measures is UNTIL else {} for row in order}
        for head, (measure, scale) in measures.items():
            for row, _, found in spreads(ran.done, measure):
                tables[title][row][head] = spread(found, scale) if measures is ACCURACY else brief(found, scale)
    return tables


def _numbers(ran: Ran, order: Sequence[str]) -> dict[str, dict[str, Any]]:
    numbers: dict[str, dict[str, Any]] = {row: {} for row in order}
    for measures in _sections(ran.done).values():
        for measure, _ in measures.values():
            for row, _, found in spreads(ran.done, measure):
                numbers[row][measure] = None if found is None else list(found.values)
    for cell, result in ran.done:
        if "target_measure" in result.summary:
            numbers[cell.row].setdefault("target_measure", []).append(result.summary["target_measure"])
    return numbers


def by_seed(done: Done, row: str, measure: str) -> dict[int, float]:
    """A number of the runs of a row, by seed; seeds whose run has none are left out."""
    found = {cell.seed: result.summary.get(measure) for cell, result in done if cell.row == row}
    return {seed: float(value) for seed, value in found.items() if value is not None}


def refuse(failures: Sequence[str]) -> None:
    """A grid with a failed run has failed, however good the rest of its table is."""
    if failures:
        raise FedloomError("\n".join(f"{failure}; it is not in the table" for failure in failures))
