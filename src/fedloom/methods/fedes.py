"""FedES: evolution strategies shape each client's sub-network.

Gong et al. 2023, Adaptive federated learning algorithm based on evolution strategies (in Chinese), Sci Sin Inform 53,
https://doi.org/10.1360/SSI-2021-0190; algorithms 1 and 2. The paper gives no short name.

Every client evolves a chromosome of keep rates (policies/chromosome.py). In a round it gets the supernet, its parent
chromosome and an offspring; takes from the supernet, for each of the two, the units that matter most to its validation
data; trains both; drops the smallest weights of linear layers; keeps the one that is right more often on the validation
data, at equality the smaller. The server puts the survivors back where they came from, every element averaged over the
clients that kept it, and evolves (policies/strategy.py).

Choices where the paper is silent or says two things: rates are shares kept; the output layer has no structured gene;
sub-networks are judged after the pruning; a structured gene is at most the device's capacity; the client's own model
is its last survivor. Only the way up is compressed: importance needs the whole supernet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le

from fedloom.client import Client
from fedloom.copies import to_host
from fedloom.encoding import dense
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.chromosome import Genes
from fedloom.policies.cut import Cut, Scored, Whole, scored
from fedloom.policies.moments import completed
from fedloom.policies.strategy import Population, Strategy
from fedloom.readings import Accuracy
from fedloom.registry import register
from fedloom.types import Fit, Measure, Report, Server, Task, Tensors, Work

Share = Annotated[float, Gt(0), Le(1)]


@register("method", "fedes", paper="Gong et al., Sci Sin Inform 2023")
@dataclass(frozen=True)
class FedES(FedAvg):
    """Every client evolves which share of each layer it keeps, and trains that sub-network."""

    first: Annotated[Share, "the first chromosome, the same rate for all genes"] = 0.8
    least: Annotated[Share, "smallest keep rate, g_min"] = 0.05
    sigma: Annotated[float, Ge(0), "first step size of every client; 0: nothing evolves"] = 0.1
    sigma_least: Annotated[float, Gt(0), "smallest step size"] = 0.01
    sigma_most: Annotated[float, Gt(0), "largest step size"] = 0.3
    path_rate: Annotated[Share, "rate of the evolution path and of the step size, alpha_sigma in equations 10, 11"] = (
        0.3
    )
    covariance: Annotated[
        Literal["winners", "survivors", "identity"],
        "C learns from winning offspring; or is equation 7 of one round; or stays the identity (ablation)",
    ] = "winners"
    covariance_rate: Annotated[Share, "how fast C learns from winners"] = 0.2
    redraw: Annotated[bool, "draw a client's validation images anew each round"] = True
    cut: Cut = Scored(score="scale")
    validates: ClassVar[bool] = True
    by_capacity: ClassVar[bool] = False  # by its chromosome

    def check(self) -> None:
        """Genes need a cut to say which units are kept, and an order of their bounds."""
        super().check()
        if isinstance(self.cut, Whole):
            raise InputError("fedes keeps a share of each layer and needs a cut that says which units; leave [cut] out")
        if self.cut.samples:
            raise InputError("fedes scores units on a client's validation images; leave cut.samples out")
        for low, high in (("least", "first"), ("sigma_least", "sigma_most")):
            if getattr(self, low) > getattr(self, high):
                raise InputError(
                    f"method.{low} of fedes must be at most method.{high}; "
                    f"got {getattr(self, low):g} and {getattr(self, high):g}"
                )

    @property
    def strategy(self) -> Strategy:
        """How chromosomes evolve."""
        steps = self.sigma_least, self.sigma_most
        rates = self.path_rate, self.covariance_rate
        return Strategy(self.first, self.least, self.sigma, steps, *rates, self.covariance)

    def population(self, server: Server, fleet: Fleet) -> Population:
        """The chromosomes of all clients and what the strategy knows; at first all alike."""
        if "evolution" in server.memory:
            population: Population = server.memory["evolution"]
            return population
        genes = Genes.of(server.network)
        most = np.ones((fleet.size, len(genes)))
        most[:, : len(genes.groups)] = fleet.columns["capacity"][:, None]
        return self.strategy.begin(most)

    def round(self, server: Server, fleet: Fleet) -> Server:
        """Algorithm 1: send, join the survivors, evolve."""
        joined, names = self.merge.begin(server), Genes.of(server.network).names
        tried = {}
        form = replace(fleet.form, numbers={**fleet.form.numbers, **dict.fromkeys([*names, "won"], 0.0)})
        for report in fleet.run((self.task(server, fleet, client) for client in self.select(fleet, server)), form=form):
            joined.add(report)
            chromosome = np.array([report.numbers[name] for name in names])
            tried[report.client] = chromosome, bool(report.numbers["won"])
        server.memory["evolution"] = self.strategy.next(self.population(server, fleet), tried)
        return server.next(joined.result())

    def task(self, server: Server, fleet: Fleet, client: int) -> Task:
        """The supernet, the parent chromosome and the offspring's."""
        population = self.population(server, fleet)
        offspring = self.strategy.offspring(population, client, fleet.generator("offspring", int(client)))
        both = {"parent": population["genes"][client], "offspring": offspring}
        task = fleet.task(client, {"model": self.sent(server)})
        return replace(task, tensors={"chromosome": {name: torch.from_numpy(x.copy()) for name, x in both.items()}})

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Algorithm 2; parent first."""
        client = redrawn(client) if self.redraw else client
        whole, genes = (yield from self.start(client)), Genes.of(client.network)
        chromosomes = [each.tolist() for each in to_host(list(client.received("chromosome").values()))]
        scores = None
        if self.cut.reading is not None:
            scores = yield from scored(self.cut.reading, whole, client.normed(client.validation))
        wheres = [
            self.cut(client.network, genes.units(each), task.round, client.generator("cut"), scores)
            for each in chromosomes
        ]
        subnets = [client.network.units.take(whole, where or {}) for where in wheres]
        step, plan = self.step(client), self.plan(client)
        fits = yield tuple(Fit(subnet, step, plan, self.fixed(client, subnet)) for subnet in subnets)
        pruned = [genes.prune(fit.tensors, each) for fit, each in zip(fits, chromosomes, strict=True)]
        left: list[Tensors] = [{name: dense(value) for name, value in each.items()} for each in pruned]
        if self.share.dropped(client.network):  # nobody sends norm statistics: those of a few steps would judge
            for number, tensors in enumerate(left):
                left[number] = yield from completed(client, tensors)
        read = yield tuple(Measure(tensors, Accuracy(), client.validation) for tensors in left)
        right = [float(each.sum()) for each in to_host([each["right"] for each in read])]
        size = [sum(value.numel() for value in each.values()) for each in pruned]
        won = int((right[1], -size[1]) > (right[0], -size[0]))
        client.state["trained"] = left[won]
        report = self.report(client, replace(fits[won], tensors=left[won]), wheres[won])
        numbers = {
            "won": won, "validation_accuracy": right[won] / len(client.validation),
            "forward_macs": client.network.macs(left[won]), **dict(zip(genes.names, chromosomes[won], strict=True)),
        }  # fmt: skip
        return replace(
            report, tensors={name: pruned[won][name] for name in report.tensors}, numbers={**report.numbers, **numbers}
        )

    def final(self, client: Client, task: Task) -> Work[Tensors]:
        """The last survivor; before the first one, what it would start from."""
        return client.state["trained"] if "trained" in client.state else (yield from self.start(client))

    def found(self, server: Server) -> dict[str, Any]:
        """The mean chromosome of the clients that have tried one, gene by gene."""
        population = server.memory.get("evolution")
        if population is None or not population["tried"].any():
            return {}
        mean = population["genes"][population["tried"] > 0].mean(axis=0)
        return dict(zip(Genes.of(server.network).names, mean.tolist(), strict=True))


def redrawn(client: Client) -> Client:
    """The client with its training and validation images shuffled together and divided anew."""
    rows = torch.cat([client.train.rows, client.validation.rows])
    rows, held = rows[torch.randperm(len(rows), generator=client.generator("validation"))], len(client.validation)
    train, validation = replace(client.train, rows=rows[held:]), replace(client.validation, rows=rows[:held])
    return replace(client, train=train, validation=validation)
