"""What the server may ask clients besides their work. A question changes no state; the answer is a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedloom.client import Client
from fedloom.readings import Accuracy
from fedloom.types import Measure, Report, Task, Work

__all__ = ["QUESTIONS", "evaluate", "loss"]


def evaluate(method: Any, client: Client, task: Task) -> Work[Report]:
    """How good is the model you really use, on your own test part?"""
    tensors = yield from method.final(client, task)
    read = yield Measure(tensors, Accuracy(), client.test)
    count = float(read["samples"].sum())
    numbers = {"accuracy": float(read["right"].sum()) / count, "loss": float(read["loss"]) / count, "samples": count}
    return Report(numbers=numbers, weight=count)


def loss(method: Any, client: Client, task: Task) -> Work[Report]:
    """How well does the model you would use fit your training data, or `samples` of them, as training would see it?"""
    tensors = yield from method.final(client, task)
    read = yield Measure(tensors, Accuracy(training=True), client.some(int(task.numbers.get("samples", 0)), "loss"))
    count = float(read["samples"].sum())
    return Report(numbers={"loss": float(read["loss"]) / count}, weight=count)


QUESTIONS: dict[str, Callable[[Any, Client, Task], Work[Report]]] = {"evaluate": evaluate, "loss": loss}
