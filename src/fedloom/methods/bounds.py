"""The two bounds that every study needs: no federation at all, and all data in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedloom.client import Client
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.peers import Peer
from fedloom.methods.unasked import refuse
from fedloom.policies.select import First, Select
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Fit, Report, Server, Task, Train, Work

__all__ = ["Central", "Local", "in_one_place"]


@register("method", "local")
@dataclass(frozen=True)
class Local(Peer):
    """No federation: every client trains a model of its own, from the common initial one."""

    mixes: ClassVar[bool] = True

    def check(self) -> None:
        """Nobody shares anything."""
        super().check()
        refuse(self, ("share",), "sends no tensors, so that there is nothing to share")

    def round(self, server: Server, fleet: Fleet) -> Server:
        """Everybody who is selected trains on; nothing is exchanged but the request and its numbers."""
        for _ in fleet.run(fleet.task(client) for client in self.select(fleet, server)):
            pass
        return server.next(server.tensors)

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Go on with the own model."""
        own = client.whole
        fit = yield Fit(own, Descent.of(self.loss(), task.train), client.plan(), self.fixed(client, own))
        client.keep(fit.tensors)
        return Report(weight=float(client.samples), numbers=fit.numbers)


@register("method", "central")
@dataclass(frozen=True)
class Central(FedAvg):
    """All clients' training data in one place: what federation could reach at best."""

    select: Select = First()
    pooled: ClassVar[bool] = True
    trainers: ClassVar[tuple[str, ...]] = ("reference", "taped", "graphs")  # one who trains: nothing to stack

    def check(self) -> None:
        """One place holds all data."""
        super().check()
        in_one_place(self.select, "central")
        refuse(self, ("start", "merge"), "trains one model in one place, which starts from itself and joins nothing")

    def takes(self, train: Train) -> None:
        """Nobody does less than others where there is only one."""
        if train.uneven:
            raise InputError("central trains in one place, where nobody does less than others; leave train.uneven out")


def in_one_place(select: Select, method: str) -> None:
    """Refuse a selection where there is nobody to select."""
    if not isinstance(select, First):
        raise InputError(f"{method} trains in one place on all data and selects nobody; leave [select] out")
