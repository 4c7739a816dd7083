"""FedEA: Zhu and Jin, Multi-objective evolutionary federated learning, IEEE TNNLS 2020.

NSGA-II at the server looks for structures that are both right and small. An individual is a structure (a keep rate for
every group of units of the study's model) and a learning rate. It is judged by a short federation of its own: FedAvg
from fresh weights for `rounds_each` rounds, then the error of the joint model on the clients' validation images; the
second goal is its number of parameters. One round is one round of every individual. Then the better half of parents
and offspring stays, and has offspring.

Keep rates are coded in bits, which cross at one point and flip; the learning rate is a real number, with simulated
binary crossover and polynomial mutation. The result is the most accurate individual that has been judged; `found` in
the summary has its rates and learning rate, and the front of all that were judged. A model of that structure is
`narrowed`.

Differences. The paper also varies the number of layers and a sparse connectivity (SET); here a structure is the widths
of a given model, a byte each. Individuals of the first generation are spread over the range of every gene: only a small
part of the learning rates is any good, and a small population drawn freely may have none of it. Errors are measured on
validation images, not on test images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import nn

from fedloom.client import Client
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet
from fedloom.fleet.nonsense import Form
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.unasked import refuse
from fedloom.models.narrowed import remade
from fedloom.models.resolve import initialise
from fedloom.network import Network
from fedloom.policies.cut import check_units
from fedloom.policies.front import children, nondominated, require, spread, survivors
from fedloom.policies.share import AllTensors
from fedloom.questions import QUESTIONS
from fedloom.readings import Accuracy
from fedloom.registry import register
from fedloom.types import Measure, Report, Server, Task, Tensors, Where, Work

Individual = dict[str, Any]  # genes (in [0, 1]), tensors (of its own width), memory; once judged error, parameters; out


def validate(method: Any, client: Client, task: Task) -> Work[Report]:
    """How often is this model right on your validation images?"""
    tensors = yield from method.start(client)
    read = yield Measure(tensors, Accuracy(), client.validation)
    return Report(numbers={"right": float(read["right"].sum()), "samples": float(read["samples"].sum())})


QUESTIONS[validate.__name__] = validate
SHOWN = ("genes", "error", "parameters")  # what the front remembers of an individual


@register("method", "fedea", paper="Zhu and Jin, IEEE TNNLS 2020")
@dataclass(frozen=True)
class FedEA(FedAvg):
    """Search for small and accurate structures by NSGA-II, each judged by a short federation."""

    population: Annotated[int, Ge(2), "individuals of a generation"] = 20
    rounds_each: Annotated[int, Ge(1), "rounds of the federation that judges an individual"] = 5
    least: Annotated[float, Gt(0), Le(1), "smallest keep rate of a group of units"] = 0.05
    slowest: Annotated[float, Gt(0), "the learning rate is between train.lr times this ..."] = 0.1
    fastest: Annotated[float, Gt(0), "... and train.lr times this, on a logarithmic scale"] = 10.0
    search: Annotated[Literal["nsga2", "random"], "offspring by evolution, or at random: what evolution must beat"] = (
        "nsga2"
    )
    validates: ClassVar[bool] = True
    one_model: ClassVar[bool] = False

    def check(self) -> None:
        """Structures are what it looks for."""
        super().check()
        require()
        refuse(self, ("cut",), "chooses units by its own search and cannot run under a cut")
        if type(self.share) is not AllTensors:
            raise InputError("fedea judges whole models at the server and cannot keep tensors back; leave [share] out")
        refuse(self, ("start",), "trains every individual from its own first weights")
        if self.slowest > self.fastest:
            raise InputError(
                f"method.slowest of fedea must be at most method.fastest; got {self.slowest:g} and {self.fastest:g}"
            )

    def suits(self, network: Network) -> None:
        """Its units must be found."""
        check_units(network, "fedea")

    def rates(self, network: Network, individual: Individual) -> dict[str, float]:
        """The keep rate of every group."""
        genes = individual["genes"][:-1]
        return dict(zip(network.units.sizes, (self.least + (1 - self.least) * genes).tolist(), strict=True))

    def where_of(self, network: Network, individual: Individual) -> Where:
        """The first units of every group: all units of a model that is not trained are alike."""
        kept = network.units.kept(self.rates(network, individual))
        return {group: torch.arange(number) for group, number in kept.items()}

    def rate(self, individual: Individual) -> float:
        """How many times the study's learning rate."""
        return float(self.slowest * (self.fastest / self.slowest) ** individual["genes"][-1])

    def round(self, server: Server, fleet: Fleet) -> Server:
        """One round of every individual; at the end of a generation, judge and breed."""
        network, memory = server.network, server.memory
        cohort = list(self.select(fleet, server))  # all individuals are judged by the same clients
        tried: list[Individual] = memory.get("offspring") or self._fresh(
            spread(self.population, len(network.units.sizes) + 1, fleet.generator("population")), server, fleet
        )
        memory["offspring"] = tried = self._train(server, fleet, tried, cohort)
        memory.setdefault("judged", [])
        if (server.round + 1) % self.rounds_each == 0:
            judged = self._judged(server, fleet, tried, cohort)
            seen = [*memory.get("front", []), *({name: each[name] for name in SHOWN} for each in judged)]
            memory["front"] = [seen[number] for number in nondominated(_goals(seen))]
            everyone = [*memory["judged"], *judged]
            kept = survivors(_goals(everyone), min(self.population, len(everyone)))
            memory["judged"] = [everyone[number] for number in kept]
            memory["offspring"] = self._fresh(self._genes(memory["judged"], fleet), server, fleet)
        return server.next(server.tensors)

    def _genes(self, judged: Sequence[Individual], fleet: Fleet) -> np.ndarray:
        parents, generator = np.stack([each["genes"] for each in judged]), fleet.generator("offspring")
        if self.search == "random":
            return generator.random((self.population, parents.shape[1]))
        return children(parents, _goals(judged), self.population, generator, parents.shape[1] - 1)

    def _fresh(self, genes: np.ndarray, server: Server, fleet: Fleet) -> list[Individual]:
        """Individuals of these genes with the first weights of models that are built at their widths.

        Those of the whole model, cut to the widths, would be too small: layers are initialised by their width.
        """
        network, made = server.network, list[Individual]()

        def build(where: Where) -> nn.Module:
            module = network.build()
            return remade(module, network.units.take(module.state_dict(), where))

        for own in genes:
            where = self.where_of(network, {"genes": own})
            made.append({"genes": own, "tensors": network.placed(initialise(partial(build, where), fleet.seed))})
        return made

    def _tasks(
        self, server: Server, fleet: Fleet, cohort: Sequence[int], number: int, individual: Individual
    ) -> Iterator[Task]:
        """One individual for every client of the cohort."""
        where, parts = self.where_of(server.network, individual), {"model": individual["tensors"]}
        for client in cohort:
            task = fleet.task(client, parts, numbers={"individual": number})
            train = replace(task.train, lr=task.train.lr * self.rate(individual))
            # Already cut: the units are told, so that the report can say where it belongs.
            yield replace(task, base=None, tensors=task.base or {}, where=where, train=train)

    def _train(
        self, server: Server, fleet: Fleet, tried: Sequence[Individual], cohort: Sequence[int]
    ) -> list[Individual]:
        """One after another, as a client would have to: its time adds up, and its last report is of the last one.

        An individual without a quorum of usable reports, as at a rate too high, is out; where all are, so is the run.
        """
        units, trained = server.network.units, []
        for number, individual in enumerate(tried):
            if "out" in individual:
                trained.append(individual)
                continue
            where, failed, answered = self.where_of(server.network, individual), len(fleet.failed), 0
            full = units.place(individual["tensors"], where, server.tensors)
            memory = dict(individual.get("memory", {}))  # of a server's optimiser, which is each individual's own
            joined = self.merge.begin(replace(server, tensors=full, memory=memory))
            tasks, form = self._tasks(server, fleet, cohort, number, individual), replace(fleet.form, units=True)
            for report in fleet.run(tasks, quorum=0.0, form=form):
                joined.add(report)
                answered += 1
            asked = answered + len(fleet.failed) - failed
            if answered >= fleet.quorum * asked:
                trained.append({**individual, "tensors": units.take(joined.result(), where), "memory": memory})
            else:
                trained.append({**individual, "out": True})
                if all("out" in each for each in (*trained, *tried[number + 1 :])):
                    fleet.require(answered, asked, fleet.quorum)
        return trained

    def _judged(
        self, server: Server, fleet: Fleet, tried: Sequence[Individual], cohort: Sequence[int]
    ) -> list[Individual]:
        """With both goals; an individual that is out, or that nobody could judge, is as bad as can be."""
        units, judged = server.network.units, []
        for number, individual in enumerate(tried):
            right = samples = 0.0
            tasks = () if "out" in individual else self._tasks(server, fleet, cohort, number, individual)
            for answer in fleet.ask("validate", tasks, Form({"right": 0.0, "samples": 0.0})):
                right += answer.numbers["right"]
                samples += answer.numbers["samples"]
            rates = self.rates(server.network, individual) if samples else {}
            goals = {"error": 1 - right / max(samples, 1.0), "parameters": units.num_parameters(units.kept(rates))}
            judged.append({**{name: individual[name] for name in individual.keys() - {"memory"}}, **goals})
        return judged

    def work(self, client: Client, task: Task) -> Work[Report]:
        """FedAvg's, of the width that was sent; the report says whose it is."""
        report = yield from super().work(client, task)
        return replace(report, numbers={**report.numbers, **task.numbers})

    def best(self, server: Server) -> Individual | None:
        """The most accurate one that has been judged, at equality the smallest; before, the first."""
        judged: list[Individual] = server.memory.get("judged") or []
        if judged:
            return min(judged, key=lambda each: (each["error"], each["parameters"]))
        return next(iter(server.memory.get("offspring", [])), None)

    def model(self, server: Server) -> Tensors | None:
        """The best individual's."""
        best = self.best(server)
        return server.tensors if best is None else dict(best["tensors"])

    def evaluation(self, server: Server) -> Tensors:
        """Clients are sent the best individual."""
        return self.model(server) or {}

    def recipe(self, line: str, shape: tuple[int, ...], classes: int, found: Mapping[str, Any]) -> str:
        """At the width of the best individual."""
        return f"fedloom.models.narrowed.narrow({line}, {shape}, {found['rates']})" if found else line

    def found(self, server: Server) -> dict[str, Any]:
        """The best structure, as settings of a study, and the front of all that were judged."""
        front: list[Individual] = server.memory.get("front") or []
        best = self.best(server)
        if best is None or not front:
            return {}
        return {
            "rates": list(self.rates(server.network, best).values()), "lr_factor": self.rate(best),
            "front": sorted(({"error": each["error"], "parameters": each["parameters"],
                              "rates": list(self.rates(server.network, each).values()), "lr_factor": self.rate(each)}
                             for each in front), key=lambda each: each["parameters"]),
        }  # fmt: skip


def _goals(individuals: Sequence[Individual]) -> np.ndarray:
    """What is minimised: error and number of parameters, a row an individual."""
    return np.array([[each["error"], float(each["parameters"])] for each in individuals])
