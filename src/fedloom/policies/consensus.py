"""Answers on public images: what models say there, and how one learns from what all say together.

Public images have numbers instead of labels (`numbered`): a sample's number is its row in fixed["consensus"], the table
of joint answers. So one captured step serves every round, and clients that learn from the same table can be stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedloom.client import Client
from fedloom.copies import to_device
from fedloom.errors import ClientError
from fedloom.seeds import SERVER, torch_generator
from fedloom.steps import Descent
from fedloom.types import Batch, Fit, Fixed, Model, Samples, Tensors, Train

__all__ = ["Agree", "Answers", "Drawn", "absolute", "cross_entropy", "divergence", "drawn", "lesson", "numbered"]


@dataclass(frozen=True)
class Answers:
    """The logits of numbered samples: a table of so many rows, zeros where no sample was read."""

    samples: int
    training: bool = False
    passes: ClassVar[int] = 1

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """The batch's rows."""
        logits = model(tensors, batch.x)
        return {"logits": logits.new_zeros(self.samples, logits.shape[1]).index_copy(0, batch.y, logits)}


def absolute(own: Tensor, aim: Tensor) -> Tensor:
    """Mean absolute difference of logits."""
    return (own - aim).abs().mean(-1)


def cross_entropy(own: Tensor, aim: Tensor) -> Tensor:
    """Of logits to probabilities."""
    return -(aim * own.log_softmax(-1)).sum(-1)


def divergence(own: Tensor, aim: Tensor) -> Tensor:
    """KL(aim || own), both logits."""
    said, meant = own.log_softmax(-1), aim.log_softmax(-1)
    return (meant.exp() * (meant - said)).sum(-1)


@dataclass(frozen=True)
class Agree:
    """Objective: how far the answers on numbered samples are from the joint ones."""

    apart: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """Mean and every sample's distance."""
        losses = self.apart(model(tensors, batch.x), fixed["consensus"][batch.y])
        return losses.mean(), losses.detach()


def numbered(public: Samples | None) -> Samples:
    """Public samples with their numbers as labels."""
    if public is None:
        raise ClientError("there are no public images here")
    number = torch.full_like(public.images.y, -1)
    (rows,) = to_device([public.rows], number.device)
    number[rows] = torch.arange(len(public), device=number.device)
    return replace(public, images=replace(public.images, y=number))


class Drawn(NamedTuple):
    """Some of the public samples, their numbers, and how many there are in all."""

    samples: Samples
    numbers: Tensor
    total: int

    def table(self, answers: Tensor) -> Tensor:
        """Their answers by number; zeros for the samples that were not drawn."""
        (numbers,) = to_device([self.numbers], answers.device)
        return answers.new_zeros(self.total, answers.shape[1]).index_copy(0, numbers, answers)


def drawn(client: Client, count: int, round: int) -> Drawn:
    """The public samples that a round is about, the same for everybody; all if there are fewer."""
    public = numbered(client.public)
    generator = torch_generator(client.seed, round, 0, SERVER, "public")
    numbers = torch.randperm(len(public), generator=generator)[:count].sort().values
    return Drawn(replace(public, rows=public.rows[numbers]), numbers, len(public))


def lesson(
    client: Client, tensors: Tensors, table: Tensor, samples: Samples, objective: Agree, train: Train, kind: int = 0
) -> Fit:
    """A fit to the joint answers in the table, on these numbered samples."""
    fixed = client.fixed(consensus=table, lr=client.network.scalar(train.lr))
    plan = client.plan([samples], train=train, purpose="public")
    return Fit(tensors, Descent.of(objective, train), plan, fixed, kind)
