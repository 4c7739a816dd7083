"""Which tensors travel? The rest are the client's own, or nobody's until a model is evaluated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import numpy as np
import torch
from annotated_types import Ge, Gt, Le

from fedloom.encoding import dense
from fedloom.errors import InputError, RunError
from fedloom.fleet.fleet import Fleet
from fedloom.fleet.nonsense import Form
from fedloom.network import Network
from fedloom.policies import moments
from fedloom.policies.layers import layers_of
from fedloom.policies.select import members
from fedloom.registry import register
from fedloom.types import Server

__all__ = ["AllTensors", "Body", "NotNorms", "Parameters", "Share", "Static"]

NOTHING: frozenset[str] = frozenset()


class Share(Protocol):
    """A rule that says which tensors stay behind."""

    def private(self, network: Network) -> frozenset[str]:
        """Names of the tensors that the client keeps, full-size in its state, and that never travel."""

    def dropped(self, network: Network) -> frozenset[str]:
        """Names of the tensors that training ignores: nobody sends or keeps them."""

    def completed(self, server: Server, fleet: Fleet) -> Server:
        """The server with the dropped tensors filled in, for evaluation."""


@register("share", "all")
@dataclass(frozen=True)
class AllTensors:
    """Everything travels, statistics of norm layers included."""

    def private(self, network: Network) -> frozenset[str]:
        """Nothing stays."""
        return NOTHING

    def dropped(self, network: Network) -> frozenset[str]:
        """Nothing is ignored."""
        return NOTHING

    def completed(self, server: Server, fleet: Fleet) -> Server:
        """There is nothing to fill in."""
        return server


@register("share", "fedbn", paper="Li et al., FedBN, ICLR 2021")
@dataclass(frozen=True)
class NotNorms(AllTensors):
    """Norm layers stay with the client: scale, shift, statistics and counter, by the type of the layer."""

    def private(self, network: Network) -> frozenset[str]:
        """All tensors of norm layers."""
        return network.norms


@register("share", "body", paper="Arivazhagan et al., FedPer, arXiv:1912.00818")
@dataclass(frozen=True)
class Body(AllTensors):
    """The head stays with the client: the last layers, with their norms."""

    head: Annotated[int, Ge(1), "layers of the head, counted from the output; a norm belongs to its layer"] = 1

    def fits(self, network: Network) -> None:
        """Refuse a head of more layers than there are."""
        if self.head > (layers := len(layers_of(network))):
            raise InputError(f"share.head is {self.head} layers, but the model has {layers}")

    def private(self, network: Network) -> frozenset[str]:
        """All tensors of these layers, buffers too."""
        homes = {name.rpartition(".")[0] for layer in layers_of(network)[-self.head :] for name in layer}
        return frozenset(name for name in network.names if name.rpartition(".")[0] in homes)


@register("share", "parameters", paper="Zhang et al., FedALA, AAAI 2023")
@dataclass(frozen=True)
class Parameters(AllTensors):
    """Parameters travel; buffers (statistics and counters of norm layers) stay with the client."""

    def private(self, network: Network) -> frozenset[str]:
        """All buffers."""
        return network.buffers & frozenset(network.names)


@register("share", "static", paper="Diao et al., HeteroFL, ICLR 2021")
@dataclass(frozen=True)
class Static(AllTensors):
    """Static batch norm: statistics never travel in training; for evaluation clients are asked for them.

    Training normalises by the batch whatever the statistics are. Before an evaluation, clients run their training
    data through the global model and tell mean and second moment of every norm layer's input; the server pools them.
    Whoever never trains is not asked: it only tests the model.
    The paper's code averages variances of batches instead, which leaves out how batch means differ.
    """

    asked: Annotated[float, Gt(0), Le(1), "share of the clients that are asked, drawn at random"] = 1.0

    def dropped(self, network: Network) -> frozenset[str]:
        """Statistics and counters of norm layers."""
        return network.norms & network.buffers

    def completed(self, server: Server, fleet: Fleet) -> Server:
        """Pooled statistics of the clients' training data under this model."""
        if not self.dropped(server.network):
            return server
        here = np.intersect1d(fleet.present, members(fleet))
        count = max(1, round(self.asked * len(here)))
        clients = np.sort(fleet.generator("statistics").choice(here, count, replace=False))
        parts, weight, sums = {"model": server.tensors}, 0.0, dict[str, torch.Tensor]()
        told_of = {name: server.tensors[name] for name in moments.told(server.network)}
        tasks = (fleet.task(int(client), parts) for client in clients)
        for report in fleet.ask(moments.statistics.__name__, tasks, Form(tensors=told_of)):
            weight += report.weight
            for name, moment in report.tensors.items():
                told = dense(moment).double()
                if name.endswith("running_var"):  # a variance about the client's own mean
                    told = told + dense(report.tensors[name.removesuffix("var") + "mean"]).double().square()
                sums[name] = sums.get(name, 0) + report.weight * told
        if not weight:
            raise RunError("no client told its norm statistics, so the model cannot be evaluated")
        filled = dict(server.tensors)
        for name in [name for name in sums if name.endswith("running_mean")]:
            mean = sums[name] / weight
            spread = name.removesuffix("running_mean") + "running_var"
            variance = (sums[spread] / weight - mean.square()).clamp(min=0)
            filled[name], filled[spread] = mean.to(filled[name].dtype), variance.to(filled[spread].dtype)
        return replace(server, tensors=filled)
