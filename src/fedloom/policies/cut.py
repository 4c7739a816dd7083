"""Which units of the model? A cut names, per group of units, those that a client of some capacity trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedloom.client import Client
from fedloom.network import Network
from fedloom.registry import register
from fedloom.types import Measure, Reading, Tensors, Where, Work

__all__ = ["Cut", "Prefix", "Scores", "Whole", "narrow"]

Scores = Mapping[str, Tensor]


class Cut(Protocol):
    """A pure rule. With a `reading`, the client measures scores of its units and the cut happens there."""

    reading: ClassVar[Reading | None]

    def __call__(
        self, network: Network, capacity: float, round: int, generator: torch.Generator, scores: Scores | None = None
    ) -> Where | None:
        """Kept units per group, ascending; None: the whole model."""


@register("cut", "whole")
@dataclass(frozen=True)
class Whole:
    """Everybody trains the whole model."""

    reading: ClassVar[Reading | None] = None

    def __call__(
        self, network: Network, capacity: float, round: int, generator: torch.Generator, scores: Scores | None = None
    ) -> Where | None:
        """No cut."""
        return None


@register("cut", "prefix", paper="Diao et al., HeteroFL, ICLR 2021")
@dataclass(frozen=True)
class Prefix:
    """The first units of every group, always the same ones."""

    reading: ClassVar[Reading | None] = None

    def __call__(
        self, network: Network, capacity: float, round: int, generator: torch.Generator, scores: Scores | None = None
    ) -> Where | None:
        """0 .. k - 1 in every group."""
        return {group: torch.arange(kept) for group, kept in network.units.kept(capacity).items()}


def narrow(cut: Cut, client: Client, tensors: Tensors) -> Work[tuple[Tensors, Where | None]]:
    """The client's side of a cut: as the task says, or by the client's own scores of the whole model."""
    if cut.reading is None:
        return tensors, client.task.where
    scores = yield Measure(tensors, cut.reading, client.train)
    where = cut(client.network, client.capacity, client.task.round, client.generator("cut"), scores)
    return (client.network.units.take(tensors, where) if where else tensors), where
