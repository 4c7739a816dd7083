"""A small differentiable search space: Liu et al., DARTS: differentiable architecture search, ICLR 2019.

A network is a row of cells; two of them halve the image and double the width. A cell gets the outputs of the two cells
before it, has some nodes, each the sum of operations on what came before it in the cell, and gives all nodes' outputs,
concatenated. In `darts_search` every edge is a mixture of all operations, weighted by the softmax of its row of alpha;
normal cells share one alpha, reducing cells another. `darts` is a network that was found: two edges a node, one
operation each. Smaller than the paper's space: six operations instead of eight, and fewer cells, nodes and channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor, nn

from fedloom.errors import InputError, choose
from fedloom.models.layers import Positive
from fedloom.registry import register

__all__ = ["Darts", "DartsSearch", "genotype", "random_genotype"]

Kind = str
Genotype = Mapping[Kind, Sequence[str]]  # kind of cell -> two edges a node, each "operation:input"


class Zero(nn.Module):
    """No edge."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., :: self.stride, :: self.stride])


def _norm(width: int, learned: bool) -> nn.Module:
    return nn.BatchNorm2d(width, affine=learned)


def _skip(width: int, stride: int, learned: bool) -> nn.Module:
    if stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, 1, stride=stride, bias=False), _norm(width, learned))


def _separable(width: int, stride: int, learned: bool, dilation: int) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride, dilation, dilation, width, bias=False),
        nn.Conv2d(width, width, 1, bias=False),
        _norm(width, learned),
    )


OPERATIONS: dict[str, Callable[[int, int, bool], nn.Module]] = {
    "none": lambda width, stride, learned: Zero(stride),
    "skip": _skip,
    "max3": lambda width, stride, learned: nn.Sequential(nn.MaxPool2d(3, stride, 1), _norm(width, learned)),
    "avg3": lambda width, stride, learned: nn.Sequential(
        nn.AvgPool2d(3, stride, 1, count_include_pad=False), _norm(width, learned)
    ),
    "sep3": lambda width, stride, learned: _separable(width, stride, learned, 1),
    "dil3": lambda width, stride, learned: _separable(width, stride, learned, 2),
}
NONE = list(OPERATIONS).index("none")


class Mixed(nn.Module):
    """All operations of an edge."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        # Without learned scales, which would undo what alpha says.
        self.operations = nn.ModuleList(make(width, stride, False) for make in OPERATIONS.values())

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        parts = [share * operation(x) for share, operation in zip(shares, self.operations, strict=True)]
        return torch.stack(parts).sum(0)


def _entrance(inputs: int, outputs: int, stride: int, learned: bool) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), _norm(outputs, learned))


class Cell(nn.Module):
    """One cell; `edges` (two a node, or None for all, mixed) say what it computes."""

    def __init__(
        self, before: tuple[int, int], width: int, nodes: int, *, reduces: bool, halves: bool,
        edges: Sequence[tuple[str, int]] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.nodes, self.reduces, self.mixed = nodes, reduces, edges is None
        self.enter = nn.ModuleList(
            # The older input is twice as large where the cell before this one reduced.
            _entrance(inputs, width, 2 if halves and number == 0 else 1, edges is not None)
            for number, inputs in enumerate(before)
        )
        self.sources: list[list[int]] = []
        self.edges = nn.ModuleList()
        for node in range(nodes):
            chosen = [("", source) for source in range(node + 2)] if edges is None else edges[2 * node : 2 * node + 2]
            self.sources.append([source for _, source in chosen])
            for name, source in chosen:
                stride = 2 if reduces and source < 2 else 1
                self.edges.append(Mixed(width, stride) if edges is None else OPERATIONS[name](width, stride, True))

    def forward(self, old: Tensor, new: Tensor, shares: Tensor | None) -> Tensor:
        states, number = [self.enter[0](old), self.enter[1](new)], 0
        for sources in self.sources:
            parts = []
            for source in sources:
                edge = self.edges[number]
                parts.append(edge(states[source]) if shares is None else edge(states[source], shares[number]))
                number += 1
            states.append(torch.stack(parts).sum(0))
        return torch.cat(states[2:], dim=1)


class Cells(nn.Module):
    """A stem, the cells, and a linear layer over the mean of the last feature map."""

    def __init__(
        self, channels: int, classes: int, size: int, width: int, cells: int, nodes: int, found: Genotype | None
    ) -> None:
        super().__init__()
        reducing = {cells // 3, 2 * cells // 3} if cells > 2 else {cells - 1}
        if size < 2 ** (len(reducing) + 1):
            raise InputError(f"images of {size}x{size} pixels are too small for {len(reducing)} reducing cells")
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        rows, before, halves = [], (width, width), False
        for number in range(cells):
            reduces = number in reducing
            width = 2 * width if reduces else width
            edges = None if found is None else _edges(found["reduce" if reduces else "normal"])
            rows.append(Cell(before, width, nodes, reduces=reduces, halves=halves, edges=edges))
            before, halves = (before[1], nodes * width), reduces
        self.cells = nn.ModuleList(rows)
        self.head = nn.Linear(before[1], classes)

    def shares(self, cell: Cell) -> Tensor | None:
        """How much each operation of the cell's edges counts; None where there is one operation an edge."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        old = new = self.stem(x)
        for cell in self.cells:
            old, new = new, cell(old, new, self.shares(cell))  # type: ignore[arg-type]
        logits: Tensor = self.head(new.mean((2, 3)))
        return logits


@register("model", "darts_search", paper="Liu et al., DARTS, ICLR 2019")
class DartsSearch(Cells):
    """The whole search space: every edge a mixture of six operations, weighted by alpha. For `fednas`."""

    architecture: ClassVar[tuple[str, ...]] = ("normal", "reduce")  # the tensors that say what the network is

    def __init__(
        self, channels: int, classes: int, size: int, width: Positive = 8, cells: Positive = 4, nodes: Positive = 2
    ) -> None:
        super().__init__(channels, classes, size, width, cells, nodes, None)
        edges = sum(node + 2 for node in range(nodes))
        self.normal = nn.Parameter(1e-3 * torch.randn(edges, len(OPERATIONS)))
        self.reduce = nn.Parameter(1e-3 * torch.randn(edges, len(OPERATIONS)))

    def shares(self, cell: Cell) -> Tensor | None:
        """Softmax over an edge's operations."""
        return (self.reduce if cell.reduces else self.normal).softmax(1)

    def found(self, tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
        """The structure that these tensors say, as settings of `darts`."""
        return {kind: genotype(tensors[kind]) for kind in self.architecture}


@register("model", "darts", paper="Liu et al., DARTS, ICLR 2019")
class Darts(Cells):
    """A network from the search space: two edges a node, each one operation on one earlier state."""

    def __init__(
        self,
        channels: int,
        classes: int,
        size: int,
        normal: Annotated[tuple[str, ...], "edges of normal cells, two a node: operation:input"] = (),
        reduce: Annotated[tuple[str, ...], "edges of reducing cells"] = (),
        drawn: Annotated[int | None, Ge(0), "instead of edges: a structure drawn at random from this seed"] = None,
        width: Positive = 8,
        cells: Positive = 4,
        nodes: Positive = 2,
    ) -> None:
        if (drawn is None) != bool(normal and reduce):
            raise InputError("model 'darts' needs its edges (normal and reduce) or a number to draw them from (drawn)")
        found = random_genotype(drawn, nodes) if drawn is not None else {"normal": normal, "reduce": reduce}
        for kind, edges in found.items():
            _check(kind, edges, nodes)
        super().__init__(channels, classes, size, width, cells, nodes, found)


def genotype(alpha: Tensor) -> list[str]:
    """Two edges a node: those whose best operation (other than none) has the largest share.

    >>> genotype(torch.eye(6)[[4, 0]])
    ['sep3:0', 'skip:1']
    """
    shares = alpha.detach().double().softmax(1).cpu()
    shares[:, NONE] = -1.0
    best, operation = shares.max(1)
    names, chosen, first, node = list(OPERATIONS), list[str](), 0, 0
    while first < len(alpha):
        strongest = best[first : first + node + 2].argsort(descending=True, stable=True)[:2].sort().values
        chosen += [f"{names[int(operation[first + edge])]}:{edge}" for edge in strongest.tolist()]
        first, node = first + node + 2, node + 1
    return chosen


def random_genotype(seed: int, nodes: int) -> dict[str, list[str]]:
    """A structure drawn at random: two inputs a node, any operation but none."""
    generator = torch.Generator().manual_seed(seed)
    edges = sum(node + 2 for node in range(nodes))
    return {
        kind: genotype(torch.randn(edges, len(OPERATIONS), generator=generator)) for kind in DartsSearch.architecture
    }


def _edges(found: Sequence[str]) -> list[tuple[str, int]]:
    return [(operation, int(source)) for operation, source in (edge.split(":") for edge in found)]


def _check(kind: str, edges: Sequence[str], nodes: int) -> None:
    """Refuse edges that no cell can have."""
    if len(edges) != 2 * nodes:
        raise InputError(
            f"model.{kind} of darts needs two edges a node, {2 * nodes} for {nodes} nodes; got {len(edges)}"
        )
    for number, edge in enumerate(edges):
        operation, colon, source = edge.partition(":")
        if operation not in OPERATIONS:
            raise choose(f"operation in model.{kind} of darts", operation, OPERATIONS)
        if not (colon and source.isdecimal() and int(source) < number // 2 + 2):
            raise InputError(
                f"model.{kind} of darts: edge '{edge}' of node {number // 2} must be operation:input with an input "
                f"from 0 to {number // 2 + 1}"
            )
