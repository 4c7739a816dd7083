"""Grids of runs: rows x columns x seeds, one folder a cell, resumable cell by cell.

`fedloom compare` is a grid whose rows are methods; a published table (`papers/*.toml`) is a grid whose rows and columns
are the table's. A cell that is finished is not run again, one that was interrupted goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedloom.errors import FedloomError, InputError, Interrupted
from fedloom.runs.evaluation import to_target
from fedloom.runs.experiment import Watch
from fedloom.runs.jobs import as_job, run_jobs
from fedloom.runs.result import Result
from fedloom.runs.start import difference, plain, resume, settled, start
from fedloom.runs.store import Store
from fedloom.runs.study import Study, resolve
from fedloom.runs.world import world_of

__all__ = ["Cell", "Grid", "Spread", "merged"]

Sections = Mapping[str, Any]
Announce = Callable[["Cell", int, int], Watch]  # told of each cell before it starts; gives its watcher


def merged(*layers: Sections) -> dict[str, Any]:
    """Sections over sections, key by key.

    >>> merged({"train": {"lr": 0.1, "epochs": 1}}, {"train": {"lr": 0.2}})
    {'train': {'lr': 0.2, 'epochs': 1}}
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for section, values in layer.items():
            if not isinstance(values, Mapping):
                raise InputError(f"'{section}' must be a section with settings; got {values!r}")
            # Another name means other settings: what the earlier layer set belongs to what it named.
            renamed = "name" in values and values["name"] != result.get(section, {}).get("name", values["name"])
            kept = {} if renamed and section not in ("fleet", "data") else result.get(section, {})
            result[section] = {**kept, **values}
    return result


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    row: str
    column: str
    seed: int
    study: Study

    @property
    def label(self) -> str:
        """The name of its folder."""
        return plain("-".join(word for word in (self.row, self.column, str(self.seed)) if word))


@dataclass(frozen=True)
class Spread:
    """A number over several seeds."""

    values: tuple[float, ...]
    runs: int = 0  # how many runs could have had it, if more

    @property
    def mean(self) -> float:
        """The mean."""
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation, if there are several."""
        return stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Grid:
    """Rows, columns and seeds over one study."""

    base: Sections
    rows: Mapping[str, Sections]
    columns: Mapping[str, Sections] = field(default_factory=lambda: {"": {}})
    seeds: Sequence[int] = (0,)
    origin: str = ""  # the file it comes from, for messages

    def cells(self) -> list[Cell]:
        """All runs, checked before the first one starts; every error at once."""
        cells, problems = [], []
        # Column by column: they are mostly data sets, and one at a time is kept in memory.
        for column, column_sections in self.columns.items():
            for row, row_sections in self.rows.items():
                for seed in self.seeds:
                    sections = merged(self.base, column_sections, row_sections, {"run": {"seed": seed}})
                    place = ", ".join(filter(None, (self.origin, column if len(self.columns) > 1 else "")))
                    try:
                        study = resolve(sections, place)
                        cell = Cell(row, column, seed, as_job(study) if study.engine.name == "ray" else study)
                        if seed == self.seeds[0]:
                            world_of(cell.study.model_dump_json()).check()
                        cells.append(cell)
                    except InputError as error:
                        named = f" ({place})" if place and place not in str(error) else ""
                        problems += [f"{line}{named}" for line in str(error).splitlines()]
        if problems:
            raise InputError("\n".join(dict.fromkeys(problems)))
        return cells

    @property
    def name(self) -> str:
        """A short name that is the same for the same grid."""
        text = json.dumps([self.base, self.rows, self.columns, list(self.seeds)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def run(self, folder: Path, announce: Announce) -> tuple[list[tuple[Cell, Result]], list[str]]:
        """Run what is not finished yet; gives the runs that ended, and a sentence for each that failed."""
        cells, done, failures = self.cells(), [], []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"'{folder}' cannot be a folder: {error.strerror}") from error
        failed = self._on_cluster(cells, folder)
        for number, cell in enumerate(cells):
            try:
                if cell.label in failed:
                    raise failed[cell.label]
                done.append((cell, _cell(cell, folder, announce(cell, number, len(cells)))))
            except (Interrupted, InputError):
                raise
            except FedloomError as error:
                failures.append(f"{cell.label}: {error}")
        if failures and not done:
            raise FedloomError("\n".join(failures))
        return done, failures

    def _on_cluster(self, cells: Sequence[Cell], folder: Path) -> dict[str, FedloomError]:
        """With the engine `ray`, run as jobs what is not finished yet; gives the failures by label."""
        engine = resolve(merged(self.base), self.origin).engine
        if engine.name != "ray":
            return {}
        for cell in cells:
            _refuse_another(cell, folder / cell.label)
        cells = [cell for cell in cells if not (folder / cell.label / "summary.json").exists()]
        ended = run_jobs([cell.study for cell in cells], [cell.label for cell in cells], folder, engine)
        return {cells[number].label: error for number, error in ended if error is not None}


def _refuse_another(cell: Cell, place: Path) -> None:
    if (place / "study.json").exists():
        begun = Store.open(place).begun()
        asked = settled(cell.study, begun)
        if begun.model_copy(update={"run": asked.run}) != asked or begun.run.rounds != asked.run.rounds:
            raise InputError(
                f"{place} holds a run of another study: {difference(begun, asked)}; use another --out or remove it"
            )


def _cell(cell: Cell, folder: Path, watch: Watch) -> Result:
    place = folder / cell.label
    _refuse_another(cell, place)
    if (place / "study.json").exists():
        return resume(place, watch)
    run = cell.study.run.model_copy(update={"out": str(folder)})
    return start(cell.study.model_copy(update={"run": run}), watch, cell.label)


def number_of(result: Result, measure: str) -> float | None:
    """A number of a run's summary, or `rounds@0.6`, `virtual_seconds@0.6`, `bytes@0.6`: spent until that accuracy."""
    kind, at, target = measure.partition("@")
    found = to_target(result.rows("metrics"), float(target))[f"{kind}_to_target"] if at else result.summary.get(measure)
    return None if found is None else float(found)


def spreads(done: Sequence[tuple[Cell, Result]], measure: str) -> Iterator[tuple[str, str, Spread | None]]:
    """(row, column, numbers over the seeds) of one number of the summaries; None where no run has it."""
    for row, column in dict.fromkeys((cell.row, cell.column) for cell, _ in done):
        found = [number_of(result, measure) for cell, result in done if (cell.row, cell.column) == (row, column)]
        values = tuple(value for value in found if value is not None)
        yield row, column, Spread(values, len(found)) if values else None
