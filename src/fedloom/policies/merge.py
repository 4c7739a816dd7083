"""How are reports joined? A merge takes reports one by one, in float64, and gives the server's next tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from fedloom.encoding import dense, mask_of
from fedloom.errors import InputError
from fedloom.fleet.blocks import Joined, Sums
from fedloom.registry import name_of, register
from fedloom.types import Report, Server, Tensors
from fedloom.units import Ballot

__all__ = ["Mean", "Merge", "check_merge"]


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


def check_merge(merge: Merge, method: str, tells: frozenset[str], adapts: bool) -> None:
    """Refuse a merge under a method whose reports tell just these numbers, of parts of the model if it adapts."""
    if missing := merge.needs - tells:
        raise InputError(f"merge needs {', '.join(missing)} in every report, which {method} does not tell; use fednova")
    if merge.whole and adapts:
        raise InputError(
            f"merge '{name_of(merge)}' compares whole models, but clients of {method} train different parts of one "
            "here; use merge 'median' or 'trimmed'"
        )


@register("merge", "mean")
@dataclass(frozen=True)
class Mean:
    """Every element averaged over exactly those who trained it; untouched elements keep their value."""

    weights: Annotated[Literal["samples", "equal"], "weight of a client: its training samples, or the same for all"] = (
        "samples"
    )
    by_class: Annotated[bool, "join output rows only from clients that hold the class"] = False

    @property
    def needs(self) -> frozenset[str]:
        """Nothing more."""
        return frozenset()

    @property
    def whole(self) -> bool:
        """Elements are joined one by one."""
        return False

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
        self.ballots: dict[tuple[str, ...], list[Ballot]] = {}  # of those who gave all of their units: counted at once

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
        units, where = self.server.network.units, report.where or {}
        if not masks:
            units.put(self.total, None, values, where, weight, rows=report.classes)
            self.ballots.setdefault(tuple(values), []).append(Ballot(where, report.classes, weight))
            return
        for name in values:
            self.parts[name] = self.parts.get(name, 0.0) + torch.zeros_like(self.total[name])
        units.put(self.total, self.parts, values, where, weight, masks=masks, rows=report.classes)

    def counted(self) -> Tensors:
        """The weight of those who voted on a part of a tensor."""
        parts = dict(self.parts)
        for names, ballots in self.ballots.items():
            votes = self.server.network.units.votes(names, ballots, self.total[names[0]].device)
            parts |= {name: parts.get(name, 0.0) + count for name, count in votes.items()}
        return parts

    def sums(self) -> Sums:
        """The totals and the weights behind them."""
        return {"total": self.total, "whole": self.whole, "parts": self.counted()}

    def combine(self, sums: Sums) -> None:
        """Add such totals."""
        for name, total in sums["total"].items():
            self.total[name] = self.total[name].add_(total) if name in self.total else total.clone()
            self.whole[name] = self.whole.get(name, 0.0) + sums["whole"][name]
        for name, part in sums["parts"].items():
            self.parts[name] = self.parts.get(name, 0.0) + part

    def counts(self) -> Tensors:
        """The weight behind each total: one number, or one an element."""
        device = self.server.network.device
        whole = {name: torch.tensor(each, dtype=torch.float64, device=device) for name, each in self.whole.items()}
        return whole | {name: whole[name] + part for name, part in self.counted().items()}

    def result(self) -> Tensors:
        """The mean where somebody voted, the old value elsewhere."""
        counts = self.counts()
        return {name: self._mean(name, old, counts) for name, old in self.server.tensors.items()}

    def _mean(self, name: str, old: Tensor, counts: Tensors) -> Tensor:
        if name not in self.total:
            return old
        mean = self.total[name] / counts[name]
        if not old.is_floating_point():
            mean = mean.round()
        return torch.where(counts[name] > 0, mean.to(old.dtype), old)
