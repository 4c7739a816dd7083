"""The local engine: everything in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from fedloom.engine import memory
from fedloom.engine.states import States
from fedloom.engine.worker import Workplace, perform
from fedloom.fleet.blocks import Reduction
from fedloom.policies.merge import Merge
from fedloom.registry import register
from fedloom.types import Outcome, Server, Task

__all__ = ["Local", "solve"]


@register("engine", "local")
class Local:
    """All clients in this process, as many at a time as the trainer likes."""

    def __init__(self, factory: Callable[[], Workplace], workers: int = 1) -> None:
        self.place = factory()
        memory.begin(self.place.network.device)
        self.states = States(self.place.network.device, history=False)

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks."""
        waiting = iter(tasks)
        while group := list(islice(waiting, self.place.trainer.window)):
            loaded = [(task, self.states.load(task.client, task.accepted)) for task in group]
            for outcome in perform(self.place, loaded):
                if outcome.state is not None:
                    self.states.propose(outcome.client, (outcome.round, outcome.stage), outcome.state)
                yield outcome

    def reduce(self, merge: Merge, server: Server, settled: bool) -> Reduction | None:
        """Reports are added up as they come."""
        return None

    def solve(self, requests: Sequence[Any]) -> list[Any]:
        """The server's own requests, here."""
        return solve(self.place, requests)

    def roll_call(self) -> dict[str, Any]:
        """Clients neither come nor go."""
        return {}

    def peak_memory(self) -> int | None:
        """This process's peak, or the device's."""
        return memory.highest(self.place.network.device)

    def close(self) -> None:
        """The world outlives its run; what its trainer made for it need not."""
        self.place.trainer.close()


def solve(place: Workplace, requests: Sequence[Any]) -> list[Any]:
    """The answers to the server's own requests; the first that fails is raised."""
    answers = place.trainer.solve(requests)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
