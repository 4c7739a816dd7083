"""Settings given by a user, checked against the signature of what takes them: names, types and bounds."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from traceback import extract_tb
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from fedloom.errors import FedloomError, InputError, choose, kind_of, oxford
from fedloom.registry import hints_of

__all__ = ["allowed", "built", "checked", "must_have", "must_take", "parameters", "value_of"]


def parameters(what: str, make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """What a class or function takes."""
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} does not say what it takes: {error}; expected a class or function") from error


def allowed(what: str, make: Callable[..., Any], reserved: Iterable[str] = ()) -> tuple[list[str], bool]:
    """The names a user may set, and whether any other name is taken too."""
    taken, named = parameters(what, make), []
    for key, parameter in taken.items():
        if key not in reserved and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            named.append(key)
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())


def must_take(what: str, make: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuse what does not take that which the program gives it: an import path may lead anywhere."""
    taken, anything = allowed(what, make)
    if not anything and set(names) - set(taken):
        raise InputError(f"{what} must take {oxford(names, 'and')}; it takes {oxford(taken, 'and') or 'nothing'}")


def must_have(what: str, made: object, protocol: type) -> None:
    """Refuse what was made if it lacks a method of the protocol: an import path may lead anywhere."""
    asked = [
        name
        for name, part in vars(protocol).items()
        if (callable(part) or isinstance(part, property)) and (name == "__call__" or not name.startswith("_"))
    ]
    if missing := [name for name in asked if not hasattr(made, name)]:
        raise InputError(
            f"{what} makes {kind_of(made)} without {oxford(missing, 'and')}; "
            f"expected a {protocol.__module__}.{protocol.__name__}"
        )


def built(what: str, make: Callable[..., Any], told: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> Any:
    """What a class or function makes of settings (`told` if it fails) and of what the program gives it."""
    try:
        return make(**(given or {}), **told)
    except FedloomError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends the process is no module
        # Where the user's own code was, whatever it called; nowhere if it could not even be called.
        places = [f" ({place.filename}, line {place.lineno})" for place in extract_tb(error.__traceback__)[1:2]]
        settings = ", ".join(f"{key}={value!r}" for key, value in told.items()) or "no settings"
        raise InputError(
            f"{what} cannot be built with {settings}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}{''.join(places)}"
        ) from error


def checked(
    what: str, make: Callable[..., Any], fields: Mapping[str, Any], reserved: Iterable[str] = ()
) -> dict[str, Any]:
    """The fields as `make` wants them; InputError for an unknown name or a value of the wrong kind.

    `reserved` names are given by the program and are not the user's to set.
    """
    names, anything = allowed(what, make, reserved)
    for key in fields:
        if key not in names and not anything:
            raise (
                choose(f"setting of {what}", key, names)
                if names
                else InputError(f"{what} has no settings; got '{key}'")
            )
    missing = [
        key
        for key, parameter in parameters(what, make).items()
        if key in names and key not in fields and parameter.default is parameter.empty
    ]
    if missing:
        raise InputError(
            f"{what} needs a value for {oxford(missing, 'and')}; got {oxford(fields, 'and') or 'no settings'}"
        )
    try:
        hints = hints_of(make)
    except (NameError, TypeError) as error:
        raise InputError(f"the types of the settings of {what} cannot be read: {error}") from error
    return {key: value_of(key, value, hints.get(key, Any), what) for key, value in fields.items()}


def value_of(name: str, value: object, hint: Any, of: str = "") -> Any:
    """The value as its type hint wants it: strict, but a list from a study file may be a tuple.

    >>> value_of("mu", 1, float)
    1.0
    """
    if not _finite(value):  # JSON, in which a run keeps its study, knows no such numbers
        raise InputError(
            f"{name}{of and f' of {of}'} is wrong: input should be a finite number of at most 64 bits; got {value!r}"
        )
    if hint is Any:
        return value
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a data class or model brings its own configuration
        adapter = TypeAdapter(hint)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = None
    try:
        return adapter.validate_python(value, strict=True) if text is None else adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{step}]" for step in first["loc"])
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise InputError(f"{name}{place}{of and f' of {of}'} is wrong: {reason}; got {value!r}") from error


def _finite(value: object) -> bool:
    """Whether all numbers in a value are, and whole ones fit into 64 bits, as TOML's do."""
    if isinstance(value, Mapping):
        return all(_finite(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(each) for each in value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return not isinstance(value, float) or isfinite(value)
