"""Trainers of several models: a request goes to the one whose model it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedloom.engine.worker import Trainer

__all__ = ["Several"]


class Several:
    """One trainer a model of the study's list, in its order."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.trainers, self.window = trainers, trainers[0].window

    def close(self) -> None:
        """All let go of what they made for the run."""
        for trainer in self.trainers:
            trainer.close()

    def solve(self, requests: Sequence[Any]) -> list[Any]:
        """One answer a request; each trainer sees all that are about its model at once."""
        answers: dict[int, Any] = {}
        for kind, trainer in enumerate(self.trainers):
            numbers = [number for number, request in enumerate(requests) if request.kind == kind]
            if numbers:
                solved = trainer.solve([requests[number] for number in numbers])
                answers |= dict(zip(numbers, solved, strict=True))
        return [answers[number] for number in range(len(requests))]
