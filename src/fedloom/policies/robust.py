"""Merges that withstand harmful reports: coordinate-wise median and trimmed mean, Krum and multi-Krum.

Median and trimmed mean: Yin et al., Byzantine-robust distributed learning, ICML 2018, definitions 1 and 2. Krum and
multi-Krum: Blanchard et al., Machine learning with adversaries: Byzantine tolerant gradient descent, NeurIPS 2017.
Everybody counts the same, as in the papers: a weight is told by its client, and a harmful one would lie.

The papers join gradients; here models are joined, which for one local step is the same. They join vectors of equal
length; here an element is joined over those who voted for it, and elements that nobody trained keep their value. What
a report leaves open counts in Krum's distances as if it were unchanged.

All reports are needed at once, so there are no sums: they are kept until the last has come, and memory and what travels
to the server grow with the cohort. To that comes the tensor being joined, several times as float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from fedloom.errors import RunError
from fedloom.fleet.blocks import Joined
from fedloom.policies.merge import Mean, Totals
from fedloom.registry import register
from fedloom.types import Report, Server, Tensors

__all__ = ["Krum", "Median", "Robust", "Trimmed", "krum_scores", "middle", "trimmed_mean"]

Rule = Callable[[Server, Sequence[Report]], Tensors]


def trimmed_mean(values: Tensor, votes: Tensor, ends: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Over the first axis, the mean of what is left of the votes without `ends(count)` at each end; and the count.

    >>> import torch
    >>> values, votes = torch.tensor([[1.0], [9.0], [2.0], [4.0]]), torch.tensor([[True], [True], [True], [False]])
    >>> [each.item() for each in trimmed_mean(values, votes, middle)]
    [2.0, 3]
    """
    count = votes.sum(0)
    cut = ends(count)
    # Who did not vote is sorted behind all who did.
    ranked = values.masked_fill(~votes, inf).sort(0).values
    rank = torch.arange(len(values), device=values.device).view(-1, *[1] * (values.ndim - 1))
    kept = (rank >= cut) & (rank < count - cut)
    return torch.where(kept, ranked, 0.0).sum(0) / (count - 2 * cut), count


def middle(count: Tensor) -> Tensor:
    """How many of so many votes lie before the one or the two in the middle."""
    return (count - 1).clamp(min=0) // 2


def krum_scores(square: Tensor, attackers: int) -> Tensor:
    """Of squared distances between n reports: the sum of each one's n - f - 2 smallest to others.

    >>> import torch
    >>> places = torch.tensor([0.0, 1.0, 3.0, 99.0])
    >>> krum_scores((places[:, None] - places).square(), 0).tolist()
    [10.0, 5.0, 13.0, 18820.0]
    """
    others = square.sort(1).values[:, 1:]  # the first is the report itself
    return others[:, : len(square) - attackers - 2].sum(1)


class Robust:
    """What these merges share: they look at all reports together."""

    needs: ClassVar[frozenset[str]] = frozenset()
    whole: ClassVar[bool] = False

    def begin(self, server: Server) -> Joined:
        """Nothing gathered yet."""
        return Gathered(server, self.join)

    def join(self, server: Server, reports: Sequence[Report]) -> Tensors:
        """The server's next tensors, of all reports of a round."""
        raise NotImplementedError(f"{type(self).__name__} must say how reports are joined")


@register("merge", "median", paper="Yin et al., ICML 2018")
@dataclass(frozen=True)
class Median(Robust):
    """The median of every element over those who trained it; of an even number, the mean of the two in the middle."""

    by_class: Annotated[bool, "join output rows only from clients that hold the class"] = False

    def join(self, server: Server, reports: Sequence[Report]) -> Tensors:
        """All but the middle is cut."""
        return by_element(server, reports, middle)


@register("merge", "trimmed", paper="Yin et al., ICML 2018")
@dataclass(frozen=True)
class Trimmed(Robust):
    """The mean of every element over those who trained it, without the largest and the smallest values."""

    share: Annotated[float, Ge(0), Lt(0.5), "share of the values that is cut at each end, beta, rounded down"] = 0.2
    by_class: Annotated[bool, "join output rows only from clients that hold the class"] = False

    def join(self, server: Server, reports: Sequence[Report]) -> Tensors:
        """The same share at each end, whatever the number of votes."""
        return by_element(server, reports, self.ends)

    def ends(self, count: Tensor) -> Tensor:
        """floor(beta n), and somebody is left."""
        # 0.29 x 100 is a little below 29 in binary.
        return (self.share * count.double() + 1e-9).long().minimum(middle(count))


@register("merge", "krum", paper="Blanchard et al., NeurIPS 2017")
@dataclass(frozen=True)
class Krum(Robust):
    """The report that lies nearest to its neighbours; multi-Krum: the mean of several such."""

    attackers: Annotated[int, Ge(0), "harmful reports in a round that are withstood, f"] = 1
    keep: Annotated[int, Ge(1), "reports that are averaged, m; 1: Krum"] = 1

    by_class: ClassVar[bool] = False
    whole: ClassVar[bool] = True  # distances are between whole models

    def lacking(self, reports: int) -> str:
        """Why so many reports are too few; empty if they are enough."""
        needed = max(2 * self.attackers + 3, self.keep + self.attackers)
        if reports >= needed:
            return ""
        return (
            f"krum with attackers = {self.attackers} and keep = {self.keep} needs at "
            f"least {needed} reports (2 x attackers + 3, and keep + attackers); got {reports}"
        )

    def join(self, server: Server, reports: Sequence[Report]) -> Tensors:
        """The mean of the best; at equality the smaller number of a client comes first, as in the paper."""
        if lacking := self.lacking(len(reports)):
            raise RunError(f"round {server.round + 1}: {lacking}")
        reports = sorted(reports, key=lambda report: report.client)
        best = krum_scores(squared_distances(server, reports), self.attackers).sort(stable=True).indices
        joined = Mean(weights="equal").begin(server)
        for number in sorted(best[: self.keep].tolist()):
            joined.add(reports[number])
        return joined.result()


class Gathered:
    """The reports of a round, as they came."""

    def __init__(self, server: Server, rule: Rule) -> None:
        self.server, self.rule = server, rule
        self.reports: list[Report] = []

    def add(self, report: Report) -> None:
        """Keep a report."""
        self.reports.append(report)

    def result(self) -> Tensors:
        """The rule's answer to all of them."""
        return self.rule(self.server, self.reports)


def by_element(server: Server, reports: Sequence[Report], ends: Callable[[Tensor], Tensor]) -> Tensors:
    """Trimmed means where somebody voted, the old value elsewhere; integer buffers are rounded."""
    new = dict(server.tensors)
    for name, old in server.tensors.items():
        told = [said(server, report, name) for report in reports if name in report.tensors]
        if told:
            values, votes = (torch.stack(each) for each in zip(*told, strict=True))
            mean, count = trimmed_mean(values, votes, ends)
            mean = mean if old.is_floating_point() else mean.round()
            new[name] = torch.where(count > 0, mean.to(old.dtype), old)
    return new


def squared_distances(server: Server, reports: Sequence[Report]) -> Tensor:
    """Between all pairs, over all tensors but counters: numbers of batches would outweigh everything."""
    square = torch.zeros(len(reports), len(reports), dtype=torch.float64, device=server.network.device)
    for name, old in server.tensors.items():
        if old.is_floating_point() and any(name in report.tensors for report in reports):
            told = [said(server, report, name) for report in reports]
            rows = torch.stack([torch.where(votes, value, old.double()).flatten() for value, votes in told])
            # Without matrix products, whose rounding would depend on how many reports there are and in which order.
            square += torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    return square


def said(server: Server, report: Report, name: str) -> tuple[Tensor, Tensor]:
    """What a report says of a tensor, and of which of its elements, both of full size."""
    alone = Totals(server, lambda report: 1.0)
    alone.add(replace(report, tensors={key: value for key, value in report.tensors.items() if key == name}))
    if name not in alone.total:
        old = server.tensors[name]
        return torch.zeros_like(old, dtype=torch.float64), torch.zeros_like(old, dtype=torch.bool)
    total = alone.total[name]
    return total, (alone.count(name) > 0).expand(total.shape)
