"""A tiny federation made by hand: a network, pictures, clients and a place where they work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.client import Client
from fedloom.engine.local import Local
from fedloom.engine.reference import Reference
from fedloom.fleet.fleet import Fleet
from fedloom.fleet.nonsense import Form
from fedloom.network import Network
from fedloom.policies.merge import Mean
from fedloom.types import Images, Named, Samples, Task, Train

SIDE, CLASSES = 6, 3


class Normed(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 5, 3)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(x)).mean((2, 3)))


class Plain(nn.Module):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(SIDE * SIDE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1))


def network_of(make: Callable[[], nn.Module] = Normed, dtype: torch.dtype = torch.float32) -> Network:
    return Network(make, (1, SIDE, SIDE), CLASSES, dtype=dtype)


def images_of(count: int = 60, dtype: torch.dtype = torch.float32, seed: int = 0) -> Images:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (count, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    y = torch.randint(CLASSES, (count,), generator=generator)
    mean, std = (torch.full((1, 1, 1), value, dtype=dtype) for value in (0.4, 0.3))
    return Images(x, y, mean, std)


def client_of(rows: Sequence[int], network: Network | None = None, images: Images | None = None, **task: Any) -> Client:
    images = images or images_of()
    empty = Samples(images, torch.arange(0))
    made = Task(**{"client": 0, "round": 0} | task)
    return Client(made.client, made, 7, network or network_of(), Samples(images, torch.tensor(rows)), empty, empty)


class Place:
    """Where the clients' data are: rows of the pictures, by client."""

    filter, merge, deadline, form = None, Mean(), None, Form(units=True)

    def __init__(
        self, network: Network, images: Images, rows: Sequence[Sequence[int]], jobs: Mapping[str, Any]
    ) -> None:
        self.network, self.images, self.jobs = network, images, jobs
        self.rows = [torch.tensor(each) for each in rows]
        self.trainer = Reference(network)

    def client(self, task: Task, state: dict[str, Any]) -> Client:
        train, empty = Samples(self.images, self.rows[task.client]), Samples(self.images, torch.arange(0))
        return Client(task.client, task, 7, self.network, train, empty, train, 1.0, state)


def fleet_of(place: Place, engine: Any = None, *, quorum: float = 0.5, train: Train | None = None) -> Fleet:
    columns = {"samples": np.array([float(len(each)) for each in place.rows]), "capacity": np.ones(len(place.rows))}
    home = place.client(Task(0, 0), {})
    names = Named("test"), Named("test")
    fleet = Fleet(
        columns,
        engine or Local(lambda: place),
        place.network,
        home,
        seed=7,
        names=names,
        quorum=quorum,
        form=place.form,
    )
    fleet.begin(0, train or Train())
    return fleet
