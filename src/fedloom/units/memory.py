"""Memory of a training step, computed and not measured: what autograd saves, counted on a batch of few samples.

A measured peak includes the interpreter, the data and whatever ran before; this is what the step itself needs at this
size: the tensors, their gradients, the optimiser's memory, and the activations that the forward pass leaves for the
backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.seeds import seeded
from fedloom.units.skeleton import skeleton

__all__ = ["saved_bytes"]


def saved_bytes(module: nn.Module, tensors: Mapping[str, Tensor], shape: tuple[int, ...], batch: int) -> int:
    """Bytes that one forward pass in training mode saves for its backward pass, parameters and input not counted.

    Activations grow with the batch and a norm's statistics do not, so two small batches tell what any other saves.
    """
    with seeded(0, next(iter(tensors.values())).device):  # dropout in training mode
        hollow = skeleton(module, tensors).train()
        two, three = (_saved(hollow, tensors, shape, samples) for samples in (2, 3))
    return two + (three - two) * (batch - 2)


def _saved(hollow: nn.Module, tensors: Mapping[str, Tensor], shape: tuple[int, ...], samples: int) -> int:
    """The bytes for so many samples; a tensor that several operations save is counted once."""
    trained = dict(hollow.named_parameters(remove_duplicate=False))
    first = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
    x = first.new_zeros(samples, *shape)
    # Copied where training mode would write.
    own = {
        name: tensor.detach().requires_grad_() if name in trained else tensor.clone()
        for name, tensor in tensors.items()
    }
    given = {tensor.untyped_storage()._cdata for tensor in (*own.values(), x)}
    found: dict[int, Tensor] = {}  # by storage; the tensor is kept so that its address is not used again

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
        functional_call(hollow, own, (x,))
    return sum(tensor.untyped_storage().nbytes() for key, tensor in found.items() if key not in given)
