"""Published tables as studies: `papers/NAME.toml`, one file a table or figure.

title, source and measure say what is reproduced; [study] holds the sections all cells share, [rows] and [columns] what
each changes, [published] the printed numbers (rows of columns), and [scales] how much of it is run: `smoke` takes
seconds, `small` minutes on two cores, `paper` is the published set-up. A scale may change sections, seeds, rows and
columns (a list of names, or names with sections of their own that go on top of the row's or column's), and says in
`differs` what is not as published.

Where one grid of runs makes several tables, each is a [[tables]] with title, rows (a list, or label = row), columns,
measures and published numbers of its own, a list with one number a measure (nan: not printed). A measure is a number
of the summaries, or `rounds@0.6`, `virtual_seconds@0.6`, `bytes@0.6`, `macs@0.6`: what was spent until an accuracy.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.errors import InputError, choose, oxford
from fedloom.runs.grid import Grid, merged

__all__ = ["SCALES", "Published", "Shown", "find_papers", "grid_of", "nowhere", "read_paper"]

SCALES = ("smoke", "small", "paper")
FOLDERS = (Path("papers"), Path(__file__).parents[3] / "papers")


class Scale(BaseModel):
    """How much of a published table is run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: dict[str, Any] = {}
    rows: list[str] | dict[str, dict[str, Any]] | None = None
    columns: list[str] | dict[str, dict[str, Any]] | None = None
    seeds: Annotated[int, Field(ge=1)] = 1
    takes: str = ""
    differs: str = ""


Measure = Annotated[str, Field(pattern=r"^([a-z_]+|(rounds|virtual_seconds|bytes|macs)@(0?\.\d+|1(\.0)?))$")]


class Shown(BaseModel):
    """One table over a grid's runs: some rows and columns of it, and one or several numbers a cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = ""
    rows: dict[str, str] | list[str] | None = None
    columns: list[str] | None = None
    measures: Annotated[list[Measure], Field(min_length=1)] = ["global_accuracy"]
    published: dict[str, dict[str, list[float]]] = {}

    def labels(self, all_of: Mapping[str, Any]) -> dict[str, str]:
        """What each line is called, and the grid's row it shows."""
        rows = list(all_of) if self.rows is None else self.rows
        return rows if isinstance(rows, dict) else {row: row for row in rows}


class Paper(BaseModel):
    """The content of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    source: str
    measure: Measure = "global_accuracy"
    paper: str = ""  # the heading under which the page of results shows it; by default the first word of the name
    note: str = ""  # what a reader of the numbers should know
    floor: str = ""  # a row that the others should be above by some points
    study: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]]
    columns: dict[str, dict[str, Any]] = {"": {}}
    published: dict[str, dict[str, float]] = {}
    tables: list[Shown] = []
    scales: dict[str, Scale]

    @property
    def shown(self) -> list[Shown]:
        """Its tables; a file without any is one."""
        printed = {row: {column: [value] for column, value in each.items()} for row, each in self.published.items()}
        return self.tables or [Shown(measures=[self.measure], published=printed)]


@dataclass(frozen=True)
class Published:
    """A published table, read and checked."""

    name: str
    asked: str  # how it was asked for: its name, or its file
    path: Path
    paper: Paper


def find_papers() -> dict[str, Path]:
    """All published tables: in ./papers, else in the source tree."""
    for folder in FOLDERS:
        found = {path.stem: path for path in sorted(folder.glob("*.toml"))}
        if found:
            return found
    return {}


def nowhere() -> str:
    """What is said where there are no tables."""
    looked = oxford((folder.resolve() for folder in FOLDERS), "and")
    return f"no published tables are here: they come with the sources of fedloom and are looked for in {looked}"


def read_paper(name: str) -> Published:
    """One published table, by name or by the path of its file."""
    known = find_papers()
    path = Path(name) if name.endswith(".toml") else known.get(name)
    if path is None:
        raise choose("table", name, known) if known else InputError(f"{nowhere()}; got '{name}'")
    try:
        paper = Paper.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, each['loc']))}: {each['msg']}; got {each['input']!r}"
                 for each in error.errors()]  # fmt: skip
        raise InputError("\n".join(lines)) from error
    _check_names(path, paper)
    return Published(path.stem, name, path, paper)


def _check_names(path: Path, paper: Paper) -> None:
    for scale in paper.scales:
        if scale not in SCALES:
            raise choose(f"scale in {path}", scale, SCALES)
    if paper.floor:
        _some(paper.rows, [paper.floor], f"floor in {path}")
    if paper.tables and paper.published:
        raise InputError(f"{path} has [published] and [[tables]]; numbers of several tables stand in theirs")
    for table in paper.shown:
        labels = table.labels(paper.rows)
        _some(paper.rows, list(labels.values()), f"row of a table in {path}")
        _some(paper.columns, table.columns, f"column of a table in {path}")
        for label, numbers in table.published.items():
            if label not in labels:
                raise choose(f"published row in {path}", label, labels)
            for column, values in numbers.items():
                if column not in paper.columns:
                    raise choose(f"published column in {path}", column, paper.columns)
                if len(values) != len(table.measures):
                    raise InputError(
                        f"{path}: {label}, {column} needs one published number a measure "
                        f"({', '.join(table.measures)}); got {values}"
                    )


def grid_of(
    published: Published, scale: str, rows: Sequence[str] = (), columns: Sequence[str] = (), seeds: int | None = None
) -> Grid:
    """The runs of a table at a scale, or some rows, some columns and the first seeds of them."""
    paper = published.paper
    if scale not in paper.scales:
        raise choose(f"scale of '{published.name}'", scale, paper.scales)
    chosen = paper.scales[scale]
    of_rows = _some(_some(paper.rows, chosen.rows, "row"), list(rows) or None, "row")
    of_columns = _some(_some(paper.columns, chosen.columns, "column"), list(columns) or None, "column")
    first = range(chosen.seeds)[:seeds]
    return Grid(merged(paper.study, chosen.study), of_rows, of_columns, first, str(published.path))


def _some(
    all_of: Mapping[str, Any], chosen: list[str] | dict[str, dict[str, Any]] | None, what: str
) -> dict[str, dict[str, Any]]:
    """The chosen ones, each with its own sections on top."""
    for name in chosen or ():
        if name not in all_of:
            raise choose(what, name, all_of)
    names = all_of if chosen is None else chosen
    return {name: merged(all_of[name], chosen[name] if isinstance(chosen, dict) else {}) for name in names}
