"""Candidate groups of a model, read from torch-pruning's dependency graph.

Every item of a torch-pruning group says which positions of one layer hang on which units of the layer the group was
started from. Units that occur on different axes (the two halves of a concatenation that is added to another layer's
output) are separated here, so every unit of a group has the same extent everywhere and the size of a sub-model
depends on how many units are kept, not on which. Channels that a group norm normalises together are one unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_pruning
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch_pruning.ops import OPTYPE

from fedloom.units.table import Group, Span

__all__ = ["Graph", "leaves", "read_graph"]

PRODUCERS = (_ConvNd, nn.Linear, nn.Embedding)


@dataclass(frozen=True)
class Graph:
    """Groups that may be cut once proved; groups that may not, with the reason; the last layers' tensors."""

    groups: tuple[Group, ...]
    whole: dict[str, str]
    output: dict[str, tuple[str, ...]]  # last layer -> the tensors on whose axis 0 its units lie


class _WholeError(Exception):
    """A group has to stay whole; the text says why."""


def read_graph(model: nn.Module, example: Tensor) -> Graph:
    """Find the candidate groups, in the order in which the model forms them."""
    tracer: Any = torch_pruning.DependencyGraph()
    called = _trace(tracer, model, example)
    paths = {layer: path for path, layer in model.named_modules()}
    tied = _tied(model)
    groups: dict[str, Group] = {}
    whole: dict[str, str] = {}
    output: dict[str, tuple[str, ...]] = {}
    seen: set[nn.Module] = set()
    for root in called:
        if root in seen or root not in tracer.module2node:
            continue
        producers = [paths[root]]
        try:
            items = _items(tracer, root)
            made = {item.dep.target.module for item in items if tracer.is_out_channel_pruning_fn(item.dep.handler)}
            seen |= made
            producers = [paths[layer] for layer in called if layer in made]
            spans, points = _spans(tracer, items, paths)
            if any(item.dep.target.type == OPTYPE.OUTPUT for item in items):
                if points:
                    raise _WholeError("it is part of the model's output")
                output[producers[0]] = tuple(span.owner for span in spans if span.dim == 0)
                continue
            for span in spans:
                if span.owner in tied:
                    raise _WholeError(f"tensor '{span.owner}' is shared with '{tied[span.owner]}'")
            for group in _separate(spans, points, producers):
                twins = sum(other.split("#")[0] == group.name for other in groups)
                name = f"{group.name}#{twins + 1}" if twins else group.name
                groups[name] = Group(name, group.size, group.spans, group.points)
        except _WholeError as reason:
            whole[producers[0]] = str(reason)
    return Graph(tuple(groups.values()), whole, output)


def _trace(tracer: Any, model: nn.Module, example: Tensor) -> list[nn.Module]:
    """Build the dependency graph; gives the producing layers in the order in which they are first called."""
    called: dict[nn.Module, None] = {}
    hooks = [
        layer.register_forward_hook(lambda layer, _inputs, _output: called.update({layer: None}))
        for layer in model.modules()
        if isinstance(layer, PRODUCERS)
    ]
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        tracer.build_dependency(
            model, example, forward_fn=lambda traced, x: traced(x), output_transform=_ends, verbose=False
        )
    for hook in hooks:
        hook.remove()
    return list(called)


def _ends(output: Any) -> list[Tensor]:
    # A copy at the end gives every output a node of its own, also when it comes straight from a layer.
    ends = [leaf.clone() for leaf in leaves(output) if leaf.requires_grad]
    if not ends:
        raise ValueError("no output depends on its parameters")
    return ends


def leaves(output: Any) -> list[Tensor]:
    """The tensors of a model's output."""
    return [leaf for leaf in torch_pruning.utils.flatten_as_list(output) if isinstance(leaf, Tensor)]


def _items(tracer: Any, root: nn.Module) -> list[Any]:
    """All that hangs on the outputs of a layer."""
    pruner = tracer.get_pruner_of_module(root)
    try:
        return list(tracer.get_pruning_group(root, pruner.prune_out_channels, range(pruner.get_out_channels(root))))
    except Exception as error:  # torch-pruning breaks in many ways on what it cannot follow, such as a GRU
        raise _WholeError("what hangs on it cannot be followed") from error


def _tied(model: nn.Module) -> dict[str, str]:
    """Tensors that go by several names -> another of their names."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {name: same[name == same[0]] for same in names.values() if len(same) > 1 for name in same}


def _spans(tracer: Any, items: list[Any], paths: dict[nn.Module, str]) -> tuple[list[Span], list[Span]]:
    """The tensor axes on which a group's units lie, and the layer inputs at which they are read."""
    parameters = {id(tensor): name for name, tensor in tracer.model.named_parameters()}
    spans: dict[tuple[str, int], Span] = {}
    points: dict[tuple[str, int], Span] = {}
    normed: dict[tuple[str, int], Span] = {}  # what group norms normalise
    blocks: dict[str, int] = {}  # and how many blocks each has
    for item in items:
        layer = item.dep.target.module
        if None in item.root_idxs:
            raise _WholeError("its units repeat in a way that cannot be followed")
        positions, units = torch.tensor(item.idxs), torch.tensor(item.root_idxs)
        if isinstance(layer, nn.Parameter):
            dim = item.dep.target.pruning_dim % layer.ndim
            _collect(spans, Span(parameters[id(layer)], dim, layer.shape[dim], positions, units))
        elif layer in paths:
            prefix = f"{paths[layer]}." if paths[layer] else ""
            made = tracer.is_out_channel_pruning_fn(item.dep.handler)
            for name, dim in _axes(layer, made):
                _collect(spans, Span(prefix + name, dim, getattr(layer, name).shape[dim], positions, units))
            if isinstance(layer, nn.Linear | _ConvNd) and (not made or _depthwise(layer)):
                dim = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.ndim
                length = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
                _collect(points, Span(paths[layer], dim, length, positions, units))
            if isinstance(layer, nn.GroupNorm) and layer.num_groups > 1:
                _collect(normed, Span(paths[layer], 0, layer.num_channels, positions, units))
                blocks[paths[layer]] = layer.num_groups
    size = 1 + max(int(span.units.max()) for span in spans.values())
    number = _joined(size, [(span, blocks[span.owner]) for span in normed.values()])
    found, read = ([replace(span, units=number[span.units]) for span in each.values()] for each in (spans, points))
    return found, read


def _joined(size: int, normed: Sequence[tuple[Span, int]]) -> Tensor:
    """New numbers of units: those that a group norm of so many blocks has in one block are one."""
    number, before = torch.arange(size), torch.empty(0)
    places = [(span.units, span.positions // (span.length // count), count) for span, count in normed]
    for (span, count), (_, block, _) in zip(normed, places, strict=True):
        if bool((torch.bincount(block) % (span.length // count)).any()):
            raise _WholeError(f"'{span.owner}' normalises its units together with others")
    while not torch.equal(number, before):  # until no residual path joins any more
        before = number
        for units, block, count in places:
            least = torch.full((count,), size).scatter_reduce(0, block, number[units], "amin")
            number = number.scatter_reduce(0, units, least[block], "amin")
    joined: Tensor = torch.unique(number, return_inverse=True)[1]
    return joined


def _collect(spans: dict[tuple[str, int], Span], span: Span) -> None:
    """Add a span; a layer that is reached by several ways has several items."""
    key = (span.owner, span.dim)
    if key in spans:
        both = [torch.stack([known.positions, known.units]) for known in (spans[key], span)]
        pairs = torch.unique(torch.cat(both, dim=1), dim=1)
        span = Span(span.owner, span.dim, span.length, pairs[0], pairs[1])
    if int(span.positions.max()) >= span.length or len(torch.unique(span.positions)) != len(span.positions):
        raise _WholeError(f"its units do not match the positions of '{span.owner}'")
    spans[key] = span


def _depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, _ConvNd) and 1 < layer.groups == layer.in_channels == layer.out_channels


def _axes(layer: nn.Module, made: bool) -> Iterator[tuple[str, int]]:
    """Tensors and axes of a layer that follow its output units (`made`) or its input units."""
    own = [name for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
    match layer:
        case _ConvNd() if layer.groups > 1 and not _depthwise(layer):
            raise _WholeError("a grouped convolution ties its units to fixed blocks")
        case _ConvNd() | nn.Linear():
            transposed = isinstance(layer, _ConvNd) and layer.transposed
            yield "weight", 0 if _depthwise(layer) else int(made == transposed)
            if layer.bias is not None and (made or _depthwise(layer)):
                yield "bias", 0
        case nn.Embedding():
            yield "weight", 1
        case _NormBase() | nn.LayerNorm() | nn.GroupNorm():
            for name in own:
                if getattr(layer, name).ndim > 1:
                    raise _WholeError("a layer norm spans several axes")
                if getattr(layer, name).ndim == 1:
                    yield name, 0
        case nn.PReLU():
            if layer.num_parameters > 1:
                yield "weight", 0
        case _:
            raise _WholeError(f"{type(layer).__name__} works on fixed blocks of units")


def _separate(spans: list[Span], points: list[Span], producers: Sequence[str]) -> Iterator[Group]:
    """Split a group into groups whose units lie on the same axes with the same extent."""
    size = 1 + max(int(span.units.max()) for span in spans)
    extent = torch.stack([torch.bincount(span.units, minlength=size) for span in spans])
    kinds = torch.unique(extent, dim=1, return_inverse=True)[1]
    for kind in range(int(kinds.max()) + 1):
        members = (kinds == kind).nonzero().flatten()
        number = torch.full((size,), -1)
        number[members] = torch.arange(len(members))
        parts = tuple(_part(spans, number))
        owners = {span.owner for span in parts}
        name = next((path for path in producers if f"{path}.weight" in owners), producers[0])
        yield Group(name, len(members), parts, tuple(_part(points, number)))


def _part(spans: list[Span], number: Tensor) -> Iterator[Span]:
    for span in spans:
        units = number[span.units]
        if bool((units >= 0).any()):
            yield Span(span.owner, span.dim, span.length, span.positions[units >= 0], units[units >= 0])
