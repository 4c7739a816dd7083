"""Sketch of FedES: two candidate sub-networks side by side; the better one travels, sparse, with its mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedloom.client import Client
from fedloom.encoding import Sparse, Value
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.readings import Accuracy
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Fit, Measure, Report, Server, Task, Tensors, Work


@register("method", "sketch_fedes")
@dataclass(frozen=True)
class SketchFedES(FedAvg):
    """Parent and offspring keep different shares of the units; the winner's share is inherited."""

    spread: float = 0.1
    pruned: float = 0.5

    def round(self, server: Server, fleet: Fleet) -> Server:
        """Join the winners and remember their genes."""
        joined = self.merge.begin(server)
        genes = dict(server.memory.get("genes", {}))
        for report in fleet.run(self.task(server, fleet, client) for client in self.select(fleet, server)):
            joined.add(report)
            genes[report.client] = report.numbers["gene"]
        server.memory["genes"] = genes
        return server.next(joined.result())

    def task(self, server: Server, fleet: Fleet, client: int) -> Task:
        """The whole supernet, the parent gene and the offspring's."""
        parent = server.memory.get("genes", {}).get(int(client), 0.8)
        child = float(min(1.0, max(0.05, parent + self.spread * fleet.generator("gene", int(client)).normal())))
        return fleet.task(client, {"model": self.sent(server)}, numbers={"parent": parent, "child": child})

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Train both, prune both, keep the one with the better validation accuracy."""
        whole, units = client.received(), client.network.units
        genes = [task.numbers["parent"], task.numbers["child"]]
        wheres = [{group: torch.arange(kept) for group, kept in units.kept(gene).items()} for gene in genes]
        step, plan = Descent.of(self.loss(), task.train), client.plan()
        fits = yield tuple(Fit(units.take(whole, where), step, plan, {"lr": client.rate}) for where in wheres)
        sparse = [self._prune(fit.tensors) for fit in fits]
        dense = [{n: v.decode() if isinstance(v, Sparse) else v for n, v in each.items()} for each in sparse]
        read = yield tuple(Measure(tensors, Accuracy(), client.validation) for tensors in dense)
        best = max(range(2), key=lambda number: (float(read[number]["right"].sum()), -genes[number]))
        numbers = {**fits[best].numbers, "gene": genes[best]}
        return Report(sparse[best], float(client.samples), numbers, wheres[best])

    def _prune(self, tensors: Tensors) -> dict[str, Value]:
        matrices = {name: t.abs() for name, t in tensors.items() if t.ndim == 2}
        kept = {name: size >= size.flatten().quantile(self.pruned) for name, size in matrices.items()}
        return {n: Sparse.of(t, kept[n], partial=True) if n in kept else t for n, t in tensors.items()}
