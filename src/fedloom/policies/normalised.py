"""FedNova's way of joining reports: changes divided by what their steps amount to (Wang et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Lt

from fedloom.encoding import dense
from fedloom.fleet.blocks import Joined, Sums
from fedloom.registry import register
from fedloom.types import Report, Server, Tensors

__all__ = ["Normalised"]


@register("merge", "normalised", paper="Wang et al., FedNova, NeurIPS 2020")
@dataclass(frozen=True)
class Normalised:
    """Mean of changes per normalised step, times the effective number of steps."""

    effective: Annotated[Literal["normaliser", "steps"], "tau_eff: mean normaliser, or mean number of steps"] = (
        "normaliser"
    )
    momentum: Annotated[float, Ge(0), Lt(1), "momentum of the server, gamma"] = 0.0

    needs: ClassVar[frozenset[str]] = frozenset({"normaliser"})
    by_class: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    def begin(self, server: Server) -> Joined:
        """Nothing added yet."""
        return Changes(server, self)


class Changes:
    """Sums of weighted changes: divided by the normaliser for trained tensors, plain for buffers."""

    def __init__(self, server: Server, rule: Normalised) -> None:
        self.server, self.rule = server, rule
        self.weight = self.effective = 0.0
        self.total: Tensors = {}

    def add(self, report: Report) -> None:
        """Add a report's change since the round began."""
        size = report.numbers["normaliser"]
        self.weight += report.weight
        self.effective += report.weight * (size if self.rule.effective == "normaliser" else report.numbers["steps"])
        for name, value in report.tensors.items():
            old = self.server.tensors[name]
            per_step = 1.0 if name in self.server.network.buffers else 1 / size if size else 0.0
            if name not in self.total:
                self.total[name] = torch.zeros_like(old, dtype=torch.float64)
            self.total[name].add_(dense(value).double() - old.double(), alpha=report.weight * per_step)

    def sums(self) -> Sums:
        """The total change and the weights behind it."""
        return {"weight": self.weight, "effective": self.effective, "total": self.total}

    def combine(self, sums: Sums) -> None:
        """Add such totals."""
        self.weight, self.effective = self.weight + sums["weight"], self.effective + sums["effective"]
        for name, total in sums["total"].items():
            self.total[name] = self.total[name].add_(total) if name in self.total else total.clone()

    def result(self) -> Tensors:
        """The server moved by tau_eff times the mean normalised change; its momentum is kept in its memory."""
        new, speed = dict(self.server.tensors), {}
        before: Tensors = self.server.memory.get("merge", {})
        for name, total in self.total.items():
            old, move = self.server.tensors[name], total / self.weight
            if name not in self.server.network.buffers:
                move = move * (self.effective / self.weight)
                if self.rule.momentum:
                    speed[name] = move = move + self.rule.momentum * before.get(name, torch.zeros_like(move))
            moved = old.double() + move
            new[name] = (moved if old.is_floating_point() else moved.round()).to(old.dtype)
        if speed:
            self.server.memory["merge"] = speed
        return new
