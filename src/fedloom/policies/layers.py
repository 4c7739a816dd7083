"""A model's layers, for policies that treat the top of a model differently from the rest."""

from __future__ import annotations

from fedloom.network import NORMS, Network

__all__ = ["layers_of"]


def layers_of(network: Network) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters layer by layer, from input to output; a norm belongs to the layer before it."""
    layers: list[tuple[str, ...]] = []
    for path, module in network.module.named_modules():
        own = tuple(f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False))
        if own and layers and isinstance(module, NORMS):
            layers[-1] += own
        elif own:
            layers.append(own)
    return tuple(layers)
