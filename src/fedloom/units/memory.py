"""Memory of a training step, computed and not measured: what autograd saves, counted on a batch of few samples.

A measured peak includes the interpreter, the data and whatever ran before; this is what the step itself needs at this
size: the tensors, their gradients, the optimiser's memory, and the activations that the forward pass leaves for the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fedloom.seeds import seeded

__all__ = ["saved_bytes"]


def saved_bytes(model: Callable[[Tensor], object], held: Iterable[Tensor], sample: Tensor, batch: int) -> int:
    """Bytes that a batch's forward pass in training mode saves for its backward pass, beside the model's tensors.

    Activations grow with the batch and a norm's statistics do not, so two small batches tell what any other saves.
    """
    held = list(held)
    with seeded(0, sample.device):  # dropout in training mode
        two, three = (_saved(model, held, sample.repeat(count, *(1,) * sample.ndim)) for count in (2, 3))
    return two + (three - two) * (batch - 2)


def _saved(model: Callable[[Tensor], object], held: Iterable[Tensor], x: Tensor) -> int:
    """The bytes for these samples; a tensor that several operations save is counted once."""
    given = {tensor.untyped_storage()._cdata for tensor in (*held, x)}
    found: dict[int, Tensor] = {}  # by storage; the tensor is kept so that its address is not used again

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
        model(x)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in found.items() if key not in given)
