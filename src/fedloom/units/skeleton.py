"""The module a sub-model runs in: a copy without weights whose attributes fit the sub-model's shapes.

`functional_call` alone runs most layers on smaller tensors, but a depthwise convolution reads `groups` and a layer
norm `normalized_shape` from the module.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

__all__ = ["skeleton"]


def skeleton(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module to be run with `torch.func.functional_call(skeleton, tensors, (x,))`.

    Its own tensors are on the meta device: it costs no memory, and a tensor that is forgotten in the call is an error
    instead of a silent default. Only buffers that are not among `tensors` (not part of a state dict) keep their values.
    It depends on the shapes of `tensors` only, so one serves all models of equal shapes.
    """
    device = next((tensor.device for tensor in tensors.values()), None)
    memo: dict[int, object] = {}
    for weight in module.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    for name, buffer in module.named_buffers():
        given = name in tensors
        memo[id(buffer)] = torch.empty_like(buffer, device="meta") if given else buffer.to(device, copy=True)
    # deepcopy takes what its memo already holds, so the weights are never copied.
    hollow = copy.deepcopy(module, memo)
    for path, layer in hollow.named_modules():
        prefix = f"{path}." if path else ""
        own = [name for name, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
        shapes = {name: tensors[prefix + name].shape for name in own if prefix + name in tensors}
        if shapes:
            _fit(layer, shapes)
    return hollow


def _fit(layer: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Set the attributes that a layer keeps beside its tensors."""
    shape = shapes.get("weight", shapes.get("running_mean", torch.Size()))
    match layer:
        case _ConvNd() if shape:
            if layer.groups == layer.out_channels:
                layer.groups = shape[0] if layer.groups > 1 else 1
            ends = (shape[0], shape[1] * layer.groups)
            layer.in_channels, layer.out_channels = ends if layer.transposed else ends[::-1]
        case nn.Linear() if shape:
            layer.out_features, layer.in_features = shape
        case nn.Embedding() if shape:
            layer.embedding_dim = shape[1]
        case nn.LayerNorm() if shape:
            layer.normalized_shape = tuple(shape)
        case nn.GroupNorm() if shape:
            # Blocks go as wholes; a single one gets smaller, as a layer norm does.
            layer.num_groups = max(1, layer.num_groups * shape[0] // layer.num_channels)
            layer.num_channels = shape[0]
        case _NormBase() if shape:
            layer.num_features = shape[0]
        case nn.PReLU() if shape:
            layer.num_parameters = shape[0]
