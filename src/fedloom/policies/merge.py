"""How are reports joined? A merge takes reports one by one, in float64, and gives the server's next tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedloom.encoding import dense, mask_of
from fedloom.errors import InputError
from fedloom.fleet.blocks import Joined, Sums
from fedloom.network import Network
from fedloom.registry import name_of, register
from fedloom.types import Report, Server, Tensors

__all__ = ["Mean", "Merge", "check_merge", "check_rows"]


class Merge(Protocol):
    """A rule for joining reports."""

    @property
    def by_class(self) -> bool:
        """Whether rows of the output layer are joined only from clients that hold the class."""

    @property
    def needs(self) -> frozenset[str]:
        """Numbers that reports must carry, beyond what every fit tells."""

    @property
    def whole(self) -> bool:
        """Whether it compares reports as wholes, so that all clients must train the same units."""

    def begin(self, server: Server) -> Joined:
        """An empty merge over the server's tensors."""


def check_merge(merge: Merge, method: str, tells: Mapping[str, float], adapts: bool) -> None:
    """Refuse a merge under a method whose reports tell just these numbers, of parts of the model if it adapts."""
    if missing := merge.needs - tells.keys():
        raise InputError(f"merge needs {', '.join(missing)} in every report, which {method} does not tell; use fednova")
    if merge.whole and adapts:
        raise InputError(
            f"merge '{name_of(merge)}' compares whole models, but clients of {method} train different parts of one "
            "here; use merge 'median' or 'trimmed'"
        )


def check_rows(merge: Merge, network: Network, method: str) -> None:
    """Refuse to join rows by class where no rows are classes."""
    if merge.by_class and not network.units.output:
        why = network.units.whole or "its output is not a layer's"
        raise InputError(
            f"{method} joins output rows by class, but no layer of the model has its classes for rows: {why}; set "
            "merge.by_class to false"
        )


@register("merge", "mean")
@dataclass(frozen=True)
class Mean:
    """Every element averaged over exactly those who trained it; untouched elements keep their value."""

    weights: Annotated[Literal["samples", "equal"], "weight of a client: its training samples, or the same for all"] = (
        "samples"
    )
    by_class: Annotated[bool, "join output rows only from clients that hold the class"] = False

    needs: ClassVar[frozenset[str]] = frozenset()
    whole: ClassVar[bool] = False

    def begin(self, server: Server) -> Joined:
        """Nothing added yet."""
        return Totals(server, self.weight)

    def weight(self, report: Report) -> float:
        """How much a report counts."""
        return 1.0 if self.weights == "equal" else report.weight


class Totals:
    """Weighted sums and the weights behind them: one number a tensor, and one an element for reports that were cut."""

    def __init__(self, server: Server, weight: Callable[[Report], float]) -> None:
        self.server, self.weight = server, weight
        self.total: Tensors = {}
        self.whole: dict[str, float] = {}  # the weight of those who voted on all of a tensor
        self.parts: Tensors = {}  # the weight of the others, element by element

    def add(self, report: Report) -> None:
        """Add a report's tensors with its weight."""
        weight = self.weight(report)
        values = {name: dense(value) for name, value in report.tensors.items()}
        masks = {name: mask for name, value in report.tensors.items() if (mask := mask_of(value)) is not None}
        for name in values.keys() - self.total.keys():
            self.total[name] = torch.zeros_like(self.server.tensors[name], dtype=torch.float64)
            self.whole[name] = 0.0
        if report.where is None and not masks and report.classes is None:
            if values:
                torch._foreach_add_([self.total[name] for name in values], list(values.values()), alpha=weight)
            for name in values:
                self.whole[name] += weight
            return
        for name in values.keys() - self.parts.keys():
            self.parts[name] = torch.zeros_like(self.total[name])
        units = self.server.network.units
        units.put(self.total, self.parts, values, report.where or {}, weight, masks=masks, rows=report.classes)

    def count(self, name: str) -> Tensor:
        """The weight behind a tensor's total: one number, or one an element."""
        whole = self.total[name].new_full((), self.whole[name])  # written on the device: no copy to wait for
        return whole + self.parts[name] if name in self.parts else whole

    def sums(self) -> Sums:
        """The totals and the weights behind them."""
        return {"total": self.total, "whole": self.whole, "parts": self.parts}

    def combine(self, sums: Sums) -> None:
        """Add such totals."""
        for name, total in sums["total"].items():
            self.total[name] = self.total[name].add_(total) if name in self.total else total.clone()
            self.whole[name] = self.whole.get(name, 0.0) + sums["whole"][name]
        for name, part in sums["parts"].items():
            self.parts[name] = self.parts[name].add_(part) if name in self.parts else part.clone()

    def result(self) -> Tensors:
        """The mean where somebody voted, the old value elsewhere."""
        return {name: self._mean(name, old) for name, old in self.server.tensors.items()}

    def _mean(self, name: str, old: Tensor) -> Tensor:
        if name not in self.total:
            return old
        count = self.count(name)
        mean = self.total[name] / count
        if not old.is_floating_point():
            mean = mean.round()
        return torch.where(count > 0, mean.to(old.dtype), old)
