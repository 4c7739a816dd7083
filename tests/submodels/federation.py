"""A federation whose traffic can be looked at: tasks as they arrive, outcomes, and what was asked of the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedloom.client import Client
from fedloom.engine.local import Local
from fedloom.fleet.fleet import Fleet
from fedloom.fleet.outgoing import arrived
from fedloom.runs.world import World, world_of
from fedloom.types import Fit, Named, Outcome, Server, Task, Train, Work
from tests.methods.tiny import study_of

OWN = "examples.own_net:OwnNet"
HERE = "tests.submodels.nets"
FLOAT32 = {"engine": {"precision": "float32"}}


class Spy(Local):
    """The local engine, remembering."""

    def __init__(self, place: World) -> None:
        super().__init__(lambda: place)
        self.tasks: list[Task] = []
        self.outcomes: list[Outcome] = []
        self.requests: list[Any] = []  # of clients and of the server
        solve = self.place.trainer.solve

        def noted(requests: Sequence[Any]) -> list[Any]:
            self.requests += requests
            return solve(requests)

        self.place.trainer.solve = noted

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        def noted() -> Iterator[Task]:
            for task in tasks:
                self.tasks.append(arrived(task, self.place.network))
                yield task

        for outcome in super().run(noted()):
            self.outcomes.append(outcome)
            yield outcome

    def forget(self) -> None:
        self.tasks, self.outcomes, self.requests[:] = [], [], []

    @property
    def fits(self) -> list[Fit]:
        return [request for request in self.requests if isinstance(request, Fit)]


class Federation:
    """A study's world, round by round, by hand."""

    def __init__(self, method: str, /, **changes: Mapping[str, Any]) -> None:
        self.study = study_of(method, **changes)
        self.world: World = world_of.__wrapped__(self.study.model_dump_json())
        self.world.check()
        self.method, self.network = self.world.method, self.world.network
        self.engine = Spy(self.world)
        names = Named(method), Named(self.study.model.name)
        seed, form = self.study.run.seed, self.world.form
        self.fleet = Fleet(
            self.world.columns, self.engine, self.network, self.world.home(), seed=seed, names=names, form=form
        )  # fmt: skip
        self.server = Server(0, self.network.initial(seed), self.network)
        self.train = Train(**self.study.train.model_dump(include=set(Train.__dataclass_fields__)))
        self.fleet.begin(0, self.train)

    def round(self) -> Server:
        """One round; what was noted is of this round."""
        self.engine.forget()
        self.fleet.begin(self.server.round, self.train)
        self.server = self.method.round(replace(self.server, memory=dict(self.server.memory)), self.fleet)
        self.fleet.commit()
        return self.server

    def client(self, number: int, round: int = 0, where: Any = None, only: Any = None) -> Client:
        """A client with the task that the method would give it."""
        self.fleet.begin(round, self.train)
        task = self.method.task(replace(self.server, round=round), self.fleet, number)
        return self.world.client(arrived(task, self.network), {})

    def first_request(self, number: int, round: int = 0) -> Any:
        """What a client asks for first."""
        client = self.client(number, round)
        return next(self.method.work(client, client.task))

    def answer(self, work: Work[Any]) -> Any:
        """Drive a generator of requests to its end."""
        try:
            request = next(work)
            while True:
                request = work.send(solved(self.world, request))
        except StopIteration as end:
            return end.value


def solved(world: World, request: Any) -> Any:
    (answer,) = world.trainer.solve([request])
    if isinstance(answer, Exception):
        raise answer
    return answer


def footprint(
    network: Any, report: Any, names: Iterable[str] | None = None, *, by_class: bool = False
) -> dict[str, Tensor]:
    """One boolean an element of the full model: whether a report brings it."""
    units, shapes, masks = network.units, network.shapes(), {}
    for name, part in report.tensors.items():
        ones = {name: torch.ones(part.shape)}
        full = units.place(ones, report.where or {}, {name: torch.zeros(shapes[name])})[name].bool()
        if by_class and name in units.output:
            held = torch.zeros(len(full), dtype=torch.bool)
            held[report.classes] = True
            full &= held.view(-1, *[1] * (full.ndim - 1))
        masks[name] = full
    return {name: mask for name, mask in masks.items() if names is None or name in names}
