"""Grids while they run and when they are done: comparisons of methods, and published tables side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

from rich.console import Console

from fedloom.errors import FedloomError
from fedloom.report.plots import curves
from fedloom.report.progress import numbers_of
from fedloom.report.tables import UNTIL, Rows, markdown, rich_table, spread
from fedloom.runs.experiment import Watch
from fedloom.runs.grid import Cell, Grid, merged, spreads
from fedloom.runs.papers import SCALES, Published, Shown, find_papers, grid_of, read_paper
from fedloom.runs.result import Result

__all__ = ["list_papers", "reproduce_shown", "run_shown"]

Done = Sequence[tuple[Cell, Result]]
Measures = dict[str, tuple[str, float]]  # head of a column -> number of the summary and its factor
ACCURACY: Measures = {
    "global %": ("global_accuracy", 100), "local %": ("local_accuracy", 100), "worst %": ("worst_local_accuracy", 100),
    "best %": ("best_global_accuracy", 100),
}  # fmt: skip
COST: Measures = {
    "up MB": ("upload_bytes", 1e-6), "down MB": ("download_bytes", 1e-6), "GMACs": ("train_macs", 1e-9),
    "virtual s": ("virtual_seconds", 1), "s/round": ("seconds_per_round", 1),
    "params k": ("mean_parameters", 1e-3), "MACs M": ("mean_forward_macs", 1e-6),
}  # fmt: skip


def announced(cell: Cell, number: int, count: int) -> Watch:
    """One line when a cell starts, one when its last round is done."""
    rounds, name = cell.study.run.rounds, f"[{number + 1}/{count}] {cell.label}"
    sys.stderr.write(f"{name}  {rounds} rounds\n")

    def watch(row: Mapping[str, Any]) -> None:
        if row["round"] == rounds or (sys.stderr.isatty() and "local_accuracy" in row):
            sys.stderr.write(f"{name}  round {row['round']}/{rounds}  {numbers_of(row)}\n")

    return watch


def run_shown(grid: Grid, folder: Path, *, as_json: bool, baseline: str | None = None) -> None:
    """Run a comparison and show its table; table.md, table.json and curves.png are left in the folder."""
    done, failures = grid.run(folder, announced)
    sections = {"accuracy": ACCURACY, "cost of the whole run": COST}
    if any("rounds_to_target" in result.summary for _, result in done):
        sections["until the target accuracy"] = dict(UNTIL)
    order = list(dict.fromkeys([baseline, *grid.rows] if baseline else grid.rows))
    numbers: dict[str, dict[str, Any]] = {row: {} for row in order}
    tables: dict[str, Rows] = {}
    for title, measures in sections.items():
        tables[title] = {row: {} for row in order}
        for head, (measure, scale) in measures.items():
            for row, _, found in spreads(done, measure):
                tables[title][row][head] = spread(found, scale)
                numbers[row][measure] = None if found is None else list(found.values)
    content = {"seeds": list(grid.seeds), "baseline": baseline, "methods": numbers, "folder": str(folder)}
    (folder / "table.json").write_text(json.dumps(content, indent=1) + "\n")
    text = "\n".join(f"### {title}\n\n{markdown('method', rows)}" for title, rows in tables.items())
    (folder / "table.md").write_text(text)
    curves([result for cell, result in done if cell.seed == grid.seeds[0]], folder / "curves.png")
    if as_json:
        sys.stdout.write(json.dumps(content) + "\n")
        _refuse(failures)
        return
    console = Console()
    for title, rows in tables.items():
        console.print(f"\n[italic]{title}[/italic]")
        console.print(rich_table("method", rows))
    sys.stdout.write(f"\nmean ± standard deviation over {len(grid.seeds)} seed(s)")
    for row in order:
        ended = sum(cell.row == row for cell, _ in done)
        if ended < len(grid.seeds):
            sys.stdout.write(f"; {row}: {ended} only")
    sys.stdout.write(f"; runs, tables, curves: {folder}\n")
    _refuse(failures)


def _refuse(failures: Sequence[str]) -> None:
    """A grid with a failed run has failed, however good the rest of its table is."""
    if failures:
        raise FedloomError("\n".join(f"{failure}; it is not in the table" for failure in failures))


def list_papers(as_json: bool) -> None:
    """All published tables with their source and what each scale takes."""
    known = [read_paper(name) for name in find_papers()]
    if as_json:
        listed = [{"name": each.name, **each.paper.model_dump(exclude={"study", "rows", "columns"})} for each in known]
        sys.stdout.write(json.dumps(listed) + "\n")
        return
    rows: Rows = {}
    for each in known:
        scales = each.paper.scales
        takes = {scale: scales[scale].takes or "yes" if scale in scales else "-" for scale in SCALES}
        rows[each.name] = {"title": each.paper.title, "source": each.paper.source, **takes}
    Console().print(rich_table("name", rows))


def reproduce_shown(
    name: str,
    scale: str,
    out: Path,
    device: str | None,
    as_json: bool,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> None:
    """Run a published table, or some rows and columns of it, at a scale; leaves result.md and result.json."""
    published = read_paper(name)
    grid = grid_of(published, scale, rows, columns)
    if device is not None:
        grid = replace(grid, base=merged(grid.base, {"engine": {"device": device}}))
    folder = out / f"{published.name}-{scale}"
    done, failures = grid.run(folder, announced)
    paper, cells = published.paper, list[dict[str, Any]]()
    tables: list[tuple[str, Rows]] = []
    for table in paper.shown:
        found, lines = _side_by_side(table, table.labels(paper.rows), done)
        if lines:
            cells += found
            tables.append((table.title, lines))
    content = {
        "name": published.name, "scale": scale, "measure": paper.measure, "cells": cells,
        "differs": paper.scales[scale].differs, "source": paper.source,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "result.md").write_text(_document(published, scale, tables, grid))
    if as_json:
        sys.stdout.write(json.dumps(content) + "\n")
        _refuse(failures)
        return
    for title, lines in tables:
        if title:
            Console().print(f"\n[italic]{title}[/italic]")
        Console().print(rich_table("", lines))
    sys.stdout.write(f"{paper.scales[scale].differs or 'as published'}\nresult: {folder / 'result.md'}\n")
    _refuse(failures)


# How a measure is called beside a column, its factor, and whether a difference to a published number means something:
# another clock and other messages do not compare.
KINDS = {
    "worst": ("worst %", 100, True), "local": ("local %", 100, True), "onlooker": ("onlookers %", 100, True),
    "accuracy": ("%", 100, True), "rounds": ("rounds", 1, True), "bytes": ("MB", 1e-6, False),
    "parameters": ("M parameters", 1e-6, True), "macs": ("M MACs", 1e-6, True),
    "virtual": ("virtual s", 1, False), "seconds": ("s", 1, False),
}  # fmt: skip


def _kind(measure: str) -> tuple[str, float, bool]:
    """The head of a measure's column, its factor, and whether it compares with a published number."""
    name, at, target = measure.partition("@")
    head, factor, compares = next((kind for word, kind in KINDS.items() if word in name), (measure, 1, True))
    when = f" to {float(target):.0%}" if at else " to target" if "to_target" in name else ""
    return head + (" a round" if "per_round" in name else when), factor, compares


def _side_by_side(table: Shown, labels: Mapping[str, str], done: Done) -> tuple[list[dict[str, Any]], Rows]:
    """Measured numbers with the printed ones behind them, column by column and in each measure by measure."""
    cells: list[dict[str, Any]] = []
    rows: Rows = {}
    found = {measure: {(row, column): each for row, column, each in spreads(done, measure)}
             for measure in table.measures}  # fmt: skip
    ran = dict.fromkeys((cell.row, cell.column) for cell, _ in done)
    columns = [column for column in dict.fromkeys(column for _, column in ran) if column in (table.columns or [column])]
    for label, row in labels.items():
        for column in (column for column in columns if (row, column) in ran):
            printed = table.published.get(label, {}).get(column, [nan] * len(table.measures))
            for measure, said in zip(table.measures, printed, strict=True):
                (head, factor, compares), number = _kind(measure), found[measure][row, column]
                text = spread(number, factor)
                if not isnan(said):
                    apart = f", {factor * number.mean - said:+.2f}" if number is not None and compares else ""
                    text += f" ({said:g}{apart})"
                one = len(table.measures) == 1
                rows.setdefault(label, {})[column or measure if one else f"{column} {head}".strip()] = text
                values = None if number is None else [factor * value for value in number.values]
                cells.append(
                    {"table": table.title, "row": label, "column": column, "measure": measure, "measured": values,
                     "published": None if isnan(said) else said}
                )  # fmt: skip
    return cells, rows


def _document(published: Published, scale: str, tables: Sequence[tuple[str, Rows]], grid: Grid) -> str:
    paper = published.paper
    chosen = paper.scales[scale]
    measures = paper.measure if not paper.tables else "each number"
    left_out = [*(f"row {name}" for name in paper.rows if name not in grid.rows),
                *(f"column {name}" for name in paper.columns if name not in grid.columns)]  # fmt: skip
    shown = "\n".join(f"### {title}\n\n{markdown('', rows)}" if title else markdown("", rows) for title, rows in tables)
    return (
        f"## {paper.title}\n\n{paper.source}. Scale `{scale}`, {chosen.seeds} seed(s); {measures}: mean and "
        f"standard deviation, with the published number and the difference in brackets.\n\n{shown}\n"
        f"What differs from the published set-up: {chosen.differs or 'nothing that the paper states'}.\n\n"
        f"Not run: {'; '.join(left_out) or 'nothing'}.\n\n"
        f"Made by `fedloom reproduce {published.asked} --scale {scale}`.\n"
    )
