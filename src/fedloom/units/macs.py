"""Forward multiply-accumulates per sample.

Counted on the forward pass only (torch's counter overcounts the backward pass of a depthwise convolution 22-fold);
a training step costs three times as much.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from fedloom.units.skeleton import skeleton

__all__ = ["macs"]


def macs(module: nn.Module, tensors: Mapping[str, Tensor], example: Tensor) -> int:
    """Multiply-accumulates of one sample through the model that `tensors` make of the module.

    Nothing is computed: shapes travel on the meta device.
    """
    hollow = skeleton(module, tensors).eval()
    trained = dict(hollow.named_parameters(remove_duplicate=False))
    blank = {
        # A parameter that needs a gradient keeps attention out of its fused path, which the counter cannot see into.
        name: torch.empty_like(tensor, device="meta", requires_grad=name in trained)
        for name, tensor in {**dict(hollow.named_buffers()), **tensors}.items()
    }
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        functional_call(hollow, blank, (example.to("meta"),))
    return int(counter.get_total_flops()) // 2 // example.shape[0]
