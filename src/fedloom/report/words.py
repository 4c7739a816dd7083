"""The set-up as a paragraph that can go into a paper: what all runs share, and in what else they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from fedloom.errors import InputError, oxford
from fedloom.registry import name_of
from fedloom.report.gather import Group, Run, common, flat
from fedloom.report.statistics import ENOUGH
from fedloom.runs.start import DEPLOYMENT
from fedloom.runs.study import Study, method_of, partition_of

__all__ = ["words"]

SAID = ("lr", "epochs", "steps", "optimizer", "batch_size")  # in the sentence about training, in words
MOST = 8  # groups whose seeds are listed one by one
USUAL = flat(Study())
# Settings that have a place of their own in the paragraph, and those that change no number but the real time.
PLACED = ("method.name", "data.name", "data.validation", "run.rounds", "evaluate.every", "evaluate.clients",
          "engine.name", "engine.trainer", "engine.workers", "engine.layout", "engine.device")  # fmt: skip
SECTIONS = ("partition.", "model.", "fleet.", "train.", "select.")


def words(groups: Sequence[Group]) -> str:
    """All that is said of a run is said only if it can be said of every one."""
    runs = [run for group in groups for run in group.runs]
    sayings = (_data, _clients, _model, _fleet, _rounds, _training)
    said = [{say(run) for run in runs} for say in sayings]
    shared, own = common([run.study for run in runs])
    apart = dict.fromkeys(key for each in own for key in each)
    beside = [key for key in apart if not key.startswith(("method.name", "engine."))]
    parts = [_methods(runs), *(sentence for each in said if len(each) == 1 for sentence in each if sentence)]
    rest = {key: value for key, value in shared.items() if not key.startswith((*PLACED, *SECTIONS))}
    if told := _items({key: value for key, value in rest.items() if USUAL.get(key) != value}):
        parts.append(f"Also set: {told}.")
    if beside:
        first = "Beside the method, the runs" if "method.name" in apart else "The runs"
        parts.append(f"{first} differ in {oxford(beside, 'and')}.")
    return " ".join([*parts, *_seeds(groups)])


def _methods(runs: Sequence[Run]) -> str:
    methods = oxford(list(dict.fromkeys(run.study.method.name for run in runs)), "and")
    ours, torch = (_versions(runs, name) for name in ("fedloom", "torch"))
    return f"We ran {methods} with fedloom {ours} (PyTorch {torch})."


def _versions(runs: Iterable[Run], name: str) -> str:
    return " and ".join(dict.fromkeys(str(run.environment.get(name, "?")) for run in runs))


def _deployed(run: Run) -> bool:
    """Whether its clients were real devices, about whose data and capacities the study says nothing."""
    return run.store.read(DEPLOYMENT) is not None


def _data(run: Run) -> str:
    if _deployed(run):
        return ""
    data = run.study.data
    held = f"; a share of {data.validation:g} of each client's part is held out for validation"
    return f"The data set is {data.name}{held if data.validation else ''}."


def _clients(run: Run) -> str:
    if _deployed(run):
        return f"The clients are {run.study.fleet.clients} real devices with data of their own."
    return f"The data are dealt to {run.study.fleet.clients} clients by the partition {_partition(run.study)}."


def _partition(study: Study) -> str:
    try:
        found: Any = partition_of(study)
    except InputError:  # one of the user's own, that is not here
        return _named(study.partition.name, study.partition.fields)
    if not is_dataclass(found):
        return _named(study.partition.name, study.partition.fields)
    return _named(name_of(found), {each.name: getattr(found, each.name) for each in fields(found)})


def _model(run: Run) -> str:
    return f"The model is {' or '.join(_named(each.name, each.fields) for each in run.study.model.each)}."


def _fleet(run: Run) -> str:
    if _deployed(run):
        return ""
    told = {key: value for key, value in _set(run.study, "fleet").items() if key not in ("name", "clients")}
    return f"The devices are those of the fleet {_named(run.study.fleet.name, told)}."


def _rounds(run: Run) -> str:
    return f"There are {run.study.run.rounds} rounds."


def _training(run: Run) -> str:
    study, train = run.study, run.study.train
    count, unit = (train.steps, "step") if train.steps else (train.epochs, "epoch")
    work = f"{count} {unit}{'' if count == 1 else 's'}"
    told = {key: value for key, value in _set(study, "train").items() if key not in SAID}
    if train.schedule != "constant":
        told["decay"] = train.decay  # where it is not set it still shapes the rate
    rate = f"batch size {train.batch_size} and learning rate {train.lr:g}"
    return f"{_cohort(study)} for {work} with {_named(train.optimizer.upper(), told)}, {rate}."


def _cohort(study: Study) -> str:
    try:
        fraction = getattr(method_of(study).select, "fraction", None)
    except InputError:
        fraction = None
    if fraction is None:
        return "Clients train"
    chosen = _named(study.select.name, {key: value for key, value in study.select.fields.items() if key != "fraction"})
    who = "all clients train" if fraction == 1 else f"a share of {fraction:g} of the clients trains"
    return f"In a round {who}" + (f", chosen by {chosen}," if study.select.name else "")


def _set(study: Study, section: str) -> dict[str, Any]:
    """The settings of a section that are not as they are by default."""
    beyond = {key: value for key, value in flat(study).items() if USUAL.get(key) != value}
    return {key.partition(".")[2]: value for key, value in beyond.items() if key.startswith(f"{section}.")}


def _named(name: str, settings: Mapping[str, Any]) -> str:
    return name + (f" ({_items(settings)})" if settings else "")


def _items(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_plain(value)}" for key, value in settings.items())


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "/".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def _seeds(groups: Sequence[Group]) -> list[str]:
    """Of which seeds each mean is, and whether the statistics can have tested anything."""
    known = [[run.seed for run in group.runs] for group in groups]
    if all(each == known[0] for each in known):
        parts = [f"Numbers are {_means(known[0])}."]
    elif len(groups) <= MOST:
        listed = "; ".join(f"{group.label}: {_means(each)}" for group, each in zip(groups, known, strict=True))
        parts = [f"Numbers are, {listed}."]
    else:
        counts = sorted({len(each) for each in known})
        parts = [f"Numbers are means over {counts[0]} to {counts[-1]} seeds, of each as many as the tables say."]
    together = set.intersection(*map(set, known))
    if len(groups) > 1 and len(together) >= ENOUGH and all(group.ended for group in groups):
        parts.append(f"They are compared by paired t-tests over {len(together)} common seeds with Holm's correction.")
    return parts


def _means(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"of one seed ({seeds[0]})"
    return f"means over {len(seeds)} seeds ({', '.join(map(str, seeds))})"
