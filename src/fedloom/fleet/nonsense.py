"""Reports that cannot be used: of the wrong shape or type, not finite, about units or classes that do not exist."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from fedloom.encoding import dense
from fedloom.network import Network
from fedloom.types import Report, Tensors

__all__ = ["nonsense"]


def nonsense(report: Report, network: Network, like: Tensors | None = None) -> str:
    """Why a report cannot be used; empty if it can. Its tensors are those of the model, or just such as `like`."""
    try:
        return _wrong(report, network, like)
    except Exception as error:  # noqa: BLE001 (whatever a report is made of)
        return f"it cannot be read: {type(error).__name__}: {error}"


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
    finite: list[Tensor] = []
    for name, value in (
        (name, value) for part in (report.tensors, *report.extra.values()) for name, value in part.items()
    ):
        if name not in shapes:
            return f"tensor '{name}' is not in the model" if like is None else f"tensor '{name}' was not asked for"
        if tuple(value.shape) != tuple(shapes[name]):  # before decoding: a few bytes may claim to be a huge tensor
            return f"tensor '{name}' has shape {tuple(value.shape)}, expected {tuple(shapes[name])}"
        if value.dtype != dtypes[name]:
            return f"tensor '{name}' is of {value.dtype}, expected {dtypes[name]}"
        tensor = dense(value)
        if tensor.is_floating_point():
            finite.append(tensor)
    # One norm a tensor and one look at their sum: a GPU is not asked to wait sixty times a report.
    if finite and not isfinite(torch.stack(torch._foreach_norm(finite)).sum()):
        return "a tensor is not finite"
    if not all(isfinite(number) for number in (report.weight, *report.numbers.values())):
        return "a number is not finite"
    if report.weight < 0:
        return f"its weight is {report.weight}"
    return ""
