"""Learning rates over rounds."""

from __future__ import annotations

from math import cos, pi

from fedloom.runs.study import Training
from fedloom.types import Train

__all__ = ["rate", "settings"]


def rate(train: Training, round: int, rounds: int) -> float:
    """The rate of a round (counted from 0) of a run of so many rounds.

    >>> [rate(Training(lr=0.4, schedule="step", milestones=[2], decay=0.5), number, 4) for number in range(4)]
    [0.4, 0.4, 0.2, 0.2]
    """
    match train.schedule:
        case "cosine":
            share = (1 + cos(pi * round / rounds)) / 2
            return train.lr * (train.decay + (1 - train.decay) * share)
        case "step":
            return train.lr * train.decay ** sum(round >= milestone for milestone in train.milestones)
        case "exponential":
            return train.lr * train.decay**round
        case _:
            return train.lr


def settings(train: Training, round: int, rounds: int) -> Train:
    """The training settings of a round, with its learning rate."""
    fields = train.model_dump(include=set(Train.__dataclass_fields__))
    return Train(**fields | {"lr": rate(train, round, rounds)})
