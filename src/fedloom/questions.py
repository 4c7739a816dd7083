"""What the server may ask clients besides their work. A question changes no state; the answer is a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedloom.client import Client
from fedloom.readings import Accuracy
from fedloom.types import Fitted, Measure, Report, Task, Work

__all__ = ["QUESTIONS", "evaluate", "remembered", "test"]


def evaluate(method: Any, client: Client, task: Task) -> Work[Report]:
    """How good is the model you really use (or the one you last trained, where that is kept), on your test part?"""
    tensors = client.state.get("trained") or (yield from method.final(client, task))
    read = yield Measure(tensors, Accuracy(), client.test)
    count = float(read["samples"].sum())
    numbers = {"accuracy": float(read["right"].sum()) / count, "loss": float(read["loss"]) / count, "samples": count}
    return Report(numbers=numbers, weight=count)


def test(method: Any, client: Client, task: Task) -> Work[Report]:
    """How good is the model as it was sent, on your test part?"""
    read = yield Measure((yield from method.start(client)), Accuracy(), client.test)
    return Report(numbers={"right": float(read["right"].sum()), "samples": float(read["samples"].sum())})


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


QUESTIONS: dict[str, Callable[[Any, Client, Task], Work[Report]]] = {"evaluate": evaluate, "test": test}
