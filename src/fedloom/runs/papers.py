"""Published tables as studies: `papers/NAME.toml`, one file a table or figure.

title, source and measure say what is reproduced; [study] holds the sections all cells share, [rows] and [columns] what
each changes, [published] the printed numbers (rows of columns; where there are several measures, of measures), and
[scales] how much of it is run: `smoke` takes seconds, `small` minutes on two cores, `paper` is the published set-up. A
scale may change sections, seeds, rows and columns (a list of names, or names with sections of their own that go on top
of the row's or column's), and says in `differs` what is not as published.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.errors import InputError, choose
from fedloom.runs.grid import Grid, merged

__all__ = ["SCALES", "Published", "find_papers", "grid_of", "read_paper"]

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


class Paper(BaseModel):
    """The content of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    source: str
    measure: str | list[str] = "global_accuracy"
    paper: str = ""  # the heading under which docs/results.md shows it; by default the first word of the file's name
    note: str = ""  # what a reader of the numbers should know
    study: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]]
    columns: dict[str, dict[str, Any]] = {"": {}}
    published: dict[str, dict[str, float | dict[str, float]]] = {}
    scales: dict[str, Scale]

    @property
    def measures(self) -> list[str]:
        """The numbers that are compared."""
        return [self.measure] if isinstance(self.measure, str) else self.measure

    def printed(self, row: str, column: str, measure: str) -> float | None:
        """The published number, if there is one; a bare number belongs to the first measure."""
        found = self.published.get(row, {}).get(column)
        if isinstance(found, dict):
            return found.get(measure)
        return found if measure == self.measures[0] else None


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


def read_paper(name: str) -> Published:
    """One published table, by name or by the path of its file."""
    known = find_papers()
    path = Path(name) if name.endswith(".toml") else known.get(name)
    if path is None:
        raise choose("table", name, known) if known else InputError(f"no folder papers/ here; got '{name}'")
    try:
        paper = Paper.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise InputError("\n".join(lines)) from error
    _check_names(path, paper)
    return Published(path.stem, name, path, paper)


def _check_names(path: Path, paper: Paper) -> None:
    for scale in paper.scales:
        if scale not in SCALES:
            raise choose(f"scale in {path}", scale, SCALES)
    for row, numbers in paper.published.items():
        if row not in paper.rows:
            raise choose(f"published row in {path}", row, paper.rows)
        for column, found in numbers.items():
            if column not in paper.columns:
                raise choose(f"published column in {path}", column, paper.columns)
            for measure in found if isinstance(found, dict) else ():
                if measure not in paper.measures:
                    raise choose(f"published measure in {path}", measure, paper.measures)


def grid_of(published: Published, scale: str, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Grid:
    """The runs of a table at a scale; of all of them, or of some rows and columns."""
    paper = published.paper
    if scale not in paper.scales:
        raise choose(f"scale of '{published.name}'", scale, paper.scales)
    chosen = paper.scales[scale]
    return Grid(
        merged(paper.study, chosen.study),
        _some(_some(paper.rows, chosen.rows, "row"), list(rows) or None, "row"),
        _some(_some(paper.columns, chosen.columns, "column"), list(columns) or None, "column"),
        range(chosen.seeds),
        str(published.path),
    )


def _some(
    all_of: Mapping[str, Any], chosen: list[str] | dict[str, dict[str, Any]] | None, what: str
) -> dict[str, dict[str, Any]]:
    """The chosen ones, each with its own sections on top."""
    for name in chosen or ():
        if name not in all_of:
            raise choose(what, name, all_of)
    names = all_of if chosen is None else chosen
    return {name: merged(all_of[name], chosen[name] if isinstance(chosen, dict) else {}) for name in names}
