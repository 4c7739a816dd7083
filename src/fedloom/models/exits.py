"""A model with an exit after every stage, for methods that cut in depth (DepthFL).

Any model whose network is a sequence of `stages` (after an optional `stem`) can have exits. An exit brings the feature
map to the width of the last stage by depthwise-separable convolutions of stride 2, pools it and classifies; the last
exit only pools and classifies. DepthFL's exits also gate the map with an attention, which is left out here.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.errors import InputError, kind_of

__all__ = ["Exits", "with_exits"]


def _separable(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride=2, padding=1, groups=inputs, bias=False),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def _exit(inputs: int, outputs: int, classes: int) -> nn.Sequential:
    """Doubles the width per step until it is that of the last stage."""
    steps: list[nn.Module] = []
    while inputs < outputs:
        steps.append(_separable(inputs, min(2 * inputs, outputs)))
        inputs = min(2 * inputs, outputs)
    return nn.Sequential(*steps, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Exits(nn.Module):
    """Logits of all exits, stacked, in training; their mean otherwise."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        stages = getattr(model, "stages", None)
        if not isinstance(stages, nn.Sequential) or len(stages) < 2:
            raise InputError(
                f"{kind_of(model)} has no sequence of stages to put exits after; use resnet18, resnet34, cnn4, "
                "or give the model attributes `stages` (nn.Sequential) and, if need be, `stem`"
            )
        self.stem: nn.Module = getattr(model, "stem", nn.Identity())
        self.stages = stages
        widths = self._widths(shape)
        self.exits = nn.ModuleList(_exit(width, widths[-1], classes) for width in widths)

    @torch.no_grad()
    def _widths(self, shape: tuple[int, ...]) -> list[int]:
        widths, mode = [], self.training
        h = self.eval().stem(torch.zeros(1, *shape))
        for stage in self.stages:
            h = stage(h)
            widths.append(h.shape[1])
        self.train(mode)
        return widths

    def forward(self, x: Tensor) -> Tensor:
        h, logits = self.stem(x), []
        for stage, leave in zip(self.stages, self.exits, strict=True):
            h = stage(h)
            logits.append(leave(h))
        stacked = torch.stack(logits)
        return stacked if self.training else stacked.mean(0)

    def names(self, depth: int) -> tuple[str, ...]:
        """Names of the tensors of the first stages, with their exits."""
        return tuple(self.without(depth).state_dict())

    def without(self, names: frozenset[str] | int) -> Exits:
        """The model with fewer stages: so many, or those that have none of these tensors."""
        if not isinstance(names, int):
            cut = {int(name.split(".")[1]) for name in names if name.startswith("stages.")}
            names = min(cut, default=len(self.stages))
        shallow = copy(self)
        # A module's children live in a dict of its own, which a copy would share.
        shallow._modules = dict(self._modules)
        shallow._modules["stages"], shallow._modules["exits"] = self.stages[:names], self.exits[:names]
        return shallow


def with_exits(build: Callable[..., nn.Module], shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """A builder of the same model with exits."""

    def made() -> nn.Module:
        model: Any = build()
        return Exits(model, shape, classes)

    return made
