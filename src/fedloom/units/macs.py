"""Forward multiply-accumulates per sample.

Counted on the forward pass only (torch's counter overcounts the backward pass of a depthwise convolution 22-fold);
a training step costs three times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["macs"]


def _trilinear(one: Tensor, two: Tensor, three: Tensor, *expanded: Any, out_val: Tensor) -> int:
    """A bilinear layer's, two a product of all three; the other multiplication that it makes is much the smaller."""
    shapes = []
    for given, axes in zip((one, two, three), expanded, strict=False):
        shape = list(given.shape)
        for axis in sorted(axes):
            shape.insert(axis, 1)
        shapes.append(shape)
    return 2 * prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _recurrent(x: Tensor, *given: Any, out_val: object) -> int:
    """A recurrent layer's that is one operation: every matrix meets every row of the input once."""
    tensors = [part for each in given for part in (each if isinstance(each, list | tuple) else (each,))]
    matrices = [part for part in tensors if isinstance(part, Tensor) and part.ndim == 2 and part.requires_grad]
    return 2 * x.numel() // x.shape[-1] * sum(matrix.numel() for matrix in matrices)


aten = torch.ops.aten
OWN: dict[Any, Callable[..., int]] = {
    aten._trilinear: _trilinear,
    aten.mkldnn_rnn_layer: _recurrent,
    aten._cudnn_rnn: _recurrent,
}


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what torch's formulas say of every operation.

    `FlopCounterMode` does the same, but its first operation imports torch's compiler, and so does any operation on the
    meta device: a second or two and 100 MB in every process that trains.
    """

    flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket) or OWN.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def macs(model: Callable[[Tensor], object], example: Tensor) -> int:
    """Multiply-accumulates of one sample through a model in evaluation mode, whose parameters need gradients."""
    # Attention's fused paths hide their products: a parameter that needs a gradient keeps a layer out of one, the
    # choice of kernel out of the others.
    counter = _Counter()  # type: ignore[no-untyped-call]
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad(), counter:
        model(example)
    return int(counter.flops) // 2 // example.shape[0]
