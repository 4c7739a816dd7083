"""Whether data are what type hints say. What others sent may be anything; what a class says of its fields is the rule.

Checks are made once a hint and are about many values at once, so that those of a model's tensors cost little more than
one look at the kinds that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["fitting", "misfit"]

EXACT = 2**53  # up to here a float, and so a column of floats, holds whole numbers exactly
Check = Callable[[Collection[Any]], bool]
Thing = TypeVar("Thing")


def fitting(thing: Thing) -> Thing:
    """A data class whose fields hold what it says of them; TypeError for any other."""
    if wrong := misfit(vars(thing), type(thing)):
        raise TypeError(f"'{wrong}' of a {type(thing).__name__} is not {type(thing).__annotations__[wrong]}")
    return thing


def misfit(values: Mapping[str, Any], said: type) -> str:
    """The first field that is missing or does not hold what a class says of it; empty if all do.

    >>> class Facts:
    ...     name: str
    ...     sizes: dict[str, int]
    >>> misfit({"name": "a", "sizes": {"b": 1}}, Facts), misfit({"name": "a", "sizes": {"b": True}}, Facts)
    ('', 'sizes')
    """
    for name, check in _checks(said):
        if name not in values or not check((values[name],)):
            return name
    return ""


@cache
def _checks(said: type) -> list[tuple[str, Check]]:
    return [(name, _check(hint)) for name, hint in get_type_hints(said).items() if hint is not Any]


@cache
def _check(hint: Any) -> Check:
    """What tells whether values are what a hint says."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in PLAIN:
        return PLAIN[kind]
    if kind in (Union, UnionType):
        checks, known = [_check(part) for part in inner], frozenset(inner) - PLAIN.keys()
        return lambda values: (
            known.issuperset(map(type, values)) or all(any(check((each,)) for check in checks) for each in values)
        )
    if kind in (dict, Mapping):
        keys, items = (_check(part) for part in inner)
        return lambda values: all(isinstance(each, dict) and keys(each) and items(each.values()) for each in values)
    if kind is tuple and Ellipsis not in inner:
        checks = [_check(part) for part in inner]
        return lambda values: all(isinstance(each, tuple) and _fit(checks, each) for each in values)
    if kind in (list, tuple):
        items = _check(inner[0])
        return lambda values: all(isinstance(each, kind) and items(each) for each in values)
    return lambda values: all(issubclass(found, kind) for found in {*map(type, values)})


def _fit(checks: Collection[Check], values: Collection[Any]) -> bool:
    return len(checks) == len(values) and all(check((each,)) for check, each in zip(checks, values, strict=True))


def _floats(values: Collection[Any]) -> bool:
    """Numbers; whole ones may stand for floats where nothing is lost."""
    others = [each for each in values if not isinstance(each, float)]
    return not others or (_ints(others) and min(others) >= -EXACT and max(others) <= EXACT)


def _ints(values: Collection[Any]) -> bool:
    """Whole numbers of at most 64 bits; a truth value is none."""
    whole = {*map(type, values)} <= {int} or all(isinstance(each, int) and type(each) is not bool for each in values)
    return whole and all(-(2**63) <= each < 2**63 for each in values)


PLAIN: Mapping[Any, Check] = {Any: lambda values: True, float: _floats, int: _ints}
