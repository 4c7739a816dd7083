"""Reports that cannot be used: not what was asked for, of the wrong shape or type, not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from types import MappingProxyType

import torch

from fedloom.encoding import Value, dense, numbers_of
from fedloom.errors import line
from fedloom.hints import misfit
from fedloom.network import Network
from fedloom.types import Report, Tensors
from fedloom.units import rising

__all__ = ["FIT", "FREE", "Form", "looked_at", "nonsense"]

# The numbers that every fit tells, and the least that each can be.
FIT: Mapping[str, float] = MappingProxyType({"loss": -inf, "squared_loss": 0.0, "steps": 0.0, "samples": 0.0})


@dataclass(frozen=True, eq=False)
class Form:
    """What a report must hold to be used. Numbers that are not asked for may be there too."""

    numbers: Mapping[str, float] = field(default_factory=dict)  # by name the least that each may be
    tensors: Tensors | None = None  # such as these, and all of them; None: any of the model's
    extra: Mapping[str, Tensors] = field(default_factory=dict)  # further parts, each of tensors such as these
    units: bool = False  # whether it may be about some of the model's units


FREE = Form()  # asks for nothing; what is there must suit the model


def nonsense(report: Report, network: Network, form: Form = FREE, sound: bool | None = None) -> str:
    """Why a report cannot be used; empty if it can.

    `sound` says whether its tensors are of finite length, if somebody who can be believed has looked already.
    """
    try:
        return line(_untold(report, form) or _wrong(report, network, form, sound) or _unsound(report, sound))
    except Exception as error:  # noqa: BLE001 (whatever a report is made of)
        return line(f"it cannot be read: {type(error).__name__}: {error}")


def looked_at(reports: Sequence[Report | None]) -> list[bool | None]:
    """Which reports hold tensors of finite length alone; all are looked at together, so that a GPU waits once.

    None for what is no report, and for all if one is made of something else: who gets them looks at each alone.
    """
    made = [report for report in reports if report is not None]
    try:
        found = iter(_finite(made))
    except Exception:  # noqa: BLE001 (whatever a report is made of)
        return [None for _ in reports]
    return [None if report is None else next(found) for report in reports]


def _finite(reports: Sequence[Report]) -> list[bool]:
    held = [[numbers_of(value) for part in (report.tensors, *report.extra.values()) for value in part.values()]
            for report in reports]  # fmt: skip
    floats = [[tensor for tensor in each if tensor.is_floating_point()] for each in held]
    flat = [tensor for each in floats for tensor in each]
    # By their lengths: the quickest look there is (the largest magnitude takes ten times as long on a CPU), and numbers
    # whose squares overflow are of a model that has diverged.
    found = torch.stack(torch._foreach_norm(flat)).isfinite().cpu() if flat else torch.ones(0, dtype=torch.bool)
    return [bool(part.all()) for part in torch.split(found, [len(each) for each in floats])]


def _untold(report: Report, form: Form) -> str:
    if wrong := misfit(vars(report), Report):
        return f"its '{wrong}' is not {Report.__annotations__[wrong]}"
    numbers = report.numbers
    if not all(isfinite(number) for number in (report.weight, *numbers.values())):
        return "a number is not finite"
    if not "".join(numbers).isprintable():
        return "the name of a number is no text"
    if report.weight < 0:
        return f"its weight is {report.weight}"
    for name, least in form.numbers.items():
        if name not in numbers:
            return f"it does not tell '{name}'"
        if numbers[name] < least:
            return f"its number '{name}' is {numbers[name]:g}, at least {least:g} is possible"
    return ""


def _wrong(report: Report, network: Network, form: Form, sound: bool | None) -> str:
    if report.where:
        if not form.units:
            return "it is about some units of a model that is trained whole"
        network.units.keep(report.where)
    if report.classes is not None and not rising(report.classes, network.classes):
        return "it votes for classes that do not exist"
    if report.extra.keys() != form.extra.keys():
        return f"its further parts are {sorted(report.extra)}, expected {sorted(form.extra)}"
    parts = [(report.tensors, form.tensors), *((report.extra[part], like) for part, like in form.extra.items())]
    return next(filter(None, (_unlike(tensors, like, report, network, sound) for tensors, like in parts)), "")


def _unlike(
    tensors: Mapping[str, Value], like: Tensors | None, report: Report, network: Network, sound: bool | None
) -> str:
    shapes, dtypes = network.shapes(report.where), network.dtypes
    if like is not None:
        shapes, dtypes = ({name: getattr(each, what) for name, each in like.items()} for what in ("shape", "dtype"))
        if missing := like.keys() - tensors.keys():
            return f"it holds no '{min(missing)}'"
    for name, value in tensors.items():
        if name not in shapes:
            return f"tensor '{name}' is not in the model" if like is None else f"tensor '{name}' was not asked for"
        if tuple(value.shape) != tuple(shapes[name]):  # before decoding: a few bytes may claim to be a huge tensor
            return f"tensor '{name}' has shape {tuple(value.shape)}, expected {tuple(shapes[name])}"
        if value.dtype != dtypes[name]:
            return f"tensor '{name}' is of {value.dtype}, expected {dtypes[name]}"
        if sound is None:
            dense(value)  # what cannot be decoded cannot be joined; who looked at it made it, by the rules
    return ""


def _unsound(report: Report, sound: bool | None) -> str:
    if sound is None:
        (sound,) = _finite([report])
    return "" if sound else "a tensor is not finite, or the sum of its squares is not"
