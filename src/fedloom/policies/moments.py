"""Statistics of norm layers on request: the client's side of static batch norm."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedloom.client import Client
from fedloom.questions import QUESTIONS
from fedloom.types import Batch, Measure, Model, Report, Task, Tensors, Work

__all__ = ["NormMoments", "statistics"]


@dataclass(frozen=True)
class NormMoments:
    """Sum and sum of squares of what enters every batch-norm layer, per channel, and how many values that were."""

    training: bool = True

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """Keyed by the names of the statistics that they become."""
        sums: Tensors = {}

        def reader(path: str) -> Any:
            def read(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                h = inputs[0].transpose(0, 1).flatten(1).double()
                sums[f"{path}.running_mean"] = h.sum(1)
                sums[f"{path}.running_var"] = h.square().sum(1)
                sums[f"{path}.count"] = torch.tensor(float(h.shape[1]), dtype=torch.float64)

            return read

        module = model.network.bound(tensors, training=True)
        with ExitStack() as hooks:
            for path, layer in module.named_modules():
                if isinstance(layer, _NormBase) and layer.running_mean is not None:
                    hooks.enter_context(layer.register_forward_pre_hook(reader(path)))
            module(batch.x)
        return sums


def statistics(method: Any, client: Client, task: Task) -> Work[Report]:
    """Mean and second moment of what enters every batch-norm layer, over your training data (static batch norm)."""
    read = yield Measure(client.received(), NormMoments(), client.train)
    layers = [name.removesuffix(".count") for name in read if name.endswith(".count")]
    moments = {
        f"{layer}.{moment}": (read[f"{layer}.{moment}"] / read[f"{layer}.count"]).to(client.network.dtype)
        for layer in layers
        for moment in ("running_mean", "running_var")
    }
    return Report(moments, weight=float(client.samples))


QUESTIONS["statistics"] = statistics
