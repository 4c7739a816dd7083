"""The unit table: which positions of which tensor belong to which unit, and models gathered from a choice of units.

All units of all groups are numbered in one row, so an axis of a tensor is one vector `position -> unit`; -1 stands
for 'always kept'. A choice of units is one boolean per unit with a True behind the last, and the kept positions of an
axis are `keep[unit]`: -1 finds that True, and flattened channels, concatenations and shared streams need no code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.copies import to_device, to_host
from fedloom.errors import InputError, choose
from fedloom.recent import Recent

__all__ = ["Axis", "Group", "Point", "Span", "Units", "Where", "rising"]

Where = Mapping[str, Tensor]
"""Group name -> sorted numbers of the kept units; a group that is absent is whole."""

Index = slice | Tensor
Cuts = tuple[tuple[int, Index], ...]
Plan = dict[str, Cuts]

# Random cuts make a new choice for every client and round; older plans would only fill memory.
PLANS_KEPT = 256


@dataclass(frozen=True)
class Span:
    """The positions along one axis (of a tensor, or of a layer's input) that hold a group's units."""

    owner: str
    dim: int
    length: int
    positions: Tensor
    units: Tensor


@dataclass(frozen=True)
class Group:
    """Units that must be kept or cut together, named after the first layer that produces them."""

    name: str
    size: int
    spans: tuple[Span, ...]
    points: tuple[Span, ...]


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor, or of the input of a layer, with the unit of each position (-1: of none)."""

    owner: str
    dim: int
    unit: Tensor


@dataclass(frozen=True)
class Point:
    """A layer's input that is read for scores: the unit of each position (one behind the last: of none), its extent."""

    axis: Axis
    unit: Tensor
    extent: Tensor  # how many positions the unit of this position has on the axis


class Units:
    """The units of a model; made by `find_units`.

    sizes: group name -> number of units, in the order in which the model forms them.
    whole: groups that are never cut -> the reason.
    output: tensors whose axis 0 is the classes; that axis is in no group. Empty where no layer makes the output.
    parameters: the names among the model's tensors that are trained.
    axes: tensor name -> its axes that can be cut.
    points: inputs of layers that read a group's units, where scores are taken.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        shapes: Mapping[str, torch.Size],
        parameters: Iterable[str] = (),
        output: Iterable[str] = (),
        whole: Mapping[str, str] | None = None,
    ) -> None:
        self.sizes: dict[str, int] = {group.name: group.size for group in groups}
        self.whole = dict(whole or {})
        self.output = frozenset(output)
        self.parameters = frozenset(parameters)
        self.points = tuple(_join(groups, [group.points for group in groups]))
        self.axes: dict[str, tuple[Axis, ...]] = {}
        for axis in _join(groups, [group.spans for group in groups]):
            self.axes[axis.owner] = (*self.axes.get(axis.owner, ()), axis)
        self._shapes = dict(shapes)
        self._plans = Recent[tuple[object, ...], Plan](PLANS_KEPT)
        self._points: dict[torch.device, list[Point]] = {}
        self._placed: dict[tuple[str, torch.device], list[Tensor]] = {}

    def __getstate__(self) -> dict[str, object]:
        # Plans may hold a thousand vectors, even on a GPU; another process makes its own.
        return {**self.__dict__, "_plans": Recent(PLANS_KEPT), "_points": {}, "_placed": {}}

    def units_of(self, name: str, device: torch.device) -> list[Tensor]:
        """The unit of each position of a tensor's axes that can be cut (one behind the last: of none), on a device."""
        key = (name, device)
        if key not in self._placed:
            row = sum(self.sizes.values()) + 1
            self._placed[key] = [(axis.unit % row).to(device) for axis in self.axes.get(name, ())]
        return self._placed[key]

    def row(self, device: torch.device) -> Tensor:
        """One zero per unit, and one behind the last for positions of no unit."""
        return torch.zeros(sum(self.sizes.values()) + 1, dtype=torch.float64, device=device)

    def points_on(self, device: torch.device) -> list[Point]:
        """The points with their indices on a device; made once, since a captured reading cannot copy from the host."""
        if device not in self._points:
            behind = sum(self.sizes.values())
            units = [torch.where(axis.unit < 0, behind, axis.unit) for axis in self.points]
            extents = [unit.bincount(minlength=behind + 1)[unit] for unit in units]
            self._points[device] = [
                Point(axis, unit.to(device), extent.to(device))
                for axis, unit, extent in zip(self.points, units, extents, strict=True)
            ]
        return self._points[device]

    def kept(self, capacity: float | Mapping[str, float]) -> dict[str, int]:
        """How many units of each group are trained at this capacity: ceil(r m), at least 1, not all if r < 1.

        A capacity is one share for all groups, or one a group; groups that are not named are whole.
        """
        rates = capacity if isinstance(capacity, Mapping) else dict.fromkeys(self.sizes, capacity)
        kept = dict(self.sizes)
        for name, rate in rates.items():
            if not 0 < rate <= 1:
                raise InputError(f"capacity must be in (0, 1]; got {rate}")
            if rate < 1:
                # 0.07 * 100 is a little above 7 in binary; that must not become an eighth unit.
                kept[name] = max(1, min(kept[name] - 1, math.ceil(rate * kept[name] - 1e-9)))
        return kept

    def shapes(self, kept: Mapping[str, int] | None = None) -> dict[str, torch.Size]:
        """Shapes of all tensors when so many units of each group are kept; groups that are absent are whole."""
        # Every unit of a group has the same extent on an axis, so the first ones stand for any choice.
        index = self.plan({name: torch.arange(number) for name, number in (kept or {}).items()})
        shapes = {}
        for name, shape in self._shapes.items():
            sizes = list(shape)
            for dim, positions in index.get(name, ()):
                sizes[dim] = _length(positions)
            shapes[name] = torch.Size(sizes)
        return shapes

    def num_parameters(self, kept: Mapping[str, int] | None = None) -> int:
        """Number of trained elements when so many units of each group are kept."""
        return sum(shape.numel() for name, shape in self.shapes(kept).items() if name in self.parameters)

    def take(self, tensors: Mapping[str, Tensor], where: Where) -> dict[str, Tensor]:
        """Gather the smaller model that consists of the chosen units.

        Differentiable. What is kept whole is the same tensor, and a contiguous choice is a view: what is written into
        it (running statistics) reaches the full model.
        """
        plans = self._plans_of(tensors, where)
        return {name: _gather(full, plans[full.device].get(name, ())) for name, full in tensors.items()}

    def put(
        self,
        total: MutableMapping[str, Tensor],
        count: MutableMapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        where: Where,
        weight: float,
        *,
        masks: Mapping[str, Tensor] | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """Add a smaller model times `weight` into the full-size `total`, and `weight` into `count`, in place.

        masks: per tensor (of the smaller shape) the elements that vote; tensors without a mask vote everywhere.
        rows: the classes that vote in the output layers; None: all.
        """
        plans = self._plans_of(total, where)
        devices = {tensor.device for tensor in (*total.values(), *tensors.values())}
        voting = {} if rows is None else {device: to_device([rows], device)[0] for device in devices}
        for name, part in tensors.items():
            index = plans[total[name].device].get(name, ())
            _check(name, part, total[name], index)
            mask = None if masks is None else masks.get(name)
            if rows is not None and name in self.output:
                picked = voting[part.device]
                part = part.index_select(0, picked)
                mask = None if mask is None else mask.index_select(0, picked)
                index = ((0, voting[total[name].device]), *index)
            part, votes = part.detach(), total[name].new_ones(()).expand(part.shape)
            if mask is not None:
                # Chosen, not multiplied: an element without a vote may hold anything, even NaN.
                votes = mask.to(votes)
                part = torch.where(mask.to(part.device), part, 0.0)
            _add(total[name], part, index, weight)
            _add(count[name], votes, index, weight)

    def place(self, tensors: Mapping[str, Tensor], where: Where, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full-size copies of `like` in which the smaller model's elements replace the old ones."""
        full = {name: like[name].detach().clone() for name in tensors}
        plans = self._plans_of(full, where)
        for name, part in tensors.items():
            index = plans[full[name].device].get(name, ())
            _check(name, part, full[name], index)
            _copy(full[name], part.detach().to(full[name]), index)
        return full

    def plan(self, where: Where, device: torch.device | str = "cpu") -> Plan:
        """The kept positions of each axis that is cut: a slice where they are contiguous, else their numbers."""
        where = dict(zip(where, to_host(list(where.values())), strict=True))  # those that travelled may be on a GPU
        key = (str(device), *((name, where[name].numpy().tobytes()) for name in self.sizes if name in where))
        if unknown := where.keys() - self.sizes.keys():
            raise choose("group", min(unknown), self.sizes)
        if key not in self._plans:
            keep = self.keep(where)
            cut = {name: [(axis.dim, keep[axis.unit]) for axis in axes] for name, axes in self.axes.items()}
            plan: Plan = {
                name: tuple((dim, _positions(mask)) for dim, mask in masks if not mask.all())
                for name, masks in cut.items()
            }
            self._plans[key] = _on(device, plan)
        return self._plans[key]

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Cut a vector with one value per unit of the whole row into one vector per group."""
        return dict(zip(self.sizes, torch.split_with_sizes(values, list(self.sizes.values())), strict=True))

    def keep(self, where: Where) -> Tensor:
        """One boolean per unit of the whole row, and a True behind the last, which -1 finds."""
        keep = torch.ones(sum(self.sizes.values()) + 1, dtype=torch.bool)
        groups = self.split(keep[:-1])
        for name, units in where.items():
            units = units.cpu()
            if not rising(units, self.sizes[name]) or not len(units):
                raise InputError(
                    f"units kept of group '{name}' must be rising numbers from 0 to {self.sizes[name] - 1}, "
                    f"at least one; got {units.tolist()}"
                )
            groups[name].zero_()[units] = True
        return keep

    def _plans_of(self, tensors: Mapping[str, Tensor], where: Where) -> dict[torch.device, Plan]:
        return {device: self.plan(where, device) for device in {tensor.device for tensor in tensors.values()}}


def rising(numbers: Tensor, below: int) -> bool:
    """Whether these are whole numbers, from 0 and below a bound, each larger than the one before it."""
    if numbers.ndim != 1 or numbers.dtype not in (torch.int32, torch.int64):
        return False
    edges = torch.cat([numbers.new_tensor([-1]), numbers, numbers.new_tensor([below])])
    return bool((edges[1:] > edges[:-1]).all())


def _join(groups: Sequence[Group], spans: Sequence[Sequence[Span]]) -> list[Axis]:
    """Write the spans of all groups into one vector per axis, with units numbered through all groups."""
    axes: dict[tuple[str, int], Tensor] = {}
    first = 0
    for group, owned in zip(groups, spans, strict=True):
        for span in owned:
            unit = axes.setdefault((span.owner, span.dim), torch.full((span.length,), -1))
            unit[span.positions] = span.units + first
        first += group.size
    return [Axis(owner, dim, unit) for (owner, dim), unit in sorted(axes.items(), key=lambda item: item[0])]


def _positions(mask: Tensor) -> Index:
    positions = mask.nonzero().flatten()
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions


def _on(device: torch.device | str, plan: Plan) -> Plan:
    """A plan with its positions on a device; they are copied together, since a choice has a vector an axis."""
    scattered = [index for cuts in plan.values() for _, index in cuts if isinstance(index, Tensor)]
    placed = iter(to_device(scattered, device))
    return {
        name: tuple((dim, index if isinstance(index, slice) else next(placed)) for dim, index in cuts)
        for name, cuts in plan.items()
    }


def _length(index: Index) -> int:
    return index.stop - index.start if isinstance(index, slice) else len(index)


def _check(name: str, part: Tensor, full: Tensor, index: Cuts) -> None:
    sizes = list(full.shape)
    for dim, positions in index:
        sizes[dim] = _length(positions)
    # Without this, a tensor of the wrong shape would be broadcast without a word.
    if list(part.shape) != sizes:
        raise InputError(f"tensor '{name}' of this choice of units must have shape {sizes}; got {list(part.shape)}")


def _gather(full: Tensor, index: Cuts) -> Tensor:
    for dim, positions in index:
        if isinstance(positions, slice):
            full = full.narrow(dim, positions.start, _length(positions))
        else:
            full = full.index_select(dim, positions)
    return full


def _add(full: Tensor, part: Tensor, index: Cuts, weight: float) -> None:
    view, scattered = _narrow(full, index)
    if not scattered:
        view.add_(part.to(view.device), alpha=weight)
        return
    (dim, positions), *others = scattered
    part = part.to(view)
    for other, kept in others:
        sizes = [*part.shape[:other], view.shape[other], *part.shape[other + 1 :]]
        part = part.new_zeros(sizes).index_copy_(other, kept, part)
    view.index_add_(dim, positions, part, alpha=weight)


def _copy(full: Tensor, part: Tensor, index: Cuts) -> None:
    view, scattered = _narrow(full, index)
    if not scattered:
        view.copy_(part)
        return
    (dim, positions), *others = scattered
    if others:
        rows = view.index_select(dim, positions)
        _copy(rows, part, tuple(others))
        part = rows
    view.index_copy_(dim, positions, part)


def _narrow(full: Tensor, index: Cuts) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """The view that the contiguous axes leave, and the axes that are not contiguous."""
    scattered = []
    for dim, positions in index:
        if isinstance(positions, slice):
            full = full.narrow(dim, positions.start, _length(positions))
        else:
            scattered.append((dim, positions))
    return full, scattered
