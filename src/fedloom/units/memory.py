"""Memory of a training step, computed and not measured: what autograd saves, counted on the meta device.

A measured peak includes the interpreter, the data and whatever ran before; this is what the step itself needs at this
size, the same on every machine: the tensors, their gradients, the optimiser's memory, and the activations that the
forward pass leaves for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.units.skeleton import skeleton

__all__ = ["saved_bytes"]


def saved_bytes(module: nn.Module, tensors: Mapping[str, Tensor], example: Tensor) -> int:
    """Bytes that one forward pass in training mode saves for its backward pass, parameters and input not counted.

    A tensor that several operations save is counted once.
    """
    hollow = skeleton(module, tensors).train()
    trained = dict(hollow.named_parameters(remove_duplicate=False))
    blank = {
        name: torch.empty_like(tensor, device="meta", requires_grad=name in trained)
        for name, tensor in {**dict(hollow.named_buffers()), **tensors}.items()
    }
    x = example.to("meta")
    given = {tensor.untyped_storage()._cdata for tensor in (*blank.values(), x)}
    found: dict[int, Tensor] = {}  # by storage; the tensor is kept so that its address is not used again

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
        functional_call(hollow, blank, (x,))
    return sum(tensor.untyped_storage().nbytes() for key, tensor in found.items() if key not in given)
