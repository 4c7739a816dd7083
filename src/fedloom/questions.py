"""What the server may ask clients besides their work. A question changes no state; the answer is a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedloom.client import Client
from fedloom.readings import Accuracy, NormMoments
from fedloom.types import Measure, Report, Task, Work

__all__ = ["QUESTIONS", "evaluate", "statistics"]


def evaluate(method: Any, client: Client, task: Task) -> Work[Report]:
    """How good is the model you really use, on your own test part?"""
    tensors = yield from method.final(client, task)
    read = yield Measure(tensors, Accuracy(), client.test)
    count = float(read["samples"].sum())
    numbers = {"accuracy": float(read["right"].sum()) / count, "loss": float(read["loss"]) / count, "samples": count}
    return Report(numbers=numbers, weight=count)


def statistics(method: Any, client: Client, task: Task) -> Work[Report]:
    """Mean and second moment of what enters every batch-norm layer, over your training data (static batch norm)."""
    read = yield Measure(client.received(), NormMoments(), client.train)
    layers = [name.removesuffix(".count") for name in read if name.endswith(".count")]
    moments = {
        f"{layer}.{moment}": (read[f"{layer}.{moment}"] / read[f"{layer}.count"]).to(client.network.dtype)
        for layer in layers
        for moment in ("running_mean", "running_var")
    }
    return Report(moments, weight=float(client.samples))


QUESTIONS: dict[str, Callable[[Any, Client, Task], Work[Report]]] = {"evaluate": evaluate, "statistics": statistics}
