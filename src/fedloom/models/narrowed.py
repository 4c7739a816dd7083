"""Any model with fewer units: what a search for a structure found, as a model of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.models.resolve import build
from fedloom.registry import register
from fedloom.units import find_units, skeleton

__all__ = ["narrow", "narrowed", "remade"]

Share = Annotated[float, Gt(0), Le(1)]


@register("model", "narrowed")
def narrowed(
    channels: int,
    classes: int,
    size: int,
    of: Annotated[str, "the model whose units are fewer, by name"],
    rates: Annotated[tuple[Share, ...], "share of units kept, a number a group in the model's order, or one for all"],
) -> nn.Module:
    """Another model with a share of its units in each group, initialised at that width."""
    return narrow(build(of, channels=channels, classes=classes, size=size), (channels, size, size), rates)


def narrow(module: nn.Module, shape: tuple[int, ...], rates: Sequence[float]) -> nn.Module:
    """The model with the first units of every group, to these shares; layers are initialised at their new width."""
    units = find_units(module, torch.zeros(2, *shape))
    groups = list(units.sizes)
    if len(rates) not in (1, len(groups)):
        raise InputError(
            f"model.rates needs one share, or one for each of {', '.join(groups)}; got {len(rates)} shares"
        )
    kept = units.kept(dict(zip(groups, rates if len(rates) > 1 else list(rates) * len(groups), strict=True)))
    return remade(module, units.take(module.state_dict(), {name: torch.arange(size) for name, size in kept.items()}))


def remade(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model at the size of these tensors, its layers initialised at that width."""
    small = skeleton(module, tensors)
    for path, part in small.named_modules():
        for name in part._parameters.keys() | part._buffers.keys():
            key = f"{path}.{name}" if path else name
            if key in tensors:
                fitted = tensors[key].detach().clone()
                given = part._parameters if name in part._parameters else part._buffers
                given[name] = nn.Parameter(fitted) if name in part._parameters else fitted
        if hasattr(part, "reset_parameters"):
            # Made for the width it has: first weights of the wide model would be too small here.
            part.reset_parameters()
    return small.train()
