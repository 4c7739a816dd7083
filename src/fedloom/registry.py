"""Everything a study can name: methods, policies, data sets, models, partitions, fleets, engines.

A class or function enters with the `register` decorator. What it takes (names, types, defaults, help) is read from its
signature, so the command line, `fedloom list` and the docs never say anything the code does not. `index.json` beside
this file is that knowledge written down, so that listing it imports neither torch nor the package's own modules;
`python -m fedloom.registry` writes it and a test keeps it equal to the code.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedloom.errors import InputError, choose, kind_of

__all__ = ["KINDS", "Entry", "describe", "entries", "find", "hints_of", "is_path", "name_of", "own_modules", "register"]

SLOTS = ("select", "cut", "share", "start", "objective", "merge", "topology", "filter")
KINDS = ("method", *SLOTS, "score", "dataset", "model", "partition", "fleet", "engine")
INDEX = Path(__file__).with_name("index.json")

Item = TypeVar("Item", bound=Callable[..., Any])


class Entry(NamedTuple):
    """What is known of a registered name without importing it; `fields` are its settings in order."""

    kind: str
    name: str
    path: str
    summary: str
    paper: str
    fields: list[dict[str, str]]
    trainers: list[str] = []  # of a method: those that do its fits, rather than leave them to the reference


_registered: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str, *, paper: str = "") -> Callable[[Item], Item]:
    """Give a class or function a name under which studies and the command line find it."""

    def mark(item: Item) -> Item:
        if kind not in KINDS:
            raise choose("kind of registration", kind, KINDS)
        _registered[kind][name] = item
        item.__fedloom__ = (kind, name, paper)  # type: ignore[attr-defined]
        return item

    return mark


def name_of(item: object) -> str:
    """The registered name of an object, class or function; else an import path."""
    marked = item if inspect.isroutine(item) or inspect.isclass(item) else type(item)
    mark = marked.__dict__.get("__fedloom__")
    return mark[1] if mark else f"{marked.__module__}:{marked.__qualname__}"


def own_modules() -> list[str]:
    """The user's modules that registered something, for another process to import."""
    found = {item.__module__ for items in _registered.values() for item in items.values()}
    return sorted(name for name in found if name.partition(".")[0] not in ("fedloom", "__main__"))


@cache
def _index() -> dict[str, dict[str, dict[str, Any]]]:
    return typing.cast(dict[str, dict[str, dict[str, Any]]], json.loads(INDEX.read_text()))


def entries(kind: str) -> dict[str, Entry]:
    """All names of a kind, from the index and from what the user's own modules registered."""
    listed = {name: Entry(kind, name, **known) for name, known in _index().get(kind, {}).items()}
    return listed | {name: describe(kind, name, item) for name, item in _registered[kind].items() if name not in listed}


def find(kind: str, name: str) -> Callable[..., Any]:
    """The class or function behind a registered name or an import path `package.module:Name`."""
    if name in _registered[kind]:
        return _registered[kind][name]
    if ":" in name:
        return _load(kind, name)
    known = _index().get(kind, {})
    if name not in known:
        raise choose(kind, name, entries(kind))
    return _load(kind, known[name]["path"])


def is_path(text: str) -> bool:
    """Whether this is an import path; nothing else is ever imported.

    >>> is_path("package.module:Name"), is_path("package.module:!"), is_path("randaugment:3:5")
    (True, False, False)
    """
    module, _, attribute = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), attribute))


def _load(kind: str, path: str) -> Callable[..., Any]:
    if not is_path(path):
        raise InputError(f"{kind} '{path}' is no import path; expected package.module:Name")
    module, _, attribute = path.partition(":")
    try:
        item = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported, also end the process
        said = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise InputError(
            f"{kind} '{path}' cannot be imported: {said}; expected an import path package.module:Name"
        ) from error
    if not callable(item):
        raise InputError(f"{kind} '{path}' is {kind_of(item)}; expected a class or function")
    return typing.cast(Callable[..., Any], item)


def hints_of(make: Callable[..., Any]) -> dict[str, Any]:
    """The types of what a class or function takes; those of a data class stand where each field does."""
    if inspect.isclass(make):
        owner = next(each for each in make.__mro__ if "__init__" in each.__dict__)
        make = make if "__dataclass_fields__" in owner.__dict__ else make.__init__
    return typing.get_type_hints(make, include_extras=True)


def describe(kind: str, name: str, item: Callable[..., Any]) -> Entry:
    """Read an entry off a class or function: first line of its docstring, and its settings."""
    hints = hints_of(item)
    fields = []
    for parameter in inspect.signature(item).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        hint = hints.get(parameter.name, Any)
        notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, str)]
        fields.append(
            {
                "name": parameter.name,
                "type": _type_name(hint),
                "default": "" if parameter.default is parameter.empty else _default_name(parameter.default),
                "help": " ".join(notes),
            }
        )
    summary = (inspect.getdoc(item) or "").partition("\n")[0]
    return Entry(
        kind,
        name,
        f"{item.__module__}:{item.__qualname__}",
        summary,
        getattr(item, "__fedloom__", ("", "", ""))[2],
        fields,
        list(getattr(item, "trainers", ())) if kind == "method" else [],
    )


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin is not None and arguments:
        joiner = " | " if "Union" in str(origin) else ", "
        inner = joiner.join("..." if argument is ... else _type_name(argument) for argument in arguments)
        return inner if joiner == " | " else f"{origin.__name__}[{inner}]"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))


def _default_name(value: object) -> str:
    return name_of(value) if "__fedloom__" in type(value).__dict__ else repr(value)


def _scan() -> dict[str, dict[str, dict[str, Any]]]:
    """Import every module of the package and describe what they registered from inside it."""
    import fedloom

    for module in pkgutil.walk_packages(fedloom.__path__, "fedloom."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: Mapping[str, dict[str, Callable[..., Any]]] = importlib.import_module("fedloom.registry")._registered
    index: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in KINDS:
        index[kind] = {}
        for name, item in found[kind].items():
            if item.__module__.startswith("fedloom."):
                index[kind][name] = describe(kind, name, item)._asdict()
                del index[kind][name]["kind"], index[kind][name]["name"]
    return index


if __name__ == "__main__":
    INDEX.write_text(json.dumps(_scan(), indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{INDEX.name}: {sum(len(kind) for kind in _scan().values())} entries\n")
