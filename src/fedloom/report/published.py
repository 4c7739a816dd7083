"""Published tables beside what was measured here: the list, one table, and the page of all results.

The page is made from small files, `papers/results/NAME-SCALE.json`, one a table and scale; they are written from the
folders of the runs, so the page can be made again without running anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from fedloom.errors import InputError, Interrupted
from fedloom.report.grids import announced, refuse
from fedloom.report.plots import progress
from fedloom.report.tables import Rows, markdown, print_table, spread
from fedloom.runs.grid import Cell, Grid, Spread, merged, number_of
from fedloom.runs.papers import SCALES, Published, find_papers, grid_of, nowhere, read_paper
from fedloom.runs.result import Result
from fedloom.runs.start import plain

__all__ = ["above_floor", "heading", "list_papers", "reproduce_shown", "write_page"]

Found = Sequence[tuple[Cell, Result]]
# What does not change a result, or is named elsewhere.
ASIDE = {"engine": None, "run": {"seed", "out", "checkpoint_every"}, "evaluate": None}
PAGE = """# Results beside published numbers

Written by `fedloom reproduce --page docs/results.md` from `papers/results/*.json`, never by hand. Each table shows what
was measured, and in brackets the published number and the difference. `small` is a set-up for minutes on two cores:
its numbers show the machinery and rough orders, not the papers' results. Accuracies are in percent, with the standard
deviation over seeds where there are several. A run that was stopped is shown with the round it had reached.
"""
WELL_ABOVE = 3  # points above a floor that count as more than nothing


def list_papers(out: Path, as_json: bool) -> None:
    """All published tables with source, what each scale takes, and how far it has been run."""
    known = [read_paper(name) for name in find_papers()]
    if not known:
        sys.stderr.write(f"{nowhere()}\n")
    states = {each.name: {scale: _state(each, scale, out) for scale in each.paper.scales} for each in known}
    if as_json:
        listed = []
        for each in known:
            content = each.paper.model_dump(exclude={"study", "rows", "columns"})
            for scale, state in states[each.name].items():
                content["scales"][scale]["state"] = state
            listed.append({"name": each.name, **content})
        sys.stdout.write(json.dumps(listed) + "\n")
        return
    console = Console()
    for each in known:
        console.print(
            f"[bold]{each.name}[/bold]  {each.paper.title}\n  [dim]{each.paper.source}[/dim]", highlight=False
        )
        for scale in SCALES:
            if scale in each.paper.scales:
                takes = each.paper.scales[scale].takes or "not said"
                console.print(f"  {scale:<6} takes {takes}; {states[each.name][scale]}", highlight=False)
    if known:
        sys.stdout.write("fedloom reproduce NAME --scale SCALE runs one; a stopped one goes on\n")


def _state(published: Published, scale: str, out: Path) -> str:
    """How far a table has been run, here or in what is kept."""
    best = max(filter(None, (_kept(published, scale), _result_file(out, published, scale))), key=_done, default=None)
    if best is None:
        return "not run"
    done, of = best["runs"]["done"], best["runs"]["of"]
    return "done" if done == of else f"{done} of {of} runs done"


def _done(content: Mapping[str, Any]) -> tuple[int, int]:
    return content["runs"]["done"], content["runs"]["rounds"]


def _folder(out: Path, published: Published, scale: str) -> Path:
    return out / f"{published.name}-{scale}"


def _result_file(out: Path, published: Published, scale: str) -> dict[str, Any] | None:
    return _read(_folder(out, published, scale) / "result.json")


def _kept(published: Published, scale: str) -> dict[str, Any] | None:
    return _read(published.path.parent / "results" / f"{published.name}-{scale}.json")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return content if "runs" in content else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; remove it and repeat") from error


def reproduce_shown(
    name: str,
    scale: str,
    out: Path,
    device: str | None,
    as_json: bool,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    seeds: int | None = None,
    jobs: int = 0,
) -> None:
    """Run a published table at a scale; result.md and result.json are left in its folder, also when it is stopped."""
    published = read_paper(name)
    grid = grid_of(published, scale, rows, columns, seeds)
    if device is not None:
        grid = replace(grid, base=merged(grid.base, {"engine": {"device": device}}))
    folder = _folder(out, published, scale)
    try:
        ran = grid.run(folder, announced, jobs)
    except Interrupted:
        _write_result(published, scale, folder)
        raise
    content = _write_result(published, scale, folder)
    for column in grid.columns:
        lines = {
            row: [result for cell, result in ran.done if (cell.row, cell.column) == (row, column)] for row in grid.rows
        }
        progress(
            {row: results for row, results in lines.items() if results},
            folder / plain(f"curves {column}".strip() + ".png"),
        )
    if as_json:
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        for title, shown in _tables(content).items():
            if title:
                Console().print(f"\n[italic]{title}[/italic]")
            print_table(Console(), "", shown)
        sys.stdout.write(f"{content['differs'] or 'as published'}\nresult: {folder / 'result.md'}\n")
    refuse(ran.failures)


def _write_result(published: Published, scale: str, folder: Path) -> dict[str, Any]:
    content = _measured(published, scale, folder)
    (folder / "result.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "result.md").write_text(_document(content, 2))
    return content


def _measured(published: Published, scale: str, folder: Path) -> dict[str, Any]:
    """The whole table with everything that its folder holds."""
    paper, grid = published.paper, grid_of(published, scale)
    found = grid.found(folder)
    ran = {cell.label: _progress(cell, result) for cell, result in found}
    cells = []
    for table in paper.shown:
        labels = {label: row for label, row in table.labels(paper.rows).items() if row in grid.rows}
        columns = [column for column in grid.columns if column in (table.columns or [column])]
        for (label, row), column in product(labels.items(), columns):
            printed = table.published.get(label, {}).get(column, [nan] * len(table.measures))
            for measure, said in zip(table.measures, printed, strict=True):
                number = {"table": table.title, "row": label, "column": column, "measure": measure,
                          "published": None if isnan(said) else said}  # fmt: skip
                cells.append(number | _numbers(found, row, column, measure))
    return {
        "name": published.name, "asked": published.asked, "scale": scale, "title": paper.title, "source": paper.source,
        "note": paper.note, "floor": paper.floor, "differs": paper.scales[scale].differs,
        "changed": _changed(published, scale),
        "seeds": len(grid.seeds),
        "runs": _totals(ran, len(grid.cells())),
        "ran": ran,
        "machines": sorted({_machine(result) for _, result in found}),
        "cells": cells,
    }  # fmt: skip


def _progress(cell: Cell, result: Result) -> dict[str, Any]:
    rounds, seconds = (result.summary.get(name, 0) for name in ("rounds", "seconds"))
    return {"rounds": rounds, "seconds": round(seconds, 1), "done": int(rounds == cell.study.run.rounds)}


def _totals(ran: Mapping[str, Mapping[str, Any]], of: int) -> dict[str, Any]:
    rounds, seconds, done = (sum(run[name] for run in ran.values()) for name in ("rounds", "seconds", "done"))
    return {"done": min(of, done), "of": of, "rounds": rounds, "seconds": round(seconds, 1)}


def _machine(result: Result) -> str:
    made = result.environment
    study = result.study
    words = [f"fedloom {made['fedloom']}", f"torch {made['torch']}", f"Python {made['python']}", study.engine.device]
    return ", ".join([*words, study.engine.precision])


def _numbers(found: Found, row: str, column: str, measure: str) -> dict[str, Any]:
    """A measure of the runs of a cell: by seed for those that ended, with the round for those that did not."""
    factor, values, unfinished = _kind(measure)[1], dict[int, float](), []
    for cell, result in found:
        if (cell.row, cell.column) != (row, column) or not result.summary:
            continue
        value = number_of(result, measure)
        scaled = None if value is None else factor * value
        if result.summary["rounds"] < cell.study.run.rounds:
            unfinished.append(
                {"seed": cell.seed, "round": result.summary["rounds"], "of": cell.study.run.rounds, "value": scaled}
            )
        elif scaled is not None:
            values[cell.seed] = scaled
    ended = sum((cell.row, cell.column) == (row, column) and result.summary.get("rounds") == cell.study.run.rounds
                for cell, result in found)  # fmt: skip
    return {"measured": list(values.values()) or None, "seeds": list(values), "ended": ended, "unfinished": unfinished}


def _changed(published: Published, scale: str) -> list[str]:
    """Which settings differ from the paper scale's, read off the studies themselves."""
    if scale == "paper" or "paper" not in published.paper.scales:
        return []
    here, there = (grid_of(published, each) for each in (scale, "paper"))
    common = [row for row in here.rows if row in there.rows]
    found: dict[str, None] = {}
    for column in here.columns:
        if common and column in there.columns:
            ours, theirs = (_settings(grid, common[0], column) for grid in (here, there))
            place = f"{column}: " if len(here.columns) > 1 else ""
            for key in sorted({*ours, *theirs}):
                if ours.get(key) != theirs.get(key):
                    found[f"{place}`{key}` {_said(ours.get(key))} instead of {_said(theirs.get(key))}"] = None
    if len(here.seeds) != len(there.seeds):
        found[f"{len(here.seeds)} seed(s) instead of {len(there.seeds)}"] = None
    return list(found)


def _settings(grid: Grid, row: str, column: str) -> dict[str, Any]:
    one = replace(grid, rows={row: grid.rows[row]}, columns={column: grid.columns[column]}, seeds=(0,))
    content = one.cells()[0].study.model_dump(
        exclude={key: True if keys is None else keys for key, keys in ASIDE.items()}
    )
    return {f"{section}.{key}": value for section, values in content.items() for key, value in values.items()}


def _said(value: object) -> str:
    return "unset" if value is None else str(value)


# How a measure is called beside a column, its factor, and whether a difference to a published number means something:
# another clock and other messages do not compare.
KINDS = {
    "worst": ("worst %", 100, True), "local": ("local %", 100, True), "onlooker": ("onlookers %", 100, True),
    "accuracy": ("%", 100, True), "rounds": ("rounds", 1, True),
    "upload": ("MB up", 1e-6, False), "download": ("MB down", 1e-6, False), "bytes": ("MB", 1e-6, False),
    "parameters": ("M parameters", 1e-6, True), "train_macs": ("GMACs", 1e-9, True), "macs": ("M MACs", 1e-6, True),
    "virtual": ("virtual s", 1, False), "seconds": ("s", 1, False),
}  # fmt: skip


def heading(measure: str) -> str:
    """What a measure's column is called."""
    return _kind(measure)[0]


def _kind(measure: str) -> tuple[str, float, bool]:
    """The head of a measure's column, its factor, and whether it compares with a published number."""
    name, at, target = measure.partition("@")
    head, factor, compares = next((kind for word, kind in KINDS.items() if word in name), (measure, 1, True))
    when = f" to {float(target):.0%}" if at else " to target" if "to_target" in name else ""
    return head + (" a round" if "per_round" in name else when), factor, compares


def _tables(content: Mapping[str, Any]) -> dict[str, Rows]:
    """Measured numbers with the printed ones behind them, table by table."""
    tables: dict[str, Rows] = {}
    for title in dict.fromkeys(cell["table"] for cell in content["cells"]):
        cells = [cell for cell in content["cells"] if cell["table"] == title]
        one = len({cell["measure"] for cell in cells}) == 1
        rows = tables.setdefault(title, {})
        for cell in cells:
            head = cell["column"] or cell["measure"] if one else f"{cell['column']} {heading(cell['measure'])}".strip()
            rows.setdefault(cell["row"], {})[head] = _text(cell, content["seeds"])
    return tables


def _text(cell: Mapping[str, Any], seeds: int) -> str:
    printed, measured, unfinished = cell["published"], cell["measured"], cell["unfinished"]
    apart = ""
    if measured:
        found = Spread(tuple(measured), cell["ended"])
        text = spread(found)
        if cell["ended"] < seeds:
            text += f", {cell['ended']} of {seeds} seeds"
        if printed is not None and _kind(cell["measure"])[2]:
            apart = f", {found.mean - printed:+.2f}"
    elif unfinished:
        reached: dict[int, list[str]] = {}
        for each in unfinished:
            known = "nothing yet" if each["value"] is None else f"{each['value']:.2f}"
            reached.setdefault(each["round"], []).append(known)
        text = "; ".join(f"{', '.join(values)} at round {at}" for at, values in reached.items())
        text += f" of {unfinished[0]['of']}"
    else:
        text = "never" if cell["ended"] else "not run"
    return text if printed is None else f"{text} ({printed:g}{apart})"


def _document(content: Mapping[str, Any], level: int) -> str:
    runs = content["runs"]
    parts = [
        f"{'#' * level} {content['title']}",
        f"{content['source']}. Scale `{content['scale']}`, {content['seeds']} seed(s).",
        *(
            "\n\n".join(filter(None, (title and f"{'#' * (level + 1)} {title}", markdown("", rows).rstrip())))
            for title, rows in _tables(content).items()
        ),
        f"What differs from the published set-up: {content['differs'] or 'nothing that the paper states'}.",
    ]
    if content["changed"]:
        parts.append(f"Against scale `paper`: {'; '.join(content['changed'])}.")
    if content["note"]:
        parts.append(content["note"])
    if content.get("floor"):
        parts.append(above_floor(content))
    made = (
        f"{runs['done']} of {runs['of']} runs, {_time(runs['seconds'])} of computing; {'; '.join(content['machines'])}"
    )
    parts.append(f"Made by `fedloom reproduce {content['asked']} --scale {content['scale']}`: {made}.")
    return "\n\n".join(parts) + "\n"


def above_floor(content: Mapping[str, Any]) -> str:
    """Which rows are well above the floor, by the means of the first measure, among those with the floor's seeds."""
    first = content["cells"][0]["measure"]
    cells = {cell["row"]: cell for cell in content["cells"] if cell["measure"] == first and cell["measured"]}
    floor = cells.pop(content["floor"], None)
    if floor is None:
        return f"The floor, {content['floor']}, has not been run."
    apart = {row: fmean(cell["measured"]) - fmean(floor["measured"]) for row, cell in cells.items()
             if cell["seeds"] == floor["seeds"]}  # fmt: skip
    said = {row: f"{row} ({points:+.1f})" for row, points in sorted(apart.items(), key=lambda each: -each[1])}
    above = [text for row, text in said.items() if apart[row] >= WELL_ABOVE]
    others = [text for row, text in said.items() if apart[row] < WELL_ABOVE]
    return (
        f"At least {WELL_ABOVE} points above {content['floor']}, by the means: {', '.join(above) or 'none'}. "
        f"Not: {', '.join(others) or 'none'}."
    )


def _time(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def write_page(page: Path, out: Path) -> None:
    """Keep what the folders in `out` hold, and write the page from all that is kept."""
    known = [read_paper(name) for name in find_papers()]
    if not known:
        raise InputError(nowhere())
    sections: dict[str, list[str]] = {}
    for published in known:
        heading = published.paper.paper or published.name.partition("-")[0]
        texts = sections.setdefault(heading, [])
        missing = []
        for scale in ("paper", "small"):
            if scale not in published.paper.scales:
                continue
            content = _keep(published, scale, out)
            if content is None:
                missing.append(scale)
            else:
                texts.append(_document(content, 3))
        if missing:
            scales = " and ".join(f"`{scale}`" for scale in missing)
            texts.append(f"Not run yet: {published.paper.title} (`{published.name}`) at scale {scales}.\n")
    body = [f"## {heading[:1].upper()}{heading[1:]}\n\n" + "\n".join(texts) for heading, texts in sections.items()]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([PAGE, *body]))
    sys.stdout.write(f"{page}: {len(known)} tables\n")


def _keep(published: Published, scale: str, out: Path) -> dict[str, Any] | None:
    """The kept result, joined with what the runs' folder holds."""
    kept, folder = _kept(published, scale), _folder(out, published, scale)
    if folder.is_dir():
        fresh = _measured(published, scale, folder)
        if fresh["runs"]["rounds"]:
            content = (fresh if kept is None else joined(kept, fresh)) | {"asked": published.name}
            path = published.path.parent / "results" / f"{published.name}-{scale}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content, indent=1) + "\n")
            kept = _kept(published, scale)
    return kept


def joined(kept: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """What two machines measured of one table: of every run the one that got further, at equality the fresh one."""
    # Results of before say nothing of single runs: together they count as one.
    before: Mapping[str, Mapping[str, Any]] = kept.get("ran", {"before": kept["runs"]})
    ran = {
        label: max((each[label] for each in (fresh["ran"], before) if label in each), key=lambda run: run["rounds"])
        for label in {**before, **fresh["ran"]}
    }
    older = {_spot(cell): cell for cell in kept["cells"]}
    cells = [_further(older[_spot(cell)], cell) if _spot(cell) in older else cell for cell in fresh["cells"]]
    machines = sorted({*kept["machines"], *fresh["machines"]}) if cells != fresh["cells"] else fresh["machines"]
    runs = _totals(ran, fresh["runs"]["of"])
    return {**fresh, "runs": runs, "ran": ran, "machines": machines, "cells": cells}


def _spot(cell: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return cell["table"], cell["row"], cell["column"], cell["measure"]


def _further(kept: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """One number of a table: of every seed the run that got further."""
    values, reached = dict[int, float](), dict[int, dict[str, Any]]()
    for cell in (kept, fresh):
        values |= dict(zip(cell["seeds"], cell["measured"] or [], strict=True))
        for each in cell["unfinished"]:
            reached[each["seed"]] = max(each, reached.get(each["seed"], each), key=lambda run: run["round"])
    unfinished = [run for seed, run in sorted(reached.items()) if seed not in values]
    ended = max(kept["ended"], fresh["ended"], len(values))
    seeds = sorted(values)
    return {
        **fresh, "measured": [values[seed] for seed in seeds] or None, "seeds": seeds, "ended": ended,
        "unfinished": unfinished,
    }  # fmt: skip
