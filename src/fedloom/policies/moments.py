"""Statistics of norm layers on request: the client's side of static batch norm."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedloom.client import Client
from fedloom.network import Network
from fedloom.policies.steady import steady
from fedloom.questions import QUESTIONS
from fedloom.types import Batch, Measure, Model, Report, Task, Tensors, Work

__all__ = ["NormMoments", "completed", "statistics", "told"]


@dataclass(frozen=True)
class NormMoments:
    """Sum and sum of squares of what enters every batch-norm layer, per channel, and how many values that were."""

    training: bool = True
    passes: ClassVar[int] = 1

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """Keyed by the names of the statistics that they become."""
        sums: Tensors = {}

        def reader(path: str) -> Any:
            def read(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                h = inputs[0].transpose(0, 1).flatten(1).double()
                count = h.new_full((), h.shape[1])
                found = {"running_mean": h.sum(1), "running_var": h.square().sum(1), "count": count}
                for name, value in found.items():  # a layer may be used more than once
                    sums[f"{path}.{name}"] = sums.get(f"{path}.{name}", 0) + value

            return read

        with steady(model.network, tensors) as module, ExitStack() as hooks:
            for path, layer in module.named_modules():
                if isinstance(layer, _NormBase) and layer.running_mean is not None:
                    hooks.enter_context(layer.register_forward_pre_hook(reader(path)))
            module(batch.x)
        return sums


def told(network: Network) -> list[str]:
    """The names of all statistics that are told: those of the layers that an image reaches."""
    layers = [path for path in network.called if isinstance(network.module.get_submodule(path), _NormBase)]
    names = [f"{layer}.{what}" for layer in layers for what in ("running_mean", "running_var")]
    return [name for name in names if name in network.buffers]


def completed(client: Client, tensors: Tensors) -> Work[Tensors]:
    """A model with the norm statistics of the client's training data, for a share that drops them in training."""
    return {**tensors, **(yield from _moments(client, tensors))}


def statistics(method: Any, client: Client, task: Task) -> Work[Report]:
    """Mean and variance of what enters every batch-norm layer, over your training data (static batch norm)."""
    return Report((yield from _moments(client, client.received())), weight=float(client.samples))


def _moments(client: Client, tensors: Tensors) -> Work[Tensors]:
    read = yield Measure(tensors, NormMoments(), client.normed(client.train))
    layers = [name.removesuffix(".count") for name in read if name.endswith(".count")]
    moments: Tensors = {}
    for layer in layers:
        mean = read[f"{layer}.running_mean"] / read[f"{layer}.count"]
        variance = (read[f"{layer}.running_var"] / read[f"{layer}.count"] - mean.square()).clamp(min=0)
        moments |= {f"{layer}.running_mean": mean, f"{layer}.running_var": variance}
    return {name: moment.to(client.network.dtype) for name, moment in moments.items()}


QUESTIONS["statistics"] = statistics
