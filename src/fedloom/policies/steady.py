"""The model as its units and norms are looked at: norm layers go by the batch, all else is as in evaluation.

In plain training mode one mask of dropout, the same for every client and round, would decide which units matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fedloom.network import NORMS, Network
from fedloom.types import Tensors

__all__ = ["steady"]


@contextmanager
def steady(network: Network, tensors: Tensors) -> Iterator[nn.Module]:
    """The module that computes with these tensors in training, with only its norm layers in training mode meanwhile."""
    module = network.bound(tensors, training=True)
    modes = {layer: layer.training for layer in module.modules()}
    for layer in modes:
        layer.training = isinstance(layer, NORMS)
    try:
        yield module
    finally:
        for layer, mode in modes.items():
            layer.training = mode
