"""Grids while they run and when they are done: comparisons of methods, and published tables side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedloom.errors import FedloomError
from fedloom.report.plots import curves
from fedloom.report.progress import numbers_of
from fedloom.report.tables import UNTIL, Rows, markdown, rich_table, spread
from fedloom.runs.experiment import Watch
from fedloom.runs.grid import Cell, Grid, merged, spreads
from fedloom.runs.papers import SCALES, Published, find_papers, grid_of, read_paper
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


def reproduce_shown(name: str, scale: str, out: Path, device: str | None, as_json: bool) -> None:
    """Run a published table at a scale; result.md and result.json are left in its folder."""
    published = read_paper(name)
    grid = grid_of(published, scale)
    if device is not None:
        grid = replace(grid, base=merged(grid.base, {"engine": {"device": device}}))
    folder = out / f"{published.name}-{scale}"
    done, failures = grid.run(folder, announced)
    content, rows = _side_by_side(published, scale, done)
    text = _document(published, scale, markdown("", rows))
    (folder / "result.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "result.md").write_text(text)
    if as_json:
        sys.stdout.write(json.dumps(content) + "\n")
        _refuse(failures)
        return
    Console().print(rich_table("", rows))
    sys.stdout.write(f"{published.paper.scales[scale].differs or 'as published'}\nresult: {folder / 'result.md'}\n")
    _refuse(failures)


def _side_by_side(published: Published, scale: str, done: Done) -> tuple[dict[str, Any], Rows]:
    """Measured numbers with the printed ones behind them."""
    paper = published.paper
    cells: list[dict[str, Any]] = []
    rows: Rows = {}
    for row, column, found in spreads(done, paper.measure):
        printed = paper.published.get(row, {}).get(column)
        factor = 100 if "accuracy" in paper.measure else 1
        text = spread(found, factor)
        if printed is not None:
            text += f" ({printed:g})" if found is None else f" ({printed:g}, {factor * found.mean - printed:+.2f})"
        rows.setdefault(row, {})[column or paper.measure] = text
        values = None if found is None else [factor * value for value in found.values]
        cells.append({"row": row, "column": column, "measured": values, "published": printed})
    content = {"name": published.name, "scale": scale, "measure": paper.measure, "cells": cells}
    return content | {"differs": paper.scales[scale].differs, "source": paper.source}, rows


def _document(published: Published, scale: str, table: str) -> str:
    paper = published.paper
    chosen = paper.scales[scale]
    return (
        f"## {paper.title}\n\n{paper.source}. Scale `{scale}`, {chosen.seeds} seed(s); {paper.measure}: mean and "
        f"standard deviation, with the published number and the difference in brackets.\n\n{table}\n"
        f"What differs from the published set-up: {chosen.differs or 'nothing that the paper states'}.\n\n"
        f"Made by `fedloom reproduce {published.asked} --scale {scale}`.\n"
    )
