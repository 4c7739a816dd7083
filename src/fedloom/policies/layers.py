"""A model's layers, for policies that treat the top of a model differently from the rest."""

from __future__ import annotations

from torch import nn

from fedloom.network import NORMS, Network

__all__ = ["layers_of"]


def layers_of(network: Network) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters layer by layer, from input to output; a norm belongs to the layer before it."""
    layers: list[tuple[str, ...]] = []
    for path, module in _passed(network):
        own = tuple(f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False))
        if own and layers and isinstance(module, NORMS):
            layers[-1] += own
        elif own:
            layers.append(own)
    return tuple(layers)


def _passed(network: Network) -> list[tuple[str, nn.Module]]:
    """All layers as an image reaches them; one that it does not reach stays behind the one defined before it."""
    numbers, place = {path: number for number, path in enumerate(network.called)}, 0
    places: list[tuple[int, str, nn.Module]] = []
    for path, module in network.module.named_modules():
        place = numbers.get(path, place)
        places.append((place, path, module))
    return [(path, module) for _, path, module in sorted(places, key=lambda each: each[0])]
