"""How runs begin: from Python, from the command line, from a folder that was left unfinished."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.errors import InputError, choose, kind_of
from fedloom.registry import entries, find, is_path, name_of
from fedloom.runs.experiment import Watch, experiment
from fedloom.runs.result import Result
from fedloom.runs.store import Store
from fedloom.runs.study import Study, method_of, override, resolve
from fedloom.runs.world import world_of
from fedloom.settings import allowed

__all__ = [
    "DEPLOYMENT",
    "SHORT",
    "difference",
    "goes_on",
    "looked_into",
    "plain",
    "renamed",
    "resume",
    "run",
    "sections_of",
    "settled",
    "start",
]

DEPLOYMENT = "deployment.json"  # what is fixed of a run with real clients, in its folder: their kind of data, names
SHORT = {
    "dataset": "data.name", "model": "model.name", "clients": "fleet.clients", "rounds": "run.rounds",
    "fleet": "fleet.name", "partition": "partition.name", "select": "select.name", "share": "share.name",
    "engine": "engine.name", "device": "engine.device", "seed": "run.seed", "out": "run.out",
}  # fmt: skip


def run(
    method: str | Callable[..., Any] | None = None,
    study: str | Path | Mapping[str, Any] | None = None,
    *,
    watch: Watch | None = None,
    set: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Run a method, or the study of a file or of nested dicts, and wait for its result.

    Options are the command line's: dataset, model, clients, rounds, fleet, partition, select, share, engine, device,
    seed, out. `set` holds anything else, as {"section.key": value}. Classes and functions stand for their import paths.

    >>> result = run("fedavg", model="mlp", rounds=2, clients=2, out=getfixture("tmp_path"), engine="local")
    >>> result.summary["rounds"], result.metrics["round"].tolist()
    (2, [1, 2])
    """
    from fedloom.runs.study import read

    base = read(Path(study)) if isinstance(study, str | Path) else study
    options = {name: _named(name, value) for name, value in options.items()}
    sections = sections_of(method, options, renamed(base or {}, options), set)
    return start(resolve(sections, str(study) if isinstance(study, str) else ""), watch)


def sections_of(
    method: str | Callable[..., Any] | None,
    options: Mapping[str, Any],
    base: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The sections that a study (`base`), settings and options describe, the later over the earlier."""
    sections = override(base, [])
    for name in options:
        if name not in SHORT:
            raise choose("option", name, SHORT)
    short = {SHORT[name]: value for name, value in options.items() if value is not None}
    if method is not None:
        if isinstance(base.get("method"), Mapping) and base["method"].get("name", method) != method:
            sections["method"] = {}  # another method's settings
        short["method.name"] = method
    for place, value in {**(settings or {}), **short}.items():
        section, dot, key = place.partition(".")
        if not dot:
            raise InputError(f"set takes 'section.key'; got '{place}'")
        if not isinstance(sections.setdefault(section, {}), dict):
            raise InputError(f"'{section}' must be a section with settings; got {sections[section]!r}")
        sections[section][key] = _named(place, value)
    return sections


def _named(place: str, value: Any) -> Any:
    """A value as a study can write it down: of a class or function, its name or import path."""
    if isinstance(value, Path):
        return str(value)
    if not callable(value):
        return value
    if inspect.isclass(value) or inspect.isfunction(value):
        name = name_of(value)
        if ":" not in name or (is_path(name) and not name.startswith("__main__:")):
            return name
    raise InputError(
        f"{place} takes a name, or a class or function that other processes can import; got "
        f"{getattr(value, '__qualname__', kind_of(value))}: put it into a module of its own"
    )


def renamed(base: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A study without the settings of what an option replaces: those that only the thing in the study takes."""
    sections = override(base, [])
    for option, place in SHORT.items():
        section, _, key = place.partition(".")
        new, old = options.get(option), sections.get(section)
        if key != "name" or not isinstance(new, str) or not isinstance(old, dict):
            continue
        if not isinstance(old.get("name"), str):
            continue
        kind = "dataset" if section == "data" else section
        short, colon, _ = new.partition(":")
        try:
            theirs, _ = allowed(old["name"], find(kind, old["name"]))
            alone = section == "partition" and colon and short in entries("partition")
            ours, anything = ([], False) if alone else allowed(new, find(kind, new))
        except InputError:
            continue  # told with all other errors of the study
        if not anything:
            own = set(type(getattr(Study(), section)).model_fields)  # a number of clients is about any fleet
            for name in (set(theirs) & old.keys()) - set(ours) - own:
                del old[name]
    return sections


def plain(label: str) -> str:
    """A label that any file system takes.

    >>> plain("FedDSE, T = 1")
    'FedDSE_T_1'
    """
    return re.sub(r"[^\w.-]+", "_", label)


def start(study: Study, watch: Watch | None = None, label: str = "") -> Result:
    """Start a run in a new folder."""
    world = world_of(study.model_dump_json())
    world.check()
    name = plain(label or f"{study.method.name}-{study.data.name}-{study.run.seed}")
    store = Store.create(Path(study.run.out), name, world.settled.model_dump_json(indent=1), world.split)
    return Result(store, experiment(store, world, watch or _nobody))


def resume(folder: Path, watch: Watch | None = None) -> Result:
    """Go on with a run from its last checkpoint; a finished one gives its result."""
    store = Store.open(folder)
    study = _unchanged(store)
    summary = store.read("summary.json")
    if summary is not None:
        return Result(store, summary)
    if store.read(DEPLOYMENT) is not None:
        raise InputError(f"{folder} is a run with real clients; go on with: {goes_on(store)}")
    world = world_of(study.model_dump_json(), store.split_file)
    return Result(store, experiment(store, world, watch or _nobody))


def _unchanged(store: Store) -> Study:
    """The study of a run, if it is the one that the run began with."""
    begun, study = store.begun(), store.study()
    if begun != study:
        changed = difference(begun, study)
        raise InputError(f"the study of {store.folder} was changed after the run began: {changed}; start a new run")
    return study


def looked_into(folder: Path) -> Store:
    """A run whose models can be looked into: simulated, with a checkpoint, and nobody is at it.

    Whoever restores a run cuts its tables back to the checkpoint, so a run under way must not be touched.
    """
    store = Store.open(folder)
    if store.read(DEPLOYMENT) is not None:
        raise InputError(f"{folder} is a run with real clients, whose data are not here")
    if not store.has_checkpoint:
        raise InputError(f"{folder} has no checkpoint yet; there is no model to look into")
    if store.is_running:
        raise InputError(f"{folder} is being run; look into it when it has ended")
    _unchanged(store)
    return store


def goes_on(store: Store) -> str:
    """The command that goes on with a run."""
    if store.read(DEPLOYMENT) is None:
        return f"fedloom resume {store.folder}"
    if method_of(store.study()).serverless:
        return "fedloom join, for every peer as before"
    return f"fedloom serve {store.folder}"


def _nobody(row: Mapping[str, Any]) -> None:
    """Watches nothing."""


def settled(asked: Study, begun: Study) -> Study:
    """What is asked, with what it leaves open ("auto") as it was decided when the run began."""
    decided = {
        name: getattr(begun.engine, name) for name in ("layout", "trainer") if getattr(asked.engine, name) == "auto"
    }
    return asked.model_copy(update={"engine": asked.engine.model_copy(update=decided)})


def difference(before: Study, after: Study) -> str:
    """What changed between two studies, but for where the result goes."""
    old, new = before.model_dump(), after.model_dump()
    old["run"]["out"] = new["run"]["out"]
    return "; ".join(
        f"{section}.{key} was {old[section].get(key)!r} and is {new[section].get(key)!r}"
        for section in new
        for key in {**old[section], **new[section]}
        if old[section].get(key) != new[section].get(key)
    )
