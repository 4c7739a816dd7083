"""What is done to a report before it leaves the client? Nothing by default; clipping and noise are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedloom.client import Client
from fedloom.copies import to_device
from fedloom.encoding import Sparse, dense, mask_of
from fedloom.registry import register
from fedloom.types import Report

__all__ = ["Clip", "Filter"]


class Filter(Protocol):
    """A rule that changes a report at the client."""

    def __call__(self, client: Client, report: Report) -> Report:
        """The report that really leaves."""


@register(
    "filter", "clip", paper="McMahan et al., Learning differentially private recurrent language models, ICLR 2018"
)
@dataclass(frozen=True)
class Clip:
    """Clip the change of the model to a norm, and add Gaussian noise to it."""

    norm: Annotated[float, Gt(0), "largest norm of a client's change over all its tensors"] = 1.0
    noise: Annotated[float, Ge(0), "standard deviation of the noise, as a share of the norm"] = 0.0

    def __call__(self, client: Client, report: Report) -> Report:
        """Buffers pass unchanged; the change is taken against what the task sent. Other parts are not covered."""
        if report.extra:
            raise ValueError(f"a clipped report cannot carry {', '.join(report.extra)}: it would leave unclipped")
        sent = client.received()
        if report.where and not client.task.where:
            sent = client.network.units.take(sent, report.where)
        names = [name for name in report.tensors if name in sent and name not in client.network.buffers]
        moves = {name: dense(report.tensors[name]) - sent[name] for name in names}
        masks = {name: mask for name in names if (mask := mask_of(report.tensors[name])) is not None}
        moves |= {name: moves[name] * mask for name, mask in masks.items()}
        length = torch.stack([torch.linalg.vector_norm(move) for move in moves.values()]).norm()
        shrink = (self.norm / length.clamp(min=1e-12)).clamp(max=1.0)
        left, clipped = dict(report.tensors), [sent[name] + move * shrink for name, move in moves.items()]
        if self.noise:
            clipped = [tensor + drawn for tensor, drawn in zip(clipped, self.drawn(client, clipped), strict=True)]
        for name, tensor in zip(moves, clipped, strict=True):
            # What was not there before, and so does not vote, is not there afterwards.
            left[name] = Sparse.of(tensor, masks[name], partial=True) if name in masks else tensor
        return replace(report, tensors=left)

    def drawn(self, client: Client, like: Sequence[Tensor]) -> list[Tensor]:
        """Noise for tensors of one type, drawn in float64 on the host and brought to them together."""
        generator, dtype = client.noise("noise"), like[0].dtype
        drawn = [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for tensor in like]
        return to_device([(each * self.noise * self.norm).to(dtype) for each in drawn], like[0].device)
