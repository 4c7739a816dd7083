"""Clients judged by the model they last trained (`evaluate.model = "trained"`), not by the one they really use."""

from __future__ import annotations

from fedloom.client import Client
from fedloom.method import Method
from fedloom.policies.moments import completed
from fedloom.questions import evaluate
from fedloom.types import Fitted, Report, Task, Work

__all__ = ["judged", "remembered"]


def remembered(method: Method, client: Client, task: Task) -> Work[Report]:
    """The method's work; the client keeps what it last trained, to be judged by it."""
    half, answer = method.work(client, task), None
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


def judged(method: Method, client: Client, task: Task) -> Work[Report]:
    """How good is what you last trained, on your test part?"""
    if method.share.dropped(client.network) and "trained" in client.state:
        # Its norm statistics are those of the few steps since they were last thrown away.
        client.state["trained"] = yield from completed(client, client.state["trained"])
    return (yield from evaluate(method, client, task))
