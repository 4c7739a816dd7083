"""What a Measure can read of a model: accuracy and loss here; other readings live with the policies that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from fedloom.types import Batch, Model, Tensors

__all__ = ["Accuracy"]


@dataclass(frozen=True)
class Accuracy:
    """Right answers and samples per class, and the summed cross-entropy."""

    training: bool = False
    passes: ClassVar[int] = 1

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """Counts of one batch, in float64 so that sums do not depend on the batch size."""
        logits = model(tensors, batch.x)
        # In training mode a model may tell what each of its exits says; together they say the mean, as in evaluation.
        logits = logits.mean(0) if logits.ndim > 2 else logits
        right = (logits.argmax(1) == batch.y).double()
        none = right.new_zeros(logits.shape[1])
        return {
            "right": none.index_add(0, batch.y, right),
            "samples": none.index_add(0, batch.y, torch.ones_like(right)),
            "loss": F.cross_entropy(logits, batch.y, reduction="none").double().sum(),
        }
