"""FedGSE: sub-models by gradients on public data, chosen at the server.

The server holds public data P and the last sub-model that each client uploaded. SPL (labelled P) keeps the samples that
the client's model labels right; CSL (unlabelled P) takes all with the client's guesses as labels; `samples` of them are
drawn. A unit's score is the magnitude of the loss's gradient by its activation under the whole global model, summed
over samples before the magnitude is taken and over positions afterwards (equation 4-3; a shared group: over its points
too). The client is sent the ceil(r m) units that score highest. Theorem 1: per layer this choice makes the gradient
that is lost smallest. For a client that was never seen, or for which SPL keeps fewer than two, the samples are drawn
from all of P. All passes use batch statistics, so units that only a linear layer with batch norm behind it reads
(`lenet5_bn`) all score zero but for rounding, and the first of them are chosen: batch norm makes the summed gradient
vanish.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from fedloom.copies import on_host, to_device, to_host
from fedloom.encoding import dense
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.unasked import refuse
from fedloom.network import Network
from fedloom.policies.cut import Scored, check_units
from fedloom.policies.merge import Mean, Merge
from fedloom.policies.objective import Masked, Objective
from fedloom.policies.score import Gradient, Predictions
from fedloom.policies.share import Share, Static
from fedloom.registry import register
from fedloom.types import Measure, Report, Samples, Server, Tensors, Where


@register("method", "fedgse", paper="FedGSE (sub-models by gradients)")
@dataclass(frozen=True)
class FedGSE(FedAvg):
    """Weak clients are sent the units whose gradients are largest on public data that look like theirs."""

    labels: Annotated[Literal["spl", "csl"], "public labels that the client gets right, or its guesses"] = "spl"
    samples: Annotated[int, Ge(2), "public samples that units are scored on"] = 128
    objective: Objective = Masked()
    share: Share = Static()
    merge: Merge = Mean(by_class=True)
    public: ClassVar[bool] = True

    @property
    def adapts(self) -> bool:
        """Weak clients get less, though the cut is not a slot: its scores are the server's."""
        return True

    def check(self) -> None:
        """The server's scores say which units are cut."""
        super().check()
        refuse(self, ("cut",), "chooses units by its own scores and cannot run under a cut")

    def suits(self, network: Network) -> None:
        """Its units must be found."""
        super().suits(network)
        check_units(network, "fedgse")

    def round(self, server: Server, fleet: Fleet) -> Server:
        """As FedAvg; the last sub-model of every client is remembered."""
        joined, last = self.merge.begin(server), dict(server.memory.get("last", {}))
        cohort = self.select(fleet, server)
        chosen, parts = self.choices(server, fleet, cohort), {"model": self.sent(server)}
        for report in fleet.run(fleet.task(client, parts, where=chosen.get(int(client))) for client in cohort):
            joined.add(report)
            last[report.client] = Report(report.tensors, where=report.where)
        server.memory["last"] = last
        return server.next(joined.result())

    def where(self, server: Server, fleet: Fleet, client: int) -> Where | None:
        """The units of one client."""
        return self.choices(server, fleet, [client]).get(int(client))

    def choices(self, server: Server, fleet: Fleet, clients: Iterable[int]) -> dict[int, Where | None]:
        """Score on public data that resemble each client's, keep the best; who trains the whole model is left out.

        All clients' predictions are asked for together, then all their gradients: a GPU is waited for twice.
        """
        data, capacity = fleet.home.train, fleet.columns["capacity"]
        weak = [int(client) for client in clients if capacity[client] < 1]
        generators = [fleet.torch_generator("similar", client) for client in weak]
        drawn, labels = list[Tensor](), list[Tensor]()
        for (rows, known), generator in zip(self._similar(server, fleet, weak), generators, strict=True):
            if len(rows) > self.samples:
                rows = rows[torch.randperm(len(rows), generator=generator)[: self.samples]]
            drawn.append(rows)
            labels.append(known[rows])
        asked = [
            Measure(server.tensors, Gradient(meant), Samples(data.images, data.rows[rows]), batch_size=len(rows))
            for meant, rows in zip(to_device(labels, server.network.device), drawn, strict=True)
        ]
        return {
            client: Scored()(server.network, float(capacity[client]), server.round, generator, scores)
            for client, generator, scores in zip(weak, generators, on_host(fleet.solve(*asked)), strict=True)
        }

    def _similar(self, server: Server, fleet: Fleet, clients: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each client which public samples (by position) and which labels for all of them."""
        data, last = fleet.home.train, server.memory.get("last", {})
        truth, everything = data.images.labels[data.rows], torch.arange(len(data))
        models: dict[int, Tensors] = {}
        for client in clients:
            if client in last:
                # Norm statistics never travel; predicting uses the batch's: the server's stand in for the shape alone.
                model = server.network.units.take(server.tensors, last[client].where or {})
                models[client] = model | {name: dense(value) for name, value in last[client].tensors.items()}
            elif self.labels == "csl":
                models[client] = server.tensors
        reads = fleet.solve(*(Measure(model, Predictions(), data, batch_size=len(data)) for model in models.values()))
        predicted = dict(zip(models, to_host([read["predicted"] for read in reads]), strict=True))
        for client in clients:
            if self.labels == "csl":
                yield everything, predicted[client]
                continue
            right = (predicted[client] == truth).nonzero().squeeze(1) if client in predicted else everything
            # One sample has no batch statistics to be scored under.
            yield (right if len(right) > 1 else everything), truth
