"""A study: everything that determines a run, as sections of settings.

Closed sections ([train], [evaluate], [engine], [run], ...) are pydantic models; open ones ([method], the policy slots,
[data], [model], [partition], [fleet]) have a `name` and whatever the named thing takes. All errors are found at once.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.data.partition import Partition, parse
from fedloom.errors import InputError, choose, kind_of, oxford
from fedloom.registry import SLOTS, entries, find, name_of
from fedloom.settings import allowed, built, checked, must_have, must_take

__all__ = ["SECTIONS", "Study", "method_of", "named", "override", "partition_of", "read", "resolve"]

Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A closed section: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Open(BaseModel):
    """An open section: a name, a few settings of the study, and what the named thing takes."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    name: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The settings that go to the named thing."""
        return dict(self.model_extra or {})


class Data(Open):
    """The data set, and how each client's part is divided."""

    name: str = "digits"
    pad: Positive | None = None  # pixels a side that images get by a black border
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    test: Annotated[float, Field(gt=0, lt=1)] | None = None  # share of a client's own data; None: of the test set
    public: Annotated[int, Field(ge=0)] = 0
    public_from: str = ""  # another data set, or `clients`, who give copies; default: training images held out
    normalise: Literal["global", "fixed", "personal", "personal_augmented"] = "global"
    augment: str = "none"


class ModelOf(Open):
    """The model. A list of them, each a name or a table, is dealt to clients by capacity: the first and the others."""

    others: list[Open] = []

    @property
    def each(self) -> tuple[Open, ...]:
        """All of them."""
        return self, *self.others

    @property
    def label(self) -> str:
        """Their names in one word or more."""
        return " + ".join(model.name for model in self.each)


class FleetOf(Open):
    """How many clients, and what devices they have."""

    name: str = "uniform"
    clients: Positive = 10
    weak: Literal["refuse", "exclude", "ignore"] = "refuse"
    deadline: Annotated[float, Field(gt=0)] | None = None  # virtual seconds a stage may take
    onlookers: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the clients that never train; they test the model
    trace: str | None = None  # when devices are there: a shape, or a CSV file of windows
    day: Annotated[float, Field(gt=0)] = 86400.0  # virtual seconds of a shape's day


class Training(Section):
    """How clients train."""

    lr: Annotated[float, Field(gt=0)] = 0.05
    batch_size: Positive = 32
    epochs: Positive = 1
    steps: Positive | None = None
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] | None = None
    uneven: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the clients, drawn each round, that do less
    least: Positive = 1  # epochs, or steps, that such a client does at least: it draws between this and all
    schedule: Literal["constant", "cosine", "step", "exponential"] = "constant"
    decay: Annotated[float, Field(ge=0, le=1)] = (
        0.1  # step: at each milestone; exponential: each round; cosine: the end
    )
    milestones: list[Annotated[int, Field(ge=1)]] = []


class Evaluate(Section):
    """When and how to measure."""

    every: Positive | None = None  # default: about 20 times a run
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    on: Literal["own", "all", "unseen"] = "own"  # clients' own test parts, the whole test set, groups nobody trained on
    model: Literal["used", "trained"] = "used"  # the model a client really uses, or the one it last trained
    test_stats: Literal["data", "model"] = "data"  # under personal statistics: those of a test image's group, or theirs
    gap: bool = False  # how far sub-models end from the whole model trained alike; doubles the work and more
    clients: Positive = 1000  # larger fleets are evaluated on so many clients, the same in every round


class EngineOf(Open):
    """What runs the clients, and what the named engine takes beside this."""

    name: str = "auto"
    trainer: Literal["auto", "reference", "taped", "stacked", "graphs"] = "auto"
    workers: Annotated[int, Field(ge=0)] = 0
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    layout: Literal["auto", "contiguous", "channels_last"] = "auto"  # of pictures and kernels, on a CPU
    quorum: Annotated[float, Field(ge=0, le=1)] = 0.5
    deadline: Annotated[float, Field(gt=0)] | None = None


class RunOf(Section):
    """How long, from which seed, and where the result goes."""

    rounds: Positive = 20
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # PyTorch's generators take no more
    out: str = "runs"
    checkpoint_every: Positive | None = None  # default: about 20 times a run


class Study(BaseModel):
    """All sections of a study."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Open = Open()
    select: Open = Open()
    cut: Open = Open()
    share: Open = Open()
    start: Open = Open()
    objective: Open = Open()
    merge: Open = Open()
    topology: Open = Open()
    filter: Open = Open()
    data: Data = Data()
    model: ModelOf = ModelOf()
    partition: Open = Open(name="iid")
    fleet: FleetOf = FleetOf()
    train: Training = Training()
    evaluate: Evaluate = Evaluate()
    engine: EngineOf = EngineOf()
    run: RunOf = RunOf()


SECTIONS = tuple(Study.model_fields)
FLEET = ("dataset", "clients", "generator")
RESERVED: dict[str, tuple[str, ...]] = {"data": (), "model": ("channels", "classes", "size")}  # given by the program
DEFAULT_MODELS = {
    "digits": "mlp", "cifar10": "cnn", "svhn": "cnn", "cinic10": "cnn", "cifar100": "resnet18",
    "tiny_imagenet": "resnet34",
    "digits_five": "digit_cnn", "mnist_m": "digit_cnn", "synth_digits": "digit_cnn", "pacs": "alexnet",
    "vlcs": "alexnet",
}  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """The sections of a study file."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"study file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"study file {path} is not TOML: {error}") from error


def override(sections: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Sections with `section.key=value` settings on top; a value is read as TOML, else as a string.

    >>> override({"train": {"lr": 0.1}}, ["train.lr=0.5", "data.name=mnist"])
    {'train': {'lr': 0.5}, 'data': {'name': 'mnist'}}
    """
    merged = {name: _section(name, values) for name, values in sections.items()}
    for setting in settings:
        place, equals, text = setting.partition("=")
        section, dot, key = place.strip().partition(".")
        if not (equals and dot and key):
            raise InputError(f"--set takes section.key=value; got '{setting}'")
        if section not in SECTIONS:
            raise choose("section in --set", section, SECTIONS)
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        if not isinstance(merged.setdefault(section, {}), dict):
            raise InputError(f"'{section}' must be a section with settings; got {merged[section]!r}")
        merged[section][key.strip()] = value
    return merged


def resolve(sections: Mapping[str, Any], where: str = "") -> Study:
    """The study that these sections describe; one InputError that lists everything that is wrong."""
    source, problems = f" ({where})" if where else "", list[str]()
    given = override(sections, [])
    try:
        given |= _models(given)
    except InputError as error:
        problems.append(f"{error}{source}")
        del given["model"]
    try:
        study = Study.model_validate(given)
    except ValidationError as error:
        problems += [_sentence(problem, source) for problem in error.errors()]
        # What is wrong in one section must not hide what is wrong in the others.
        bad = {problem["loc"][0] for problem in error.errors()}
        study = Study.model_validate({name: values for name, values in given.items() if name not in bad})
    checks: list[Callable[[], object]] = [
        lambda: method_of(study), lambda: named("data", study), lambda: partition_of(study),
        lambda: named("fleet", study), lambda: named("model", study), lambda: _engine(study),
        lambda: _augmentation(study), lambda: _mixed(study), lambda: _work(study),
        lambda: _idle(study),
    ]  # fmt: skip
    for check in checks:
        try:
            check()
        except InputError as error:
            problems += [f"{line}{source}" for line in str(error).splitlines()]
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))
    named_now: dict[str, Open] = {"model": study.model.model_copy(update={"name": model_name(study)})}
    named_now["method"] = Open(name=study.method.name or "fedavg", **study.method.fields)
    return study.model_copy(update=named_now)


def _section(name: str, values: Any) -> Any:
    """A section as settings; `model = [...]` is short for its name."""
    if name == "model" and isinstance(values, list):
        return {"name": values}
    return dict(values) if isinstance(values, Mapping) else values


def _models(given: Mapping[str, Any]) -> dict[str, Any]:
    """A list of models as the first and the others; nothing if there is no list."""
    section = given.get("model")
    if not isinstance(section, dict) or not isinstance(section.get("name"), list):
        return {}
    tables = [{"name": each} if isinstance(each, str) else each for each in section["name"]]
    if not tables or not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in tables):
        raise InputError(f"model takes a name or a list of names and of tables with a name; got {section['name']!r}")
    if beside := section.keys() - {"name"}:
        raise InputError(
            f"[model] names several models, so {oxford(sorted(beside), 'and')} must stand with one of them: "
            '{ name = "cnn4", widths = [8, 16] }'
        )
    return {"model": {**tables[0], "others": tables[1:]}}


def _mixed(study: Study) -> None:
    """Refuse several models under a method that needs the same one everywhere; check the settings of each."""
    for other in study.model.others:
        make = find("model", other.name)
        checked(f"model '{other.name}'", make, other.fields, RESERVED["model"])
    name = study.method.name or "fedavg"
    if study.model.others and not find("method", name).mixes:  # type: ignore[attr-defined]
        able = [each for each in entries("method") if find("method", each).mixes]  # type: ignore[attr-defined]
        raise InputError(
            f"{name} joins or hands on the tensors of one model, but [model] names {len(study.model.each)}: "
            f"{study.model.label}; name one, or use {oxford(able)}"
        )


def _work(study: Study) -> None:
    """Refuse uneven work that could not be."""
    train = study.train
    what, most = ("epochs", train.epochs) if train.steps is None else ("steps", train.steps)
    if train.least > most:
        raise InputError(f"train.least is {train.least} {what}, but all that a client does is train.{what} = {most}")
    if train.least > 1 and not train.uneven:
        raise InputError(
            "train.least is what clients that do less do at least, and train.uneven = 0 says that nobody does less; "
            "set train.uneven to the share of clients that do, up to 1"
        )


def _idle(study: Study) -> None:
    """Refuse settings that nothing else in the study lets count."""
    train, fleet = study.train, study.fleet
    if train.momentum and train.optimizer != "sgd":
        raise InputError(
            f"train.momentum is for optimizer sgd; {train.optimizer} has moments of its own; got {train.momentum:g}"
        )
    if train.milestones and train.schedule != "step":
        raise InputError(f"train.milestones are for train.schedule = 'step'; it is '{train.schedule}'")
    if train.schedule == "step" and not train.milestones:
        raise InputError("train.schedule 'step' needs train.milestones, the rounds after which the rate falls")
    if fleet.day != FleetOf().day and (fleet.trace is None or fleet.trace.endswith(".csv")):
        why = "a CSV file has a period of its own" if fleet.trace else "fleet.trace names none"
        raise InputError(f"fleet.day is how long a day of a shape of fleet.trace takes, but {why}")


def _engine(study: Study) -> None:
    """Refuse an engine that is not there, lacks a library or does not know a setting."""
    if study.engine.layout == "channels_last" and study.engine.device == "cuda":
        raise InputError("engine.layout 'channels_last' is for the CPU; on a GPU engine.precision=bf16 brings it")
    if study.engine.trainer == "graphs" and study.engine.device == "cpu":
        raise InputError("engine.trainer 'graphs' captures steps on a GPU; on the CPU use taped, reference or stacked")
    if study.engine.trainer == "taped" and study.engine.device == "cuda":
        raise InputError("engine.trainer 'taped' plays steps of the CPU; on a GPU use graphs or reference")
    name, fields = study.engine.name, study.engine.fields
    if (name, study.engine.device) == ("processes", "cuda"):
        raise InputError("engine 'processes' forks workers, which cannot use a GPU; with engine.device=cuda use local")
    if name != "auto" and ":" not in name and name not in entries("engine"):
        raise choose("engine", name, ["auto", *entries("engine")])
    make = find("engine", name) if name != "auto" else None
    own = allowed(f"engine '{name}'", make, ("factory", "workers"))[0] if make else []
    for key in fields.keys() - set(own):
        raise choose("setting in [engine]", key, [*EngineOf.model_fields, *own])
    if make:
        must_take(f"engine '{name}'", make, ("factory", "workers"))
        checked(f"engine '{name}'", make, fields, ("factory", "workers"))
        getattr(make, "check", dict)(**fields)


def _augmentation(study: Study) -> None:
    from fedloom.augment import augmentation_of

    augmentation_of(study.data.augment)


def model_name(study: Study) -> str:
    """The model's name, or the one that goes with the data set."""
    return study.model.name or DEFAULT_MODELS.get(study.data.name, "lenet5")


def _sentence(problem: Any, source: str) -> str:
    """What pydantic found, in our words: where, got, allowed, did-you-mean."""
    place = ".".join(str(step) for step in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *above, key = problem["loc"]
        section = Study.model_fields[above[0]].annotation if above else Study
        known = list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []
        near = get_close_matches(str(key), known, n=1)
        kind = f"setting '{key}' in [{above[0]}]" if above else f"section [{key}]"
        return f"unknown {kind}{source}; allowed: {oxford(known)}." + (f" Did you mean '{near[0]}'?" if near else "")
    if problem["type"] == "model_type":
        return f"'{place}' must be a section with settings{source}; got {problem['input']!r}"
    reason = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{place} is wrong{source}: {reason}; got {problem['input']!r}"


def named(section: str, study: Study) -> tuple[Any, dict[str, Any]]:
    """What an open section names, and its checked settings."""
    given: Open = getattr(study, section)
    kind = "dataset" if section == "data" else section
    if section == "data" and given.name.endswith(".npz"):
        return find("dataset", "npz"), {"path": given.name, **given.fields}
    name = model_name(study) if section == "model" else given.name
    make = find(kind, name)
    return make, checked(f"{kind} '{name}'", make, given.fields, RESERVED.get(section, FLEET))


def partition_of(study: Study) -> Partition:
    """How data are dealt: `dirichlet:0.1` in one word, or a name and settings."""
    short, colon, _ = study.partition.name.partition(":")
    what = f"partition '{study.partition.name}'"
    if not study.partition.fields:
        deals = parse(study.partition.name)
        must_have(what, deals, Partition)
        return deals
    if colon and short in entries("partition"):
        raise InputError(
            f"{what} is the short form, which takes no further settings; got "
            f"{oxford(study.partition.fields, 'and')}. Name it '{short}' and give every setting by its name"
        )
    make, fields = named("partition", study)
    partition: Partition = built(what, make, fields)
    must_have(what, partition, Partition)
    return partition


def _policy(slot: str, given: Open, preset: Any) -> dict[str, Any]:
    """What a section puts into a slot: another policy, or the preset with other settings; nothing if it is empty."""
    if given.name:
        make, what = find(slot, given.name), f"{slot} '{given.name}'"
        policy = built(what, make, checked(what, make, given.fields))
        must_have(what, policy, _slots()[slot])
        return {slot: policy}
    if not given.fields:
        return {}
    if preset is None:
        raise InputError(f"[{slot}] needs a name; got {oxford(given.fields, 'and')} alone")
    own = type(preset)
    new = checked(f"{slot} '{name_of(preset)}'", own, given.fields)
    kept = {key: getattr(preset, key) for key in (each.name for each in fields(own)) if key not in new}
    return {slot: own(**kept, **new)}


@cache
def _slots() -> dict[str, Any]:
    """The protocol of every slot of a method."""
    from fedloom.method import Method

    hints = typing.get_type_hints(Method)
    return {slot: (typing.get_args(hints[slot]) or (hints[slot],))[0] for slot in SLOTS}  # the first of `Filter | None`


def method_of(study: Study) -> Any:
    """The method with its own settings, and with the study's policies in its slots."""
    name = study.method.name or "fedavg"
    make, problems = find("method", name), []
    own: dict[str, Any] = {}
    try:
        own = checked(f"method '{name}'", make, study.method.fields, SLOTS)
    except InputError as error:
        problems.append(str(error))
    method = built(f"method '{name}'", make, own)
    from fedloom.method import Method

    if not isinstance(method, Method):
        raise InputError(f"method '{name}' makes {kind_of(method)}; expected a fedloom.method.Method")
    policies: dict[str, Any] = {}
    for slot in SLOTS:
        try:
            policies |= _policy(slot, getattr(study, slot), getattr(method, slot))
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    method = replace(method, **policies)
    method.check()
    return method
