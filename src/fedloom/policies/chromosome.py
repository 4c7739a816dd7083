"""What does a gene say? A chromosome is one keep rate a gene, in (0, 1], for any model.

One structured gene a group of units (the share of its channels or neurons that is kept) and one unstructured gene a
linear layer (the share of its weights that is kept). Groups come from the unit table: a depthwise-separable block has
one, layers that meet at an addition share theirs, and the output layer has none, since its units are the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn

from fedloom.encoding import Sparse, Value
from fedloom.network import Network
from fedloom.types import Tensors

__all__ = ["Genes", "largest"]


@dataclass(frozen=True)
class Genes:
    """Which gene stands where: groups of units first, then weights of linear layers, in the model's order."""

    groups: tuple[str, ...]
    matrices: tuple[str, ...]

    @classmethod
    def of(cls, network: Network) -> Genes:
        """The genes of a model."""
        layers = network.module.named_modules()
        linear = [f"{path}.weight" if path else "weight" for path, layer in layers if isinstance(layer, nn.Linear)]
        return cls(tuple(network.units.sizes), tuple(linear))

    def __len__(self) -> int:
        return len(self.groups) + len(self.matrices)

    @property
    def names(self) -> tuple[str, ...]:
        """One name a gene, as reports and pictures use it."""
        return tuple(f"units of {name}" for name in self.groups) + tuple(f"weights of {name}" for name in self.matrices)

    def units(self, chromosome: Sequence[float]) -> dict[str, float]:
        """The structured genes: group -> share of its units."""
        return dict(zip(self.groups, chromosome, strict=False))

    def prune(self, tensors: Tensors, chromosome: Sequence[float]) -> dict[str, Value]:
        """The model with only the largest weights of its linear layers, to the shares that the chromosome says.

        What is dropped does not travel and does not vote. A layer whose gene is 1 stays dense.
        """
        shares = dict(zip(self.matrices, chromosome[len(self.groups) :], strict=True))
        return {
            name: Sparse.at(tensor, largest(tensor, shares[name]), partial=True)
            if shares.get(name, 1.0) < 1
            else tensor
            for name, tensor in tensors.items()
        }


def largest(tensor: Tensor, share: float) -> Tensor:
    """Where the elements of largest magnitude are, ascending: ceil(share n) of them, exactly.

    >>> largest(torch.tensor([[3.0, -4.0], [1.0, 0.0]]), 0.5)
    tensor([0, 1])
    """
    flat = tensor.detach().abs().flatten()
    kept = max(1, ceil(share * flat.numel() - 1e-9))
    return torch.topk(flat, kept, sorted=False).indices.sort().values
