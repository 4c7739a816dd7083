"""FedGSE: sub-models by gradients on public data, chosen at the server.

The server holds public data P and the last sub-model that each client uploaded. SPL (labelled P) keeps the samples that
the client's model labels right; CSL (unlabelled P) takes all with the client's guesses as labels; `samples` of them are
drawn. A unit's score is the magnitude of the loss's gradient by its activation under the whole global model (summed
over positions and, for a shared group, over its points); the client is sent the ceil(r m) units that score highest.
Theorem 1: per layer this choice makes the gradient that is lost smallest. A client that was never seen, or for which
SPL keeps fewer than two, is scored on P itself. All passes use batch statistics, so units that only a linear layer with
batch norm behind it reads (`lenet5_bn`) all score zero but for rounding, and the first of them are chosen: batch norm
makes the summed gradient vanish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge

from fedloom.encoding import dense
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.network import Network
from fedloom.policies.cut import Scored, Whole, check_units
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
        if not isinstance(self.cut, Whole):
            raise InputError("fedgse chooses units by its own scores and cannot run under a cut; leave [cut] out")

    def suits(self, network: Network) -> None:
        """Its units must be found."""
        super().suits(network)
        check_units(network, "fedgse")

    def round(self, server: Server, fleet: Fleet) -> Server:
        """As FedAvg; the last sub-model of every client is remembered."""
        joined, last = self.merge.begin(server), dict(server.memory.get("last", {}))
        for report in fleet.run(self.task(server, fleet, client) for client in self.select(fleet, server)):
            joined.add(report)
            last[report.client] = Report(report.tensors, where=report.where)
        server.memory["last"] = last
        return server.next(joined.result())

    def where(self, server: Server, fleet: Fleet, client: int) -> Where | None:
        """Score on public data that resemble the client's, keep the best."""
        rows, labels = self._similar(server, fleet, int(client))
        data, generator = fleet.home.train, fleet.torch_generator("similar", int(client))
        if len(rows) > self.samples:
            rows = rows[torch.randperm(len(rows), generator=generator)[: self.samples]]
        reading, samples = Gradient(labels[rows].to(server.network.device)), Samples(data.images, data.rows[rows])
        (scores,) = fleet.solve(Measure(server.tensors, reading, samples, batch_size=len(rows)))
        return Scored()(server.network, float(fleet.columns["capacity"][client]), server.round, generator, scores)

    def _similar(self, server: Server, fleet: Fleet, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which public samples (by position) and which labels for all of them."""
        data, last = fleet.home.train, server.memory.get("last", {})
        truth, everything = data.images.labels[data.rows], torch.arange(len(data))
        if client not in last and self.labels == "spl":
            return everything, truth
        model: Tensors = server.tensors
        if client in last:
            # Norm statistics never travel; predicting uses the batch's, so the server's stand in for the shape alone.
            model = server.network.units.take(model, last[client].where or {})
            model |= {name: dense(value) for name, value in last[client].tensors.items()}
        (read,) = fleet.solve(Measure(model, Predictions(), data, batch_size=len(data)))
        if self.labels == "csl":
            return everything, read["predicted"].cpu()
        right = (read["predicted"].cpu() == truth).nonzero().squeeze(1)
        # One sample has no batch statistics to be scored under.
        return (right if len(right) > 1 else everything), truth
