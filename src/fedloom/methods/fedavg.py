"""FedAvg: McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017.

Algorithm 1. Where implementations differ we take the paper: clients are weighted by their samples, every local epoch
goes once through shuffled data, a short last batch is trained as it is. Statistics of batch norm are averaged like
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedloom.client import Client
from fedloom.fleet.fleet import Fleet
from fedloom.method import Method
from fedloom.policies.cut import narrow
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Fit, Plan, Report, Server, Step, Task, Work


@register("method", "fedavg", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
class FedAvg(Method):
    """Clients train the global model on their data; the server averages what they learned."""

    by_capacity: ClassVar[bool] = True  # whether a client of capacity 1 trains the whole model

    def round(self, server: Server, fleet: Fleet) -> Server:
        """Algorithm 1, server: choose, send, join."""
        tasks = (self.task(server, fleet, client) for client in self.select(fleet, server))
        return server.next(fleet.join(self.merge, server, tasks).result())

    def task(self, server: Server, fleet: Fleet, client: int) -> Task:
        """What a client is sent: the shared tensors, cut to what it can train."""
        return fleet.task(client, {"model": self.sent(server)}, where=self.where(server, fleet, client))

    def step(self, client: Client) -> Step:
        """One local update."""
        return Descent.of(self.loss(), client.task.train)

    def plan(self, client: Client) -> Plan:
        """The batches of the round."""
        return client.plan()

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Algorithm 1, ClientUpdate."""
        tensors, where = yield from narrow(self.cut, client, (yield from self.start(client)))
        fit = yield Fit(tensors, self.step(client), self.plan(client), self.fixed(client, tensors))
        return self.report(client, fit, where)
