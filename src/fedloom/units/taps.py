"""What passes the layers of a model on an image's way through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedloom.types import Points

__all__ = ["called", "tapped"]


@contextmanager
def tapped(module: nn.Module, points: Points) -> Iterator[dict[tuple[str, bool], Tensor]]:
    """What passes these points in the passes made meanwhile, as it is at that moment; of several passes, the last.

    >>> with tapped(torch.nn.Sequential(torch.nn.ReLU()), (("0", True),)) as seen:
    ...     seen
    {}
    """
    seen: dict[tuple[str, bool], Tensor] = {}

    def tap(point: tuple[str, bool]) -> RemovableHandle:
        layer, after = module.get_submodule(point[0]), point[1]
        # Copied: a non-linearity that works in place writes into what it is given.
        if after:
            return layer.register_forward_hook(lambda _layer, _inputs, output: seen.update({point: output.clone()}))
        return layer.register_forward_pre_hook(lambda _layer, inputs: seen.update({point: inputs[0].clone()}))

    taps = [tap(point) for point in points]
    try:
        yield seen
    finally:
        for each in taps:
            each.remove()


def called(module: nn.Module, example: Tensor) -> tuple[str, ...]:
    """Paths of the layers, in the order in which an example first reaches them; a layer comes before its parts.

    >>> called(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(1, 2))
    ('', '0', '1', '2')
    """
    order: dict[str, None] = {}

    def note(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _layer, _inputs: order.update({path: None})

    for path, layer in module.eval().named_modules():
        layer.register_forward_pre_hook(note(path))
    with torch.no_grad():
        module(example)
    return tuple(order)
