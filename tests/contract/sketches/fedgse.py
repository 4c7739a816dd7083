"""Sketch of FedGSE: the server scores units by gradients on public data that resembles the client's."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from fedloom.encoding import dense
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.registry import register
from fedloom.types import Batch, Measure, Model, Report, Server, Task, Tensors
from fedloom.units import gradients


@dataclass(frozen=True)
class Gradients:
    """FedGSE's score of every unit, and the labels that a client's last sub-model would give."""

    labeller: Tensors
    training: bool = True

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        guess = model({n: t.clone() for n, t in self.labeller.items()}, batch.x).argmax(1)
        network = model.network
        return gradients(network.units, network.module, tensors, batch.x, guess, loss=F.cross_entropy)


@register("method", "sketch_fedgse")
@dataclass(frozen=True)
class SketchFedGSE(FedAvg):
    """The client gets the units whose gradients are largest on data that look like its own."""

    def round(self, server: Server, fleet: Fleet) -> Server:
        """As FedAvg; every client's last sub-model is remembered."""
        joined, last = self.merge.begin(server), dict(server.memory.get("last_reports", {}))
        for report in fleet.run(self.task(server, fleet, client) for client in self.select(fleet, server)):
            joined.add(report)
            last[report.client] = Report(report.tensors, where=report.where)
        server.memory["last_reports"] = last
        return server.next(joined.result())

    def task(self, server: Server, fleet: Fleet, client: int) -> Task:
        """Score on the public data, keep the best units."""
        seen = server.memory.get("last_reports", {}).get(int(client))
        labeller = {n: dense(v) for n, v in seen.tensors.items()} if seen else server.tensors
        (scores,) = fleet.solve(Measure(server.tensors, Gradients(labeller), fleet.home.train))
        kept = server.network.units.kept(float(fleet.columns["capacity"][client]))
        where = {group: scores[group].topk(count).indices.sort().values for group, count in kept.items()}
        return fleet.task(client, {"model": self.sent(server)}, where=where)
