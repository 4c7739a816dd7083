"""What the server may ask clients besides their work. A question changes no state; the answer is a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedloom.client import Client
from fedloom.copies import on_host
from fedloom.readings import Accuracy
from fedloom.types import Measure, Report, Task, Work

__all__ = ["QUESTIONS", "evaluate", "test"]


def evaluate(method: Any, client: Client, task: Task) -> Work[Report]:
    """How good is the model you really use (or the one you last trained, where that is kept), on your test part?"""
    tensors = client.state.get("trained") or (yield from method.final(client, task))
    parts = client.groups or {"": client.test}
    reads = on_host((yield tuple(Measure(tensors, Accuracy(), part) for part in parts.values())))
    rights, losses, counts = ([float(read[key].sum()) for read in reads] for key in ("right", "loss", "samples"))
    count = sum(counts)
    numbers = {"accuracy": sum(rights) / count, "loss": sum(losses) / count, "samples": count}
    numbers |= {f"accuracy_{name}": rights[at] / counts[at] for at, name in enumerate(parts) if name}
    return Report(numbers=numbers)


def test(method: Any, client: Client, task: Task) -> Work[Report]:
    """How good is the model as it was sent, on your test part?"""
    (read,) = on_host([(yield Measure((yield from method.start(client)), Accuracy(), client.test))])
    return Report(numbers={"right": float(read["right"].sum()), "samples": float(read["samples"].sum())})


QUESTIONS: dict[str, Callable[[Any, Client, Task], Work[Report]]] = {"evaluate": evaluate, "test": test}
