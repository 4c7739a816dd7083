"""FjORD: Horvath et al., FjORD: fair and accurate federated learning under heterogeneous targets, NeurIPS 2021.

Ordered dropout: a client holds the first units up to its capacity, and every step trains a prefix whose width is drawn
uniformly from those the client can afford. With `distil`, each step trains the client's whole prefix on the labels and
the drawn one on what the whole one says.

Differences: what lies outside a step's width rests (the authors' code lets weight decay shrink it), statistics of batch
norm are asked for at evaluation instead of one set a width, and under objective `masked`, the default, distillation is
masked too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.client import Client
from fedloom.errors import InputError
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.cut import Cut, Prefix
from fedloom.policies.distil import Features, masking
from fedloom.policies.merge import Mean, Merge
from fedloom.policies.objective import Masked, Objective
from fedloom.policies.share import Share, Static
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Batch, Fit, Fixed, Model, Report, Task, Tensors, Where, Work
from fedloom.units import Units

Places = int | tuple[int, ...]  # the first so many along an axis, or these


@dataclass(frozen=True)
class Narrow:
    """The first units of every group; equal for equal widths, so that a captured step is found again.

    Mostly a slice of the same memory. Where groups lie one behind the other (a concatenation), elements are gathered
    and have to be put back.
    """

    axes: tuple[tuple[str, tuple[tuple[int, Places], ...]], ...]

    @classmethod
    def of(cls, units: Units, outer: Where, inner: Where) -> Narrow:
        """The inner units of a model that was cut to the outer ones already."""
        kept, wanted = units.keep(outer), units.keep(inner)
        axes = []
        for name, each in units.axes.items():
            cut = []
            for axis in each:
                places = wanted[axis.unit][kept[axis.unit]].nonzero().squeeze(1).tolist()
                cut.append((axis.dim, len(places) if places == list(range(len(places))) else tuple(places)))
            axes.append((name, tuple(cut)))
        return cls(tuple(axes))

    def __call__(self, tensors: Tensors) -> Tensors:
        """The narrow model: views where they can be."""
        axes = dict(self.axes)
        return {name: self._seen(tensor, axes.get(name, ())) for name, tensor in tensors.items()}

    @staticmethod
    def _seen(tensor: Tensor, axes: tuple[tuple[int, Places], ...]) -> Tensor:
        for dim, places in axes:
            if isinstance(places, int):
                tensor = tensor.narrow(dim, 0, places)
            else:
                tensor = tensor.index_select(dim, _index(places, tensor.device))
        return tensor

    def back(self, tensors: Tensors, seen: Tensors) -> None:
        """Put what was gathered back where it came from."""
        for name, axes in self.axes:
            if name in seen and any(not isinstance(places, int) for _, places in axes):
                chosen = dict(axes)
                rows = [chosen.get(dim, size) for dim, size in enumerate(tensors[name].shape)]
                index = [_index(row, tensors[name].device) for row in rows]
                tensors[name][torch.meshgrid(*index, indexing="ij")] = seen[name]


@lru_cache(maxsize=4096)
def _index(places: Places, device: torch.device) -> Tensor:
    """Positions as a tensor; made once, since a captured step cannot copy from the host."""
    return torch.arange(places, device=device) if isinstance(places, int) else torch.tensor(places, device=device)


@dataclass(frozen=True)
class Distilled:
    """The whole prefix learns from labels, the narrow one from the whole one (section 4.2).

    What the objective masks is masked here too: an absent class gets no gradient.
    """

    objective: Objective
    narrow: Narrow

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """The sum of both."""
        total, losses = self.objective(model, tensors, batch, fixed)
        with torch.no_grad():
            aim = model(tensors, batch.x)
        said = model(self.narrow(tensors), batch.x)
        if masked := masking(self.objective):
            aim, said = masked.mask(aim, fixed), masked.mask(said, fixed)
        return total + F.cross_entropy(said, aim.softmax(1)), losses


@register("method", "fjord", paper="Horvath et al., NeurIPS 2021")
@dataclass(frozen=True)
class Fjord(FedAvg):
    """Ordered dropout: every step trains a prefix of another width."""

    trainers: ClassVar[tuple[str, ...]] = ("reference", "taped", "graphs")  # clients differ in the width of a step

    widths: Annotated[tuple[float, ...], "capacities that steps draw from, beside the client's own"] = (
        0.0625, 0.125, 0.25, 0.5, 1.0,
    )  # fmt: skip
    distil: Annotated[bool, "the drawn width learns from the client's whole prefix"] = False
    cut: Cut = Prefix()
    objective: Objective = Masked()
    share: Share = Static()
    merge: Merge = Mean(by_class=True)

    def check(self) -> None:
        """Widths are shares, and their order is the units' own."""
        super().check()
        if not isinstance(self.cut, Prefix):
            raise InputError("fjord orders units and cannot run under another cut than prefix; leave [cut] out")
        if isinstance(self.objective, Features):
            raise InputError(
                "fjord trains a narrower model in most steps, whose features are not as wide as its teacher's; use "
                "objective 'soft' or method.distil"
            )
        if not self.widths or min(self.widths) <= 0 or max(self.widths) > 1:
            raise InputError(f"method.widths of fjord must be in (0, 1]; got {list(self.widths)}")

    def work(self, client: Client, task: Task) -> Work[Report]:
        """One step a width; the plan draws which."""
        tensors = yield from self.start(client)
        views = [self._view(client, width) for width in self.widths if width < client.capacity]
        whole = Descent.of(self.loss(), task.train)
        if self.distil:
            # The whole prefix is run twice forward and once back, the narrow one once each way.
            macs, whole_macs = client.network.macs, client.network.macs(tensors)
            costs = [4 / 3 + macs(view(tensors)) / whole_macs for view in views]
            plain = [Descent.of(Distilled(self.loss(), view), task.train) for view in views]
            steps = [replace(step, passes=cost) for step, cost in zip(plain, costs, strict=True)]
        else:
            steps = [Descent.of(self.loss(), task.train, view) for view in views]
        fit = yield Fit(tensors, [*steps, whole], client.plan(variants=len(steps) + 1), self.fixed(client, tensors))
        return self.report(client, fit, task.where)

    def _view(self, client: Client, width: float) -> Narrow:
        inner = {group: torch.arange(kept) for group, kept in client.network.units.kept(width).items()}
        return Narrow.of(client.network.units, client.task.where or {}, inner)
