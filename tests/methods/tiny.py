"""A federation small enough to compute by hand, through the same doors as a user's: study, run, folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedloom.methods.fedavg import FedAvg
from fedloom.models.resolve import build
from fedloom.runs import start
from fedloom.runs.result import Result
from fedloom.runs.study import Study, resolve
from fedloom.runs.world import World, world_of
from fedloom.types import Report, Server, Task, Train
from tests.contract.study import final, rows

Tensors = dict[str, Tensor]
BASE: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "limit": 120, "validation": 0.0},
    "model": {"name": "mlp", "hidden": [8]},
    "partition": {"name": "dirichlet:0.5"},
    "fleet": {"clients": 3},
    "train": {"lr": 0.1, "batch_size": 16},
    "engine": {"name": "local", "precision": "float64"},
    "run": {"rounds": 2, "seed": 1},
}
NORMED = {"model": {"name": "lenet5_bn", "hidden": None}, "engine": {"precision": "float32"}}


def sections_of(method: str, out: Path | str = "unused", /, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base study with changes; a value of None takes a setting away."""
    sections = {name: dict(values) for name, values in BASE.items()}
    for name, values in changes.items():
        sections.setdefault(name, {}).update(values)
    sections["method"] = {"name": method, **changes.get("method", {})}
    sections["run"]["out"] = str(out)
    return {s: {key: value for key, value in v.items() if value is not None} for s, v in sections.items()}


def study_of(method: str, out: Path | str = "unused", /, **changes: Mapping[str, Any]) -> Study:
    return resolve(sections_of(method, out, **changes))


def world(method: str = "fedavg", /, **changes: Mapping[str, Any]) -> World:
    return world_of(study_of(method, **changes).model_dump_json())


def run(method: str, out: Path, /, **changes: Mapping[str, Any]) -> Result:
    return start.start(study_of(method, out, **changes))


def server_of(result: Result) -> Tensors:
    """The server's tensors at the end of a run."""
    mark = "server/tensors/"
    return {name.removeprefix(mark): t for name, t in final(result).items() if name.startswith(mark)}


def begin(place: World) -> Server:
    return Server(0, place.network.initial(place.study.run.seed), place.network)


def batches(place: World, client: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches that a client trains on in a round, as the study says."""
    train = Train(**place.study.train.model_dump(include=set(Train.__dataclass_fields__)))
    for (chosen,) in place.client(Task(client, round, train=train), {}).plan().steps:
        batch = place.images.batch(chosen)
        yield batch.x, batch.y


def gradient(place: World, tensors: Tensors, x: Tensor, y: Tensor) -> Tensors:
    """Of the mean cross-entropy, with nothing of fedloom but the module."""
    data, model = place.dataset, place.study.model
    module = build(model.name, channels=data.channels, classes=data.classes, size=data.size, **model.fields)
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    loss = F.cross_entropy(functional_call(module, leaves, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def descend(place: World, tensors: Tensors, client: int, round: int, mu: float = 0.0) -> tuple[Tensors, int]:
    """Plain SGD (with a proximal term) along a client's batches; gives the steps too."""
    start_at, steps, lr = tensors, 0, place.study.train.lr
    for x, y in batches(place, client, round):
        slopes = gradient(place, tensors, x, y)
        tensors = {n: t - lr * (slopes[n] + mu * (t - start_at[n])) for n, t in tensors.items()}
        steps += 1
    return tensors, steps


def close(one: Tensors, two: Tensors, tolerance: float = 1e-12) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], rtol=0, atol=tolerance), name


def same(one: Tensors, two: Tensors) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def numbers(result: Result) -> list[dict[str, Any]]:
    """The metric rows without bytes: a task names its method and settings, and some names are longer."""
    return [{key: value for key, value in row.items() if "bytes" not in key} for row in rows(result)]


def far(one: Tensors, two: Tensors) -> float:
    """The largest difference of any element."""
    return max(float((tensor.double() - two[name].double()).abs().max()) for name, tensor in one.items())


@dataclass(frozen=True)
class Idle(FedAvg):
    """Clients do nothing at all, fast; used where only the fleet is looked at."""

    tells = {}

    def work(self, client, task):
        broken = os.environ.get("BROKEN_SINCE_ROUND")
        if broken is not None and task.round >= int(broken):
            raise RuntimeError("no power")
        return Report({}, float(client.samples), {"loss": 1.0, "samples": 1.0})
        yield
