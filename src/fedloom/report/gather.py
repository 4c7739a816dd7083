"""Runs as a reader wants them: read from their folders alone, and put together where only the seed differs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from fedloom import wire
from fedloom.data.split import Split
from fedloom.errors import InputError
from fedloom.runs.evaluation import summarise
from fedloom.runs.store import FAILURE, Store
from fedloom.runs.study import Study

__all__ = ["Group", "Run", "common", "flat", "folders_in", "groups_of", "read_runs"]

log = logging.getLogger("fedloom.report")

# Settings that may differ between runs of one group: they do not belong to the question.
ASIDE = ("run.seed", "run.out", "run.checkpoint_every")
LONGEST = 40  # letters of a label that tells a setting
NAMING = ("data.name", "model.name", "partition.name")  # settings whose values say enough without their names
Settings = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder, finished or not."""

    store: Store

    @cached_property
    def study(self) -> Study:
        """What was asked for."""
        return self.store.begun()

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row a round."""
        return self.store.rows("metrics")

    @cached_property
    def ledger(self) -> list[dict[str, Any]]:
        """One row a task."""
        return self.store.rows("clients")

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The result, or what it would be if the run ended now."""
        found = self.store.read("summary.json")
        if found is not None:
            return found
        return summarise(self.rows, self.study.evaluate.target) if self.rows else {}

    def damage(self, *, whole: bool = False) -> str:
        """Why what is always needed cannot be read, or why the `whole` of it cannot; empty if it can."""
        try:
            _ = self.study, self.rows, self.summary
            if whole:
                _ = self.ledger, self.columns, self.split, self.environment
        except InputError as error:
            return str(error)
        return ""

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and machine."""
        return self.store.read("environment.json") or {}

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.study.run.seed

    @property
    def state(self) -> str:
        """finished, running, failed or stopped."""
        if self.store.read("summary.json") is not None:
            return "finished"
        if self.store.is_running:
            return "running"
        return "failed" if self.failure else "stopped"

    @property
    def progress(self) -> tuple[bool, int, str]:
        """How far it got, and when it began: of two runs of the same study and seed the larger one counts."""
        return self.state == "finished", len(self.rows), str(self.environment.get("started", ""))

    @property
    def failure(self) -> str:
        """Why it failed, if it did."""
        return str((self.store.read(FAILURE) or {}).get("sentence", ""))

    @cached_property
    def columns(self) -> Mapping[str, np.ndarray]:
        """What is known of the clients (capacity, speed, samples) at the last checkpoint; nothing before the first."""
        manifest = self.store.manifest()
        if manifest is None:
            return {}
        columns: Mapping[str, np.ndarray] = wire.load(self.store.folder / "checkpoints" / manifest["files"]["fleet"])
        return columns

    @cached_property
    def split(self) -> Split:
        """Who holds which images."""
        return Split.load(self.store.split_file)

    def accuracies(self) -> dict[int, float]:
        """Every client's own accuracy at the last evaluation."""
        asked = [entry for entry in self.ledger if entry["job"] == "evaluate" and entry.get("accuracy") is not None]
        last = max((entry["round"] for entry in asked), default=None)
        return {entry["client"]: entry["accuracy"] for entry in asked if entry["round"] == last}

    def work(self) -> Iterator[dict[str, Any]]:
        """The tasks that trained."""
        return (entry for entry in self.ledger if entry["job"] == "work" and not entry["failed"])


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one study that differ in the seed alone."""

    label: str
    runs: Sequence[Run]
    key: str = ""  # what the letter in its label stands for

    @property
    def ended(self) -> bool:
        """Whether all of them are finished."""
        return all(run.state == "finished" for run in self.runs)

    @cached_property
    def counted(self) -> Group:
        """The runs that numbers are about: one a seed, and only finished ones unless none is.

        Of several runs of one seed the one that got further counts, of equals the one that began later.
        """
        furthest = {run.seed: run for run in sorted(self.runs, key=lambda run: run.progress)}
        finished = [run for run in furthest.values() if run.state == "finished"]
        return replace(self, runs=sorted(finished or furthest.values(), key=lambda run: run.seed))

    def values(self, measure: str) -> dict[int, float]:
        """A number of the summaries, by seed."""
        found = {run.seed: run.summary.get(measure) for run in self.runs}
        return {seed: float(value) for seed, value in found.items() if value is not None}

    def curve(self, measure: str, over: str = "round") -> list[tuple[float, float, float, float]]:
        """(x, mean, low, high) of a measure over rounds, or over the sum of a cost: one deviation to either side.

        Only rounds that every run has evaluated, so that the mean is always over the same runs.
        """
        known = [_evaluated(run.rows, measure, over) for run in self.runs]
        known = [each for each in known if each]
        shared = sorted(set.intersection(*(set(each) for each in known))) if known else []
        points = []
        for number in shared:
            xs, ys = zip(*(each[number] for each in known), strict=True)
            half = stdev(ys) if len(ys) > 1 else 0.0
            points.append((fmean(xs), fmean(ys), fmean(ys) - half, fmean(ys) + half))
        return points


def _evaluated(rows: Sequence[Mapping[str, Any]], measure: str, over: str) -> dict[int, tuple[float, float]]:
    """round -> (x, y)."""
    names, spent, found = over.split("+"), 0.0, {}
    for row in rows:
        spent += sum(row.get(name) or 0 for name in names)
        if row.get(measure) is not None:
            found[row["round"]] = (float(row["round"]) if over == "round" else spent, float(row[measure]))
    return found


def folders_in(paths: Iterable[Path]) -> list[Path]:
    """The run folders among some folders and inside them, two levels deep."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise InputError(f"{path} is not a folder; give run folders, or folders that hold some")
        inside = [path, *sorted(path.glob("*")), *sorted(path.glob("*/*"))]
        runs = [each for each in inside if (each / "study.json").is_file() and not each.name.startswith(".")]
        if not runs:
            raise InputError(f"{path} holds no run: there is no study.json in it or one or two levels below")
        found |= dict.fromkeys(runs)
    return list(found)


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """All runs in some folders that have at least one round; one that cannot be read is told, and only left out."""
    found, begun, damaged = folders_in(paths), [], []
    for run in (Run(Store.open(folder)) for folder in found):
        if why := run.damage(whole=True):
            damaged.append(why)
        elif run.rows:
            begun.append(run)
    if damaged and not begun:
        raise InputError("\n".join(damaged))
    for why in damaged:
        log.warning("left out: %s", why)
    if not begun:
        raise InputError(f"no round is finished yet in {' '.join(map(str, found))}; there is nothing to report")
    return begun


def flat(study: Study) -> Settings:
    """The settings as `section.key`, without those that are not set."""
    sections = study.model_dump(exclude_none=True)
    return {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
        if value not in ("", []) and f"{section}.{key}" not in ASIDE
    }


def common(studies: Sequence[Study]) -> tuple[Settings, list[Settings]]:
    """What all studies have in common, and what each has of its own."""
    every = [flat(study) for study in studies]
    shared = {key: value for key, value in every[0].items() if all(each.get(key) == value for each in every)}
    return shared, [{key: value for key, value in each.items() if key not in shared} for each in every]


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Runs by study, called after their method, and after what else sets them apart where that is not enough."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(repr(sorted(_asked(run).items(), key=lambda item: item[0])), []).append(run)
    members = [sorted(each, key=lambda run: run.seed) for each in together.values()]
    names = [each[0].study.method.name for each in members]
    called: dict[int, tuple[str, str]] = {}
    for method in dict.fromkeys(names):
        places = [place for place, name in enumerate(names) if name == method]
        labels = _labels(method, [_asked(members[place][0]) for place in places])
        called |= dict(zip(places, labels, strict=True))
    return [Group(called[place][0], each, called[place][1]) for place, each in enumerate(members)]


def _asked(run: Run) -> Settings:
    """The settings that make it another question: not what it ran on."""
    return {name: value for name, value in flat(run.study).items() if not name.startswith("engine.")}


def _labels(method: str, every: Sequence[Settings]) -> list[tuple[str, str]]:
    """A short label for each of a method's studies, and what its letter stands for where it needs one.

    One setting that sets them apart is told; of several the names of data, model and partition, and a letter.
    """
    apart, found = _apart(every), []
    if len(apart) == 1 and apart[0] not in NAMING:
        labels = [f"{method}, {apart[0]} {_told(each, apart[0])}" for each in every]
        if max(map(len, labels)) <= LONGEST:
            return [(label, "") for label in labels]
    short = [", ".join([method, *(_told(each, key) for key in NAMING if key in apart)]) for each in every]
    for place, label in enumerate(short):
        alike = [each for each, other in zip(every, short, strict=True) if other == label]
        letter = f" ({_letter(short[:place].count(label))})" if len(alike) > 1 else ""
        found.append((label + letter, _key(every[place], alike) if letter else ""))
    return found


def _key(own: Settings, alike: Sequence[Settings]) -> str:
    """The settings of one that are not those of most that are called alike."""
    told = {key: [_told(each, key) for each in alike] for key in _apart(alike)}
    unusual = [key for key, values in told.items() if 2 * values.count(_told(own, key)) <= len(alike)]
    return ", ".join(f"{key} {_told(own, key)}" for key in unusual) or "what most have"


def _apart(every: Sequence[Settings]) -> list[str]:
    """The settings in which some differ."""
    known = dict.fromkeys(key for each in every for key in each)
    return [key for key in known if any(each.get(key) != every[0].get(key) for each in every)]


def _told(settings: Settings, key: str) -> str:
    return str(settings.get(key, "not set"))


def _letter(number: int) -> str:
    """a to z, then aa, ab and so on.

    >>> [_letter(number) for number in (0, 25, 26, 53)]
    ['a', 'z', 'aa', 'bb']
    """
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)
