"""FedAMP: Huang et al., Personalized cross-silo federated learning on non-IID data, AAAI 2021.

The server keeps the model w_i of every client and sends each its own mixture: u_i = sum_j xi_ij w_j with xi_ij = alpha
exp(-||w_i - w_j||^2 / sigma) / sigma for the others and the rest for itself (equations 3 to 5), so that models which
are alike draw each other nearer. The client minimises F_i(w) + lambda / (2 alpha) ||w - u_i||^2 (equation 6) from u_i.
Where the others' weights would exceed 1, they are scaled to 1. A client uses its w_i.

The paper leaves sigma open, and distances grow with the size of a model: a number that suits one lets the clients of
another train alone. So by default the median of the round's squared distances is the unit: sigma is that, and alpha so
many times it, thus xi_ij = alpha exp(-||w_i - w_j||^2 / median). A mean would be that of the few who are far away.

A known port loses the gradient of the pull and never loads u, so that its FedAMP is local training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any

import torch
from annotated_types import Gt
from torch import Tensor

from fedloom.client import Client
from fedloom.copies import to_host
from fedloom.encoding import dense
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.unasked import refuse
from fedloom.policies.objective import Objective, Proximal, Sum
from fedloom.registry import register
from fedloom.types import Fitted, Report, Server, Task, Tensors, Where, Work


def distances(models: Mapping[str, Tensors], of: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """How far (squared) the models of some clients are from those of all others; looked at once."""
    # In the order of clients, so that sums do not depend on who reported first.
    order = sorted(models, key=int)
    vectors = {key: torch.cat([models[key][name].double().flatten() for name in names]) for key in order}
    pairs = list(dict.fromkeys(frozenset((one, other)) for one in of for other in order if other != one))
    apart = dict(zip(pairs, to_host([(vectors[a] - vectors[b]).square().sum() for a, b in pairs]), strict=True))
    return {one: {other: apart[frozenset((one, other))] for other in order if other != one} for one in of}


def usual(apart: Mapping[str, Mapping[str, Tensor]]) -> float:
    """The median of squared distances; 1 where it is 0 or there are none: equal models mix to the same at any sigma."""
    return median([float(square) for row in apart.values() for square in row.values()] or [1.0]) or 1.0


def attention(apart: Mapping[str, Tensor], of: str, alpha: float, sigma: float) -> dict[str, float]:
    """What every client's model counts in the mixture of one of them, by its distances; the weights add up to 1."""
    others = {key: alpha / sigma * float(torch.exp(-square / sigma)) for key, square in apart.items()}
    total = max(1.0, sum(others.values()))
    others = {key: weight / total for key, weight in others.items()}
    return {of: 1 - sum(others.values()), **others}


@register("method", "fedamp", paper="Huang et al., AAAI 2021")
@dataclass(frozen=True)
class FedAMP(FedAvg):
    """Every client has a model of its own; those that are alike draw each other nearer."""

    alpha: Annotated[float, Gt(0), "step of the server towards models that are alike"] = 0.1
    sigma: Annotated[
        float | None, Gt(0), "squared distance at which models cease to be alike; unset: the median, also alpha's unit"
    ] = None
    weight: Annotated[float, Gt(0), "lambda; the client's pull to its mixture is lambda / alpha"] = 0.01

    def check(self) -> None:
        """Distances are between whole models."""
        super().check()
        refuse(self, ("cut",), "compares whole models and cannot run under a cut")
        refuse(self, ("merge",), "keeps every client's model and joins none")

    def round(self, server: Server, fleet: Fleet) -> Server:
        """Algorithm 1: send everybody its mixture, remember what comes back."""
        models = dict(self._models(server))
        cohort = self.select(fleet, server)
        mixed = zip(cohort, self.mixtures(server, [str(client) for client in cohort]), strict=True)
        tasks = (self._told(fleet, client, *each) for client, each in mixed)
        for report in fleet.run(tasks, form=replace(fleet.form, tensors=self.sent(server))):
            models[str(report.client)] = {name: dense(value) for name, value in report.tensors.items()}
        server.memory["models"] = models
        return server.next(server.tensors)

    def task(self, server: Server, fleet: Fleet, client: int) -> Task:
        """The client's mixture; at first the common model."""
        ((mixture, others),) = self.mixtures(server, [str(client)])
        return self._told(fleet, client, mixture, others)

    def mixtures(self, server: Server, clients: Sequence[str]) -> Iterator[tuple[Tensors, float]]:
        """u_i of these clients, and what the others' models count in it; counters are the client's own."""
        models, sent = self._models(server), self.sent(server)
        names = [name for name in sent if name not in server.network.buffers]
        apart = distances(models, [client for client in clients if client in models], names)
        unit = 1.0 if self.sigma else usual(apart)
        for client in clients:
            if client not in models:
                yield sent, 0.0
                continue
            weights = attention(apart[client], client, self.alpha * unit, self.sigma or unit)
            mixture = {
                name: sum(weight * models[key][name].double() for key, weight in weights.items()).to(tensor)  # type: ignore[union-attr]
                if tensor.is_floating_point()
                else models[client][name]
                for name, tensor in sent.items()
            }
            yield mixture, 1 - weights[client]

    def loss(self) -> Objective:
        """Equation 6."""
        return Sum(self.objective, Proximal(self.weight / self.alpha))

    def fixed(self, client: Client, tensors: Tensors) -> dict[str, Any]:
        """The anchor is the mixture, where the client starts."""
        return super().fixed(client, tensors) | {"anchor": client.trained(tensors)}

    def report(self, client: Client, fit: Fitted, where: Where | None = None) -> Report:
        """The client keeps its model too: it is what it uses. It tells the weight of the others for the ledger."""
        client.keep(fit.tensors)
        report = super().report(client, fit, where)
        return replace(report, numbers={**report.numbers, **client.task.numbers})

    def final(self, client: Client, task: Task) -> Work[Tensors]:
        """The own model, in the network's order."""
        return client.whole
        yield

    def evaluation(self, server: Server) -> Tensors:
        """Nothing travels: clients have what they use."""
        return {}

    def model(self, server: Server) -> Tensors | None:
        """There is no global model."""
        return None

    def _told(self, fleet: Fleet, client: int, mixture: Tensors, others: float) -> Task:
        return replace(fleet.task(client, numbers={"others": others}), tensors={"model": mixture})

    def _models(self, server: Server) -> dict[str, Tensors]:
        models: dict[str, Tensors] = server.memory.get("models", {})
        return models
