"""Ditto: Li et al., Ditto: fair and robust federated learning through personalization, ICML 2021.

Algorithm 1: beside the common model w, trained as in FedAvg, every client has a model v of its own, trained on its data
and held near the w it received: F_i(v) + lambda / 2 ||v - w||^2. v begins as w, lives at the client, and is what the
client uses. Both are trained for the study's epochs, on batches of their own; the paper's code may give v more steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from fedloom.client import Client
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.unasked import refuse
from fedloom.policies.objective import Proximal, Sum
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Fit, Report, Task, Tensors, Work


@register("method", "ditto", paper="Li et al., ICML 2021")
@dataclass(frozen=True)
class Ditto(FedAvg):
    """A common model, and one of each client's own that is held near it."""

    weight: Annotated[float, Ge(0), "pull of the own model to the common one, lambda"] = 0.1

    def check(self) -> None:
        """Own models are whole."""
        super().check()
        refuse(self, ("cut",), "keeps whole models, which cannot be held near a part of one")

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Both models side by side."""
        common = yield from self.start(client)
        own: Tensors = client.state.get("personal", common)
        held = Descent.of(Sum(self.loss(), Proximal(self.weight)), task.train)
        anchored = self.fixed(client, own) | {"anchor": client.trained(common)}
        fit, personal = yield (
            Fit(common, self.step(client), self.plan(client), self.fixed(client, common)),
            Fit(own, held, client.plan(purpose="personal"), anchored),
        )
        client.state["personal"] = personal.tensors
        return self.report(client, fit)

    def final(self, client: Client, task: Task) -> Work[Tensors]:
        """The own model, once there is one."""
        own: Tensors | None = client.state.get("personal")
        return own if own is not None else (yield from super().final(client, task))
