"""Reports that cannot be used: of the wrong shape or type, not finite, about units or classes that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch

from fedloom.encoding import dense, numbers_of
from fedloom.network import Network
from fedloom.types import Report, Tensors

__all__ = ["looked_at", "nonsense"]


def nonsense(report: Report, network: Network, like: Tensors | None = None, sound: bool | None = None) -> str:
    """Why a report cannot be used; empty if it can. Its tensors are those of the model, or just such as `like`.

    `sound` says whether they are finite, if somebody who can be believed has looked already.
    """
    try:
        return _wrong(report, network, like) or _unsound(report, sound)
    except Exception as error:  # noqa: BLE001 (whatever a report is made of)
        return f"it cannot be read: {type(error).__name__}: {error}"


def looked_at(reports: Sequence[Report | None]) -> list[bool | None]:
    """Which reports hold finite tensors alone, by one look at all of them: a GPU waits once, not once a report.

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
    found = torch.stack(torch._foreach_norm(flat)).isfinite().cpu() if flat else torch.ones(0, dtype=torch.bool)
    return [bool(part.all()) for part in torch.split(found, [len(each) for each in floats])]


def _unsound(report: Report, sound: bool | None) -> str:
    if sound is None:
        (sound,) = _finite([report])
    if not sound:
        return "a tensor is not finite"
    if not all(isfinite(number) for number in (report.weight, *report.numbers.values())):
        return "a number is not finite"
    return f"its weight is {report.weight}" if report.weight < 0 else ""


def _wrong(report: Report, network: Network, like: Tensors | None) -> str:
    if report.where:
        network.units.keep(report.where)
    known = network.classes
    if report.classes is not None and not ((report.classes >= 0) & (report.classes < known)).all():
        return "it votes for classes that do not exist"
    shapes, dtypes = network.shapes(report.where), network.dtypes
    if like is not None:
        shapes, dtypes = ({name: getattr(each, what) for name, each in like.items()} for what in ("shape", "dtype"))
        if missing := like.keys() - report.tensors.keys():
            return f"it holds no '{min(missing)}'"
    for name, value in (
        (name, value) for part in (report.tensors, *report.extra.values()) for name, value in part.items()
    ):
        if name not in shapes:
            return f"tensor '{name}' is not in the model" if like is None else f"tensor '{name}' was not asked for"
        if tuple(value.shape) != tuple(shapes[name]):  # before decoding: a few bytes may claim to be a huge tensor
            return f"tensor '{name}' has shape {tuple(value.shape)}, expected {tuple(shapes[name])}"
        if value.dtype != dtypes[name]:
            return f"tensor '{name}' is of {value.dtype}, expected {dtypes[name]}"
        dense(value)  # what cannot be decoded cannot be joined
    return ""
