"""Gossip averaging: Lian et al., Can decentralized algorithms outperform centralized algorithms?, NeurIPS 2017.

Each round a participant joins its model with those its neighbours had at the end of the last one, by Metropolis weights
(Xiao and Boyd 2004), and trains on. What a neighbour that is absent would have counted stays with the own model. The
paper mixes after every step; here after every round of local training. There is no global model.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.client import Client
from fedloom.encoding import dense
from fedloom.errors import InputError
from fedloom.methods.peers import Peer
from fedloom.policies.topology import Graph, Topology, metropolis
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Fit, Report, Task, Tensors, Work

__all__ = ["Gossip", "mixed"]


def mixed(own: Tensors, others: dict[int, Tensors], weights: dict[int, float]) -> Tensors:
    """The own model and the others' by their weights, added in float64; what others do not share stays."""
    joined = dict(own)
    for name in {name for other in others.values() for name in other}:
        total = own[name].double()
        for sender in sorted(others):
            if name in others[sender]:
                total = total + weights[sender] * (others[sender][name].double() - own[name].double())
        joined[name] = (total if own[name].is_floating_point() else total.round()).to(own[name].dtype)
    return joined


@register("method", "gossip", paper="Lian et al., NeurIPS 2017; weights: Xiao and Boyd 2004")
@dataclass(frozen=True)
class Gossip(Peer):
    """Neighbours in a graph average their models, without a server."""

    topology: Topology = Graph(shape="ring")

    def check(self) -> None:
        """Weights belong to a graph in which both ends of an edge exchange."""
        super().check()
        if not isinstance(self.topology, Graph):
            raise InputError('gossip averages over a graph: topology.name = "graph"')

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Mix, then train."""
        own, others = client.whole, dict[int, Tensors]()
        for sender, report in task.inbox.items():
            others[sender] = {name: dense(value) for name, value in report.tensors.items()}
        degrees = {sender: int(task.numbers[f"degree {sender}"]) for sender in others}
        own = mixed(own, others, metropolis(int(task.numbers[f"degree {client.id}"]), degrees))
        fit = yield Fit(own, Descent.of(self.loss(), task.train), client.plan(), self.fixed(client, own))
        return self.handed(client, [fit])
