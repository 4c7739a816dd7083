"""SCAFFOLD: Karimireddy et al., Stochastic controlled averaging for federated learning, ICML 2020.

Algorithm 1 with option II of equation 4 for the client's control variate. The server averages models with equal
weights, as in the paper; N is the number of clients that ever train. Control variates exist for parameters, not for
buffers. With momentum, weight decay or clipping, (x - y) / (K eta) is no longer the mean gradient; it is used all the
same, as every implementation does. Adam is refused: its steps are of one length whatever the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Gt

from fedloom.client import Client
from fedloom.encoding import dense
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.unasked import refuse
from fedloom.policies.merge import Mean, Merge
from fedloom.policies.objective import Objective, Slope, Sum
from fedloom.policies.robust import Robust
from fedloom.policies.select import members
from fedloom.registry import name_of, register
from fedloom.steps import Descent
from fedloom.types import Fit, Report, Server, Task, Tensors, Train, Work


@register("method", "scaffold", paper="Karimireddy et al., ICML 2020")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg whose local steps are corrected for the client's drift."""

    server_rate: Annotated[float, Gt(0), "step of the server towards the clients' mean, eta_g"] = 1.0
    merge: Merge = Mean(weights="equal")

    def check(self) -> None:
        """Control variates are about the same parameters at every client."""
        super().check()
        refuse(self, ("cut",), "cannot run under a cut: its control variates need every client to train all units")
        refuse(self, ("filter",), "sends control variates, which a filter does not cover")
        if isinstance(self.merge, Robust):
            raise InputError(
                f"scaffold adds up control variates, which merge '{name_of(self.merge)}' does not guard: one harmful "
                "client could still spoil the run; use fedavg or fedprox with this merge"
            )

    def takes(self, train: Train) -> None:
        """How far a client moved must say what its gradients were."""
        if train.optimizer != "sgd":
            raise InputError(
                f"scaffold reads gradients off how far a client moved and needs train.optimizer 'sgd'; got "
                f"'{train.optimizer}'"
            )

    def round(self, server: Server, fleet: Fleet) -> Server:
        """Lines 3 to 16: models by their mean, c by the mean change of all clients' c_i."""
        control = self._control(server)
        joined = self.merge.begin(server)
        moved = {name: torch.zeros_like(c, dtype=torch.float64) for name, c in control.items()}
        tasks = (self.task(server, fleet, client) for client in self.select(fleet, server))
        for report in fleet.run(tasks, form=replace(fleet.form, extra={"control": control})):
            joined.add(report)
            for name, change in report.extra["control"].items():
                moved[name].add_(dense(change))
        everybody = len(members(fleet))
        server.memory["control"] = {name: (c + moved[name] / everybody).to(c.dtype) for name, c in control.items()}
        mean, step = joined.result(), self.server_rate
        if step != 1:  # buffers are plain means: a variance that is moved too far would turn negative
            moving = server.tensors.keys() - server.network.buffers
            mean |= {n: t + (step * (mean[n] - t)).to(t) for n, t in server.tensors.items() if n in moving}
        return server.next(mean)

    def task(self, server: Server, fleet: Fleet, client: int) -> Task:
        """The model and the server's control variate c."""
        return fleet.task(client, {"model": self.sent(server), "control": self._control(server)})

    def loss(self) -> Objective:
        """Line 10: every gradient plus c - c_i."""
        return Sum(self.objective, Slope())

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Lines 7 to 13."""
        tensors = yield from self.start(client)
        common = client.received("control")
        own: Tensors = client.state.get("control") or {name: torch.zeros_like(c) for name, c in common.items()}
        fixed = self.fixed(client, tensors) | {"slope": {name: c - own[name] for name, c in common.items()}}
        fit = yield Fit(tensors, Descent.of(self.loss(), task.train), client.plan(), fixed)
        # A rate of 0, as the end of a schedule may have it, says nothing about the gradient: c_i stays.
        scale = 1 / (fit.steps * task.train.lr) if task.train.lr else 0.0
        new = own
        if scale:
            new = {name: own[name] - c + (tensors[name] - fit.tensors[name]) * scale for name, c in common.items()}
        client.state["control"] = new
        return replace(self.report(client, fit), extra={"control": {name: c - own[name] for name, c in new.items()}})

    def _control(self, server: Server) -> Tensors:
        private = self.share.private(server.network) | server.network.buffers
        zeros = {name: torch.zeros_like(t) for name, t in server.tensors.items() if name not in private}
        return server.memory.get("control") or zeros
