"""T-FedAvg: Xu et al., Ternary compression for communication-efficient federated learning, IEEE TNNLS 2020.

Weights travel as -w, 0, w: two bits a weight and one number a layer, up and down. The client trains latent weights W,
which start as what it received, and every step computes with their ternary version (FTTQ, equations 6 to 10)

    W^ = w (1[W > D] - 1[W < -D]),  D = t mean|W|,  w = mean of |W| over |W| > D,

while the gradient passes to W: times w where |W| > D, as it is elsewhere. Norm layers, biases, and by default the first
and the last layer stay as they are.

Differences. w is the mean magnitude above the threshold, which is the best one for a given D; the authors' code offers
a trained w, but by default replaces it by this mean. Their D divides by the first two axes of a weight alone, which
makes it 0.63 mean|W| for 3x3 convolutions and 0.07 mean|W| for linear layers; here t is the same for all layers. Their
server falls back to full weights where the ternary model loses more than 0.03 of its *test* accuracy; here that is
public data, and without public data the model that travels down is always ternary. The first model that is sent down,
which nobody has trained, is not made ternary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedloom.client import Client
from fedloom.copies import on_host
from fedloom.encoding import Ternary, Value
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.network import Network
from fedloom.policies.objective import Objective
from fedloom.readings import Accuracy
from fedloom.registry import register
from fedloom.types import Batch, Fitted, Fixed, Measure, Model, Report, Server, Task, Tensors, Where

__all__ = ["Quantised", "TFedAvg", "ternary"]


def ternary(weight: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The ternary version of a weight, and by how much a gradient of it is multiplied on its way to the weight.

    >>> ternary(torch.tensor([3.0, -1.0, 0.0, 0.0]), 0.7)
    (tensor([ 2., -2.,  0.,  0.]), tensor([2., 2., 1., 1.]))
    """
    size = weight.abs()
    above = size > threshold * size.mean()
    # A layer of zeros has nothing above: its w is 0, not 0 / 0.
    w = (size * above).sum() / above.sum().clamp(min=1)
    return w * weight.sign() * above, torch.where(above, w, torch.ones_like(w))


@dataclass(frozen=True)
class Quantised:
    """Any objective, of the model whose weights are ternary; gradients pass straight through to the latent weights."""

    objective: Objective
    ends: bool  # whether the first and the last layer are ternary too
    threshold: float

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """In the forward pass W^, in the backward pass W."""
        seen = dict(tensors)
        for name in weights_of(model.network, self.ends):
            latent = tensors[name]
            with torch.no_grad():
                hard, slope = ternary(latent, self.threshold)
            seen[name] = hard + slope * (latent - latent.detach())
        return self.objective(model, seen, batch, fixed)


def weights_of(network: Network, ends: bool = False) -> list[str]:
    """Weights of convolutions and linear layers, in the model's order, without the first and the last or with them."""
    kinds = (_ConvNd, nn.Linear)
    every = [f"{path}.weight" for path, layer in network.module.named_modules() if isinstance(layer, kinds)]
    return every if ends else every[1:-1]


@register("method", "tfedavg", paper="Xu et al., IEEE TNNLS 2020")
@dataclass(frozen=True)
class TFedAvg(FedAvg):
    """FedAvg whose weights travel in two bits each, up and down."""

    threshold: Annotated[float, Ge(0), "weights below so many mean magnitudes of their layer become 0, t"] = 0.7
    layers: Annotated[Literal["inner", "all"], "which layers are ternary: all, or without the first and last"] = "inner"
    down: Annotated[bool, "whether the server's model travels as ternary weights too"] = True
    gap: Annotated[
        float, Ge(0), "the server sends full weights if ternary ones lose so much accuracy on public data, if any"
    ] = 0.03

    def suits(self, network: Network) -> None:
        """There must be a layer between the first and the last."""
        super().suits(network)
        if not self.names(network):
            raise InputError(
                "tfedavg leaves the first and the last layer alone, and this model has no other; use a deeper model "
                "or --set method.layers=all"
            )

    def names(self, network: Network) -> list[str]:
        """The weights that are ternary."""
        return weights_of(network, self.layers == "all")

    def round(self, server: Server, fleet: Fleet) -> Server:
        """As FedAvg; then the mean is made ternary again."""
        after = super().round(server, fleet)
        if not self.down:
            return after
        hard = self.hardened(after.network, after.tensors)
        accepted = True
        if len(fleet.home.train):
            # Where nobody sends norm statistics, the model goes by those of the batch.
            right = Accuracy(training=bool(self.share.dropped(server.network)))
            read = on_host(fleet.solve(*(Measure(each, right, fleet.home.train) for each in (after.tensors, hard))))
            full, coarse = (float(each["right"].sum()) / len(fleet.home.train) for each in read)
            accepted = full - coarse < self.gap
        if accepted:
            after = replace(after, tensors=hard)
        # Encoded once: it is the same for all clients who train the whole model.
        after.memory["ternary"] = self.encoded(after.network, self.sent(after)) if accepted else None
        return after

    def task(self, server: Server, fleet: Fleet, client: int) -> Task:
        """The model, its ternary weights encoded."""
        task, sent = super().task(server, fleet, client), server.memory.get("ternary")
        if sent is None:
            return task
        if task.where:
            sent = self.encoded(server.network, server.network.units.take(self.sent(server), task.where))
        return replace(task, base=None, tensors={"model": sent})

    def loss(self) -> Objective:
        """The objective of the ternary model."""
        return Quantised(self.objective, self.layers == "all", self.threshold)

    def report(self, client: Client, fit: Fitted, where: Where | None = None) -> Report:
        """What was trained, made ternary and encoded."""
        hard = self.hardened(client.network, fit.tensors)
        if "trained" in client.state:  # clients are judged by what they trained: that is the ternary model
            client.state["trained"] = hard
        report = super().report(client, replace(fit, tensors=hard), where)
        tensors: Tensors = dict(report.tensors)  # type: ignore[arg-type]
        return replace(report, tensors=self.encoded(client.network, tensors))

    def hardened(self, network: Network, tensors: Tensors) -> Tensors:
        """The model with ternary weights."""
        names = set(self.names(network))
        return {name: ternary(t, self.threshold)[0] if name in names else t for name, t in tensors.items()}

    def encoded(self, network: Network, tensors: Tensors) -> dict[str, Value]:
        """A hardened model as it travels."""
        names = set(self.names(network))
        return {name: Ternary.trusted(t) if name in names else t for name, t in tensors.items()}
