"""What a Measure can read of a model: accuracy and loss, and statistics of norm layers. Unit scores are a policy."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedloom.types import Batch, Model, Tensors

__all__ = ["Accuracy", "NormMoments", "Predictions"]


@dataclass(frozen=True)
class Accuracy:
    """Right answers and samples per class, and the summed cross-entropy."""

    training: bool = False

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """Counts of one batch, in float64 so that sums do not depend on the batch size."""
        logits = model(tensors, batch.x)
        right = (logits.argmax(1) == batch.y).double()
        classes = logits.shape[1]
        return {
            "right": torch.zeros(classes, dtype=torch.float64, device=right.device).index_add_(0, batch.y, right),
            "samples": torch.bincount(batch.y, minlength=classes).double(),
            "loss": F.cross_entropy(logits, batch.y, reduction="none").double().sum(),
        }


@dataclass(frozen=True)
class Predictions:
    """The most likely class of every sample; for one batch only, since batches are added up."""

    training: bool = True

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """Under batch statistics, over all classes."""
        return {"predicted": model(tensors, batch.x).argmax(1)}


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
