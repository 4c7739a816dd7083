"""Which units of the model? A cut names, per group of units, those that a client of some capacity trains.

Every cut keeps ceil(r m) of a group's m units (at least 1, at most m - 1 when r < 1), one choice a group: layers that
meet at an addition share their choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

import torch
from annotated_types import Ge
from torch import Tensor

from fedloom.client import Client
from fedloom.copies import on_host
from fedloom.errors import InputError, oxford
from fedloom.network import Network
from fedloom.registry import find, register
from fedloom.types import Measure, Reading, Samples, Tensors, Where, Work

__all__ = [
    "Capacity",
    "Cut",
    "Prefix",
    "Random",
    "Rolling",
    "Scored",
    "Scores",
    "Whole",
    "check_units",
    "left",
    "narrow",
    "scored",
]

Scores = Mapping[str, Tensor]
Capacity = float | Mapping[str, float]  # the share of units to keep: of every group, or group by group


class Cut(Protocol):
    """A pure rule. One that needs scores of the client's own (`reading`) is applied at the client."""

    @property
    def reading(self) -> Reading | None:
        """What the client measures before it cuts; None: the server cuts."""

    @property
    def samples(self) -> int:
        """How many training samples it measures on; 0: all."""

    def __call__(
        self, network: Network, capacity: Capacity, round: int, generator: torch.Generator, scores: Scores | None = None
    ) -> Where | None:
        """Kept units per group, ascending; None: the whole model."""


def check_units(network: Network, method: str) -> None:
    """Refuse a model that has nothing to cut: a weak device would train the whole of it."""
    if not network.units.sizes:
        whole = [f"{group} ({reason})" for group, reason in network.units.whole.items()]
        why = f"it keeps whole {oxford(whole, 'and')}" if whole else "it has no hidden layers"
        raise InputError(f"{method} found no units to cut in the model: {why}")


def left(network: Network, capacity: float) -> float:
    """The share of a model's parameters that a device of this capacity trains."""
    part, full = (network.units.shapes(network.units.kept(rate)) for rate in (capacity, 1.0))
    count = [sum(shapes[name].numel() for name in network.units.parameters) for shapes in (part, full)]
    return count[0] / count[1]


class ByServer:
    """What cuts that need no scores share: a choice for each group of m units of which k are kept."""

    samples: ClassVar[int] = 0

    @property
    def reading(self) -> Reading | None:
        """No scores."""
        return None

    def __call__(
        self, network: Network, capacity: Capacity, round: int, generator: torch.Generator, scores: Scores | None = None
    ) -> Where | None:
        """One choice a group, in the groups' order."""
        sizes = network.units.sizes
        return {
            group: self.choose(sizes[group], kept, round, generator)
            for group, kept in network.units.kept(capacity).items()
        }

    def choose(self, m: int, k: int, round: int, generator: torch.Generator) -> Tensor:
        """k of m units, ascending."""
        raise NotImplementedError(f"{type(self).__name__} must choose units")


@register("cut", "whole")
@dataclass(frozen=True)
class Whole(ByServer):
    """Everybody trains the whole model."""

    def __call__(
        self, network: Network, capacity: Capacity, round: int, generator: torch.Generator, scores: Scores | None = None
    ) -> Where | None:
        """No cut."""
        return None


@register("cut", "prefix", paper="Diao et al., HeteroFL, ICLR 2021")
@dataclass(frozen=True)
class Prefix(ByServer):
    """The first units of every group, always the same ones."""

    def choose(self, m: int, k: int, round: int, generator: torch.Generator) -> Tensor:
        """0 .. k - 1."""
        return torch.arange(k)


@register("cut", "random", paper="Caldas et al., Federated Dropout, arXiv:1812.07210")
@dataclass(frozen=True)
class Random(ByServer):
    """A fresh random choice for every client and round."""

    def choose(self, m: int, k: int, round: int, generator: torch.Generator) -> Tensor:
        """Uniform without replacement."""
        return torch.randperm(m, generator=generator)[:k].sort().values


@register("cut", "rolling", paper="Alam et al., FedRolex, NeurIPS 2022")
@dataclass(frozen=True)
class Rolling(ByServer):
    """A window that moves on by one unit a round and wraps around; the same for all clients of a width."""

    def choose(self, m: int, k: int, round: int, generator: torch.Generator) -> Tensor:
        """t mod m, and the k - 1 after it."""
        return ((round + torch.arange(k)) % m).sort().values


@register("cut", "scored", paper="FedDSE; Gumbel top-k: Kool et al., ICML 2019")
@dataclass(frozen=True)
class Scored:
    """The client scores its units and keeps the best, or draws them with probability softmax(score / temperature)."""

    score: Annotated[str, "activation, scale, gradient, magnitude, or an import path of a reading"] = "activation"
    temperature: Annotated[float, Ge(0), "0: the best units; large: any"] = 0.0
    samples: Annotated[int, Ge(0), "training samples that the client scores on; 0: all"] = 0

    @property
    def reading(self) -> Reading | None:
        """The score."""
        reading: Reading = find("score", self.score)()
        return reading

    def __call__(
        self, network: Network, capacity: Capacity, round: int, generator: torch.Generator, scores: Scores | None = None
    ) -> Where | None:
        """Draws without replacement in sequence are exactly the largest of score / T + Gumbel noise."""
        kept = network.units.kept(capacity)
        return {group: self.best(score, kept[group], generator) for group, score in _rounded(scores or {}, network)}

    def best(self, score: Tensor, k: int, generator: torch.Generator) -> Tensor:
        """k units by score; ties go to the lower number."""
        score = score.double().cpu()
        if self.temperature:
            uniform = torch.rand(score.shape, generator=generator, dtype=torch.float64)
            score = score / self.temperature - (-uniform.clamp(min=1e-300).log()).log()
        return score.argsort(descending=True, stable=True)[:k].sort().values


def _rounded(scores: Scores, network: Network) -> Iterator[tuple[str, Tensor]]:
    """Scores in which what is zero but for rounding is zero, so that no choice hangs on the order of a sum."""
    largest = max((float(score.abs().max()) for score in scores.values()), default=0.0)
    least = torch.finfo(network.dtype).eps ** 0.75 * largest
    for group, score in scores.items():
        yield group, torch.where(score.abs() < least, torch.zeros_like(score), score)


def scored(reading: Reading, tensors: Tensors, seen: Samples) -> Work[Scores]:
    """Mean scores of a model's units over these samples, on the host."""
    (sums,) = on_host([(yield Measure(tensors, reading, seen))])
    return {group: score / len(seen) for group, score in sums.items()}


def narrow(cut: Cut, client: Client, tensors: Tensors) -> Work[tuple[Tensors, Where | None]]:
    """The client's side of a cut: as the task says, or by the client's own scores of the whole model."""
    if cut.reading is None:
        return tensors, client.task.where
    if client.capacity == 1:  # nothing is cut, whatever the scores
        return tensors, None
    scores = yield from scored(cut.reading, tensors, client.normed(client.some(cut.samples, "score")))
    where = cut(client.network, client.capacity, client.task.round, client.generator("cut"), scores)
    return (client.network.units.take(tensors, where) if where else tensors), where
