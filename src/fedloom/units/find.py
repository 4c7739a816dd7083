"""Find the units of a model, and prove them.

A dependency graph can be wrong: fused attention, a hard-coded view, a norm over blocks of channels. So no group is
believed. A random part of every group is cut, and the sub-model must compute what the full model computes when those
units are zero wherever they are read, on random parameters (an untrained norm or a zero-initialised branch would hide
errors). If all groups pass together, all are right; if not, they are added one by one, and one that breaks the
equality is kept whole. A layer norm over a group, or a group norm of one block, normalises over the kept units; the
reference does the same.
That the rows of the last layers are the classes is proved too: turned round, they must turn the logits round.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from fedloom.errors import InputError
from fedloom.units.graph import leaves, read_graph
from fedloom.units.skeleton import skeleton
from fedloom.units.table import Group, Units, Where

__all__ = ["find_units"]

log = logging.getLogger("fedloom.units")

# Equal computations in float32 differ by some 1e-6 of the largest output; a wrong group differs by some 1e-1.
TOLERANCE = 1e-4
SAMPLES = 2


def find_units(module: nn.Module, example: Tensor) -> Units:
    """The unit table of a model; `example` is a batch of inputs of the kind the model is made for."""
    generator = torch.Generator().manual_seed(0)
    model = _randomised(module, generator)
    x = example[:SAMPLES].cpu()
    if x.is_floating_point():
        x = torch.randn(x.shape, generator=generator)
    try:
        graph = read_graph(model, x)
    except Exception as error:
        raise InputError(
            f"model {type(module).__name__} cannot be traced on an input of shape {list(example.shape)}, "
            f"so it cannot be cut into sub-models: {type(error).__name__}: {_line(error)}"
        ) from error
    shapes = {name: tensor.shape for name, tensor in _tensors(module).items()}
    trained = [name for name, _ in module.named_parameters()]

    def units(groups: Sequence[Group]) -> Units:
        return Units(groups, shapes, trained, output, whole)

    whole = dict(graph.whole)
    output = [name for names in graph.output.values() for name in names]
    if not _relabels(model, output, x):
        output = []
        whole |= dict.fromkeys(graph.output, "the output is made of them by what is not a layer")
    proved = list(graph.groups)
    if _fault(model, units(proved), x, generator):
        proved = []
        for group in graph.groups:
            fault = _fault(model, units([*proved, group]), x, generator)
            if fault:
                whole[group.name] = fault
            else:
                proved.append(group)
    for name, reason in whole.items():
        log.warning("%s: units of '%s' are kept whole: %s", type(module).__name__, name, reason)
    return units(proved)


def _randomised(module: nn.Module, generator: torch.Generator) -> nn.Module:
    model = copy.deepcopy(module).cpu().float().eval()
    for tensor in model.parameters():
        # The tracer follows gradients, so a layer the user froze would be invisible to it.
        tensor.requires_grad_()
        with torch.no_grad():
            if tensor.ndim > 1:
                tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
            else:
                tensor.uniform_(0.5, 1.5, generator=generator)
    for layer in model.modules():
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.uniform_(-0.5, 0.5, generator=generator)
            layer.running_var.uniform_(0.5, 1.5, generator=generator)
    return model


def _fault(model: nn.Module, units: Units, x: Tensor, generator: torch.Generator) -> str:
    """Why a random sub-model does not compute what it should; empty if it does."""
    where = {}
    for number, (name, size) in enumerate(units.sizes.items()):
        # Unequal counts: equal halves of a hard-coded split would pass by luck.
        kept = max(1, min(size // 2 + number % 3 - 1, size - 1))
        where[name] = torch.randperm(size, generator=generator)[:kept].sort().values
    tensors = units.take(_tensors(model), where)
    with torch.no_grad():
        try:
            parts = leaves(functional_call(skeleton(model, tensors), tensors, (x,)))
        except Exception as error:  # noqa: BLE001 - whatever the user's forward raises, the sub-model does not run
            return f"a sub-model does not run ({_line(error)})"
        fulls = _reference(model, units, where, x)
    for part, full in zip(parts, fulls, strict=True):
        if part.shape != full.shape:
            return f"it changes the shape of the output from {list(full.shape)} to {list(part.shape)}"
        if not (difference := _apart(part, full)) < TOLERANCE:
            return f"a sub-model does not compute what the model does without those units (off by {difference:.1e})"
    return ""


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))


def _relabels(model: nn.Module, output: Sequence[str], x: Tensor) -> bool:
    """Whether another order of the rows of these tensors is another order of the classes, and nothing else.

    It is not where something mixes what the last layers give, such as a weight that the model itself owns.
    """
    tensors = _tensors(model)
    with torch.no_grad():
        before = leaves(model(x))
        after = leaves(functional_call(model, {name: tensors[name].roll(1, 0) for name in output}, (x,)))
    ways = [(old, old.roll(1, -1) if old.ndim else old) for old in before]
    return all(min(_apart(new, old) for old in way) < TOLERANCE for new, way in zip(after, ways, strict=True))


def _reference(model: nn.Module, units: Units, where: Where, x: Tensor) -> list[Tensor]:
    """Outputs of the full model with the units that are cut set to zero wherever they are read."""
    keep = units.keep(where)
    with ExitStack() as hooks:
        for point in units.points:
            layer = model.get_submodule(point.owner)
            hooks.enter_context(layer.register_forward_pre_hook(_mask(keep[point.unit], point.dim)))
        for path, layer in model.named_modules():
            axes = units.axes.get(f"{path}.weight")
            if axes and (isinstance(layer, nn.LayerNorm) or getattr(layer, "num_groups", 0) == 1):
                hooks.enter_context(layer.register_forward_hook(_normalise(keep[axes[0].unit])))
        return leaves(model(x))


def _mask(keep: Tensor, dim: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(_layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] * keep.view(-1, *[1] * (-1 - dim)), *inputs[1:])

    return hook


def _normalise(keep: Tensor) -> Callable[[Any, tuple[Any, ...], Tensor], Tensor]:
    """A layer norm, or a group norm of one block, over the kept units alone."""
    kept = keep.nonzero().flatten()

    def hook(layer: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        axis = -1 if isinstance(layer, nn.LayerNorm) else 1
        weight, bias = (None if tensor is None else tensor[kept] for tensor in (layer.weight, layer.bias))
        seen = inputs[0].index_select(axis, kept)
        normed = (
            F.layer_norm(seen, [len(kept)], weight, bias, layer.eps)
            if isinstance(layer, nn.LayerNorm)
            else F.group_norm(seen, 1, weight, bias, layer.eps)
        )
        return torch.zeros_like(output).index_copy(axis, kept, normed)

    return hook


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """What a model exchanges: parameters and saved buffers, a shared tensor under its first name only."""
    saved = module.state_dict()
    return dict(module.named_parameters()) | {name: b for name, b in module.named_buffers() if name in saved}


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no message")
