"""Tasks on their way to the clients: what reaches them, and who will never answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from fedloom import wire
from fedloom.network import Network
from fedloom.types import Outcome, Task, Tensors

__all__ = ["Turns", "arrived", "unanswered"]


def arrived(task: Task, network: Network) -> Task:
    """The task as it reaches the client: the base's parts, cut to the client's units."""
    if task.base is None:
        return task
    parts: dict[str, Tensors] = {}
    for part, tensors in task.base.items():
        chosen = tensors if task.only is None else {name: tensors[name] for name in task.only if name in tensors}
        parts[part] = network.units.take(chosen, task.where) if task.where else chosen
    return replace(task, base=None, tensors={**parts, **task.tensors})


def unanswered(task: Task, network: Network) -> Outcome:
    """What becomes of a task that was sent and that nobody answers."""
    sent = wire.size(arrived(task, network))
    return Outcome(task.client, task.round, task.stage, task.job, download_bytes=sent)


class Turns:
    """Tasks on their way to an engine, which pulls them ahead of its outcomes by more or less.

    >>> turns = Turns([Task(client, 0) for client in range(4)], lambda task: task.client == 1)
    >>> [task.client for task in turns]
    [0, 2, 3]
    >>> [[task.client for task in turns.passed()] for _ in range(3)]
    [[], [1], []]
    """

    def __init__(self, tasks: Iterable[Task], silent: Callable[[Task], bool]) -> None:
        self._tasks, self._silent = tasks, silent
        self._turns = deque[Task | None]()  # one that nobody will answer, or None

    def __iter__(self) -> Iterator[Task]:
        """Those that somebody will answer."""
        for task in self._tasks:
            silent = self._silent(task)
            self._turns.append(task if silent else None)
            if not silent:
                yield task

    def passed(self) -> list[Task]:
        """Those that nobody answers, up to the next that somebody does, whose turn is over then."""
        return list(iter(lambda: self._turns.popleft() if self._turns else None, None))
