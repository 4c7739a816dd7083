"""Grids of runs: rows x columns x seeds, one folder a cell, resumable cell by cell.

`fedloom compare` is a grid whose rows are methods; a published table (`papers/*.toml`) is a grid whose rows and columns
are the table's. A cell that is finished is not run again, one that was interrupted goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedloom.errors import FedloomError, InputError, Unfit
from fedloom.runs.evaluation import summarise, to_target
from fedloom.runs.experiment import Watch
from fedloom.runs.jobs import as_job, run_jobs
from fedloom.runs.parallel import cores, run_all, run_each
from fedloom.runs.result import Result
from fedloom.runs.start import difference, plain, resume, settled, start
from fedloom.runs.store import Store
from fedloom.runs.study import Study, resolve
from fedloom.runs.world import world_of

__all__ = ["Cell", "Grid", "Ran", "Spread", "merged", "number_of", "spreads"]

Sections = Mapping[str, Any]
STUDY, SUMMARY = "study.json", "summary.json"
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


class Ran(NamedTuple):
    """What became of a grid: the runs that ended, why others failed, and why some rows cannot take part."""

    done: list[tuple[Cell, Result]]
    failures: list[str]
    left_out: dict[str, str]  # row -> sentence


@dataclass(frozen=True)
class Grid:
    """Rows, columns and seeds over one study."""

    base: Sections
    rows: Mapping[str, Sections]
    columns: Mapping[str, Sections] = field(default_factory=lambda: {"": {}})
    seeds: Sequence[int] = (0,)
    origin: str = ""  # the file it comes from, for messages
    lenient: bool = False  # rows that do not suit the fleet are left out and named, unless none is left

    def cells(self) -> list[Cell]:
        """All runs; every error of every study at once.

        Column by column: they are mostly data sets, and one at a time is kept in memory. In a column seed by seed, so
        that a grid that is stopped has something to compare.
        """
        cells, problems = [], []
        for (column, in_column), seed, (row, in_row) in product(self.columns.items(), self.seeds, self.rows.items()):
            try:
                sections = merged(self.base, in_column, in_row, {"run": {"seed": seed}})
                study = resolve(sections, self._place(column))
                cells.append(Cell(row, column, seed, as_job(study) if study.engine.name == "ray" else study))
            except InputError as error:
                problems += self._sentences(error, column)
        if problems:
            raise InputError("\n".join(dict.fromkeys(problems)))
        return cells

    def _place(self, column: str) -> str:
        return ", ".join(filter(None, (self.origin, column if len(self.columns) > 1 else "")))

    def _sentences(self, error: InputError, column: str) -> list[str]:
        place = self._place(column)
        named = f" ({place})" if place and place not in str(error) else ""
        return [f"{line}{named}" for line in str(error).splitlines()]

    def checked(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Look at data, fleet and model of every study before the first one runs; rows that are left out, and why."""
        left_out: dict[str, str] = {}
        problems: list[str] = []
        for cell in (cell for cell in cells if cell.seed == self.seeds[0]):
            try:
                world_of(cell.study.model_dump_json()).check()
            except InputError as error:
                sentences = self._sentences(error, cell.column)
                if self.lenient and isinstance(error, Unfit):
                    left_out[cell.row] = " ".join(sentences)
                else:
                    problems += sentences
        if problems or len(left_out) == len(self.rows):
            raise InputError("\n".join(dict.fromkeys([*problems, *left_out.values()])))
        return left_out

    @property
    def name(self) -> str:
        """A short name that is the same for the same grid."""
        text = json.dumps([self.base, self.rows, self.columns, list(self.seeds)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def run(self, folder: Path, announce: Announce, jobs: int = 0) -> Ran:
        """Run what is not finished yet, `jobs` runs at a time (0: as many as the machine allows)."""
        every = self.cells()
        left_out = self.checked(every)
        cells = [cell for cell in every if cell.row not in left_out]
        for cell in cells:
            _refuse_another(cell, folder / cell.label)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"'{folder}' cannot be a folder: {error.strerror}") from error
        pending = [cell for cell in cells if not (folder / cell.label / SUMMARY).exists()]
        watches = [partial(announce, cell, cells.index(cell), len(cells)) for cell in pending]
        runs = [partial(_go_on, cell, folder) for cell in pending]
        # The engine alone: what else the base says may make no sense without a row, such as a list of models.
        engine = resolve({"engine": self.base.get("engine", {})}, self.origin).engine
        together = jobs or _jobs(pending)
        if engine.name == "ray":
            ended = run_jobs([cell.study for cell in pending], [cell.label for cell in pending], folder, engine)
        elif together > 1:
            on_cpu = all(cell.study.engine.device == "cpu" for cell in pending)
            ended = run_all(runs, watches, together, folder, fork=on_cpu)
        else:
            ended = run_each(runs, watches, folder)
        failures = {pending[number].label: str(error) for number, error in ended if error is not None}
        sentences = [f"{label}: {sentence}" for label, sentence in failures.items()]
        if len(failures) == len(cells):
            raise FedloomError("\n".join(sentences))
        done = [(cell, resume(folder / cell.label)) for cell in cells if cell.label not in failures]
        return Ran(done, sentences, left_out)

    def found(self, folder: Path) -> list[tuple[Cell, Result]]:
        """The runs that are in a folder, finished or not, without running anything; on whatever engine."""
        runs = []
        for cell in self.cells():
            place = folder / cell.label
            if not (place / STUDY).exists():
                continue
            store = Store.open(place)
            begun = store.begun()
            if not _differs(cell, begun.model_copy(update={"engine": cell.study.engine})):
                runs.append((cell, Result(store, store.read(SUMMARY) or _so_far(store, cell.study.evaluate.target))))
        return runs


def _so_far(store: Store, target: float | None) -> dict[str, Any]:
    """A run that did not end, up to its last evaluation: an accuracy stands beside the round it was measured in."""
    rows = store.rows("metrics")
    last = max((place for place, row in enumerate(rows, 1) if "evaluation_seconds" in row), default=len(rows))
    return {"rounds": last, **summarise(rows[:last], target)} if rows else {}


def _jobs(pending: Sequence[Cell]) -> int:
    """One run a core where that leaves no core idle and the study does not say what runs the clients."""
    free = all(cell.study.engine.name == "auto" and cell.study.engine.device == "cpu" for cell in pending)
    many = cores()
    return many if free and len(pending) >= many else 1


def _differs(cell: Cell, begun: Study) -> bool:
    asked = settled(cell.study, begun)
    return begun.model_copy(update={"run": asked.run}) != asked or begun.run.rounds != asked.run.rounds


def _refuse_another(cell: Cell, place: Path) -> None:
    if (place / STUDY).exists() and _differs(cell, begun := Store.open(place).begun()):
        changed = difference(begun, settled(cell.study, begun))
        raise InputError(f"{place} holds a run of another study: {changed}; use another --out or remove it")


def _go_on(cell: Cell, folder: Path, watch: Watch) -> None:
    """Start the run of a cell, or go on with it."""
    if (folder / cell.label / STUDY).exists():
        resume(folder / cell.label, watch)
    else:
        run = cell.study.run.model_copy(update={"out": str(folder)})
        start(cell.study.model_copy(update={"run": run}), watch, cell.label)


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
