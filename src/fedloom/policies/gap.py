"""How far is what a sub-model learns from what the whole model would have learned? The FedGSE paper's figures 4.3, 4.4.

From the same server, on the same data and with the same batches, a client trains its sub-model and the whole model.
The gap is the distance between the two, the sub-model put into its place and the rest left as the server sent it; it
is compared with how far the whole model moved. Asked of those who trained in a round, summed over rounds by the run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedloom.client import Client
from fedloom.copies import to_host
from fedloom.encoding import dense
from fedloom.types import Report, Task, Tensors, Work

__all__ = ["WHOLE", "gap"]

WHOLE = "whole"  # the part of the task that holds the server's model, not cut


def gap(method: Any, client: Client, task: Task) -> Work[Report]:
    """How far apart do your sub-model and the whole model end, trained alike?"""
    whole = client.received(WHOLE)
    part: Report = yield from method.work(replace(client, state=dict(client.state)), task)
    free = replace(task, where=None, only=None, tensors={"model": whole})
    strong = replace(client, task=free, capacity=1.0, state=dict(client.state))
    full: Report = yield from method.work(strong, free)
    learned, cut = ({name: dense(value) for name, value in each.tensors.items()} for each in (full, part))
    names = sorted(client.trained(learned))
    placed = client.network.units.place(cut, part.where, whole) if part.where else cut
    ends = {name: placed.get(name, whole[name]) for name in names}
    both = to_host([_distance(learned, ends, names), _distance(learned, whole, names)])
    numbers = dict(zip(("gap", "update"), map(float, both), strict=True))
    return Report(numbers=numbers, weight=float(client.samples))


def _distance(one: Tensors, other: Tensors, names: list[str]) -> Tensor:
    apart = [torch.linalg.vector_norm(one[name].double() - other[name].double()) for name in names]
    length: Tensor = torch.linalg.vector_norm(torch.stack(apart))
    return length
