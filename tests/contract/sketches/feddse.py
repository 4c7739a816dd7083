"""Sketch of FedDSE: the client cuts by its own activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from fedloom.methods.fedavg import FedAvg
from fedloom.network import Network
from fedloom.policies.cut import Cut, Scores
from fedloom.registry import register
from fedloom.types import Batch, Model, Reading, Tensors, Where
from fedloom.units import activations


@dataclass(frozen=True)
class Activations:
    training: bool = True

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        return activations(model.network.units, model.network.module, tensors, batch.x)


@dataclass(frozen=True)
class ByActivation:
    temperature: Annotated[float, "0: the most active units; large: any"] = 0.0
    reading: ClassVar[Reading | None] = Activations()

    def __call__(
        self, network: Network, capacity: float, round: int, generator: torch.Generator, scores: Scores | None = None
    ) -> Where | None:
        kept, noisy = network.units.kept(capacity), {}
        for group, score in (scores or {}).items():
            noise = -torch.rand(score.shape, generator=generator, dtype=score.dtype).log().neg().log()
            noisy[group] = score + self.temperature * noise
        return {group: score.topk(kept[group]).indices.sort().values for group, score in noisy.items()}


@register("method", "sketch_feddse")
@dataclass(frozen=True)
class SketchFedDSE(FedAvg):
    """FedAvg in which a client trains the units that its data excite most."""

    cut: Cut = ByActivation()
