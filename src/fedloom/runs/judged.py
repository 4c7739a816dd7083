"""Clients judged by the model they last trained (`evaluate.model = "trained"`), not by the one they really use."""

from __future__ import annotations

from collections.abc import Callable

from fedloom.client import Client
from fedloom.types import Fitted, Report, Task, Work

__all__ = ["remembered"]


def remembered(work: Callable[[Client, Task], Work[Report]], client: Client, task: Task) -> Work[Report]:
    """The same work; the client keeps what it last trained, to be judged by it."""
    half, answer = work(client, task), None
    while True:
        try:
            asked = half.send(answer)
        except StopIteration as stop:
            report: Report = stop.value
            return report
        answer = yield asked
        for each in answer if isinstance(answer, tuple) else (answer,):
            if isinstance(each, Fitted):
                client.state["trained"] = each.tensors
