"""FedRep: Collins et al., Exploiting shared representations for personalized federated learning, ICML 2021.

Algorithm 1: a client first trains its own head on the representation it received, then the representation under that
head; the server averages representations. Each phase is a fit with an optimiser of its own; what rests in a phase does
not move, not by momentum or weight decay either. Statistics of norm layers follow both phases, as in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from fedloom.client import Client
from fedloom.errors import InputError
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.cut import Whole
from fedloom.policies.share import Body, Share
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Fit, Report, Task, Work


@register("method", "fedrep", paper="Collins et al., ICML 2021")
@dataclass(frozen=True)
class FedRep(FedAvg):
    """Own heads on a common representation, trained in turn."""

    head_epochs: Annotated[int, Ge(1), "epochs of the head; those of the representation are train.epochs"] = 10
    share: Share = Body()

    def check(self) -> None:
        """The two phases are about whole layers that travel or stay."""
        super().check()
        if not isinstance(self.cut, Whole) or not isinstance(self.share, Body):
            raise InputError("fedrep trains whole heads and bodies; leave [cut] out and [share] at body")

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Algorithm 1, ClientUpdate: head, then representation."""
        tensors, head = (yield from self.start(client)), self.share.private(client.network)
        step, fixed = Descent.of(self.loss(), task.train), self.fixed(client, tensors)
        epochs = replace(task.train, epochs=self.head_epochs, steps=None)
        first = yield Fit(tensors, replace(step, only=head), client.plan(train=epochs, purpose="head"), fixed)
        body = frozenset(client.network.names) - head
        fit = yield Fit(first.tensors, replace(step, only=body), self.plan(client), fixed)
        return self.report(client, fit)
