"""What a method is: a choice for every policy slot, and the two halves of a round.

The server's half is `round`, straight Python over the fleet. The client's halves are short generators that run where
the data are: `work` trains, `final` makes the model that the client really uses. Heavy work is requested (`yield Fit`,
`yield Measure`, or a tuple of them), so that an engine may do it for many clients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from fedloom.client import Client
from fedloom.errors import InputError
from fedloom.fleet.fleet import Fleet
from fedloom.fleet.nonsense import FIT
from fedloom.network import Network
from fedloom.policies.cut import Cut, Whole, check_units
from fedloom.policies.distil import lesson, teaching
from fedloom.policies.filter import Filter
from fedloom.policies.merge import Mean, Merge, check_merge, check_rows
from fedloom.policies.objective import CrossEntropy, Masked, Objective
from fedloom.policies.select import Select, Uniform
from fedloom.policies.share import AllTensors, Share, Static
from fedloom.policies.start import Replace, Start
from fedloom.policies.topology import Stages, Star, Topology
from fedloom.registry import name_of
from fedloom.types import Fitted, Report, Server, Task, Tensors, Train, Where, Work

__all__ = ["Method"]


@dataclass(frozen=True)
class Method:
    """The slots, and what most methods share. A method without a server has stages and no `round`."""

    select: Select = Uniform()
    cut: Cut = Whole()
    share: Share = AllTensors()
    start: Start = Replace()
    objective: Objective = CrossEntropy()
    merge: Merge = Mean()
    topology: Topology = Star()
    filter: Filter | None = None

    pooled: ClassVar[bool] = False  # a bound, no federation: whoever trains sees the data of all clients

    public: ClassVar[bool] = False  # whether the server needs public data

    public_everywhere: ClassVar[bool] = False  # whether clients need them too

    mixes: ClassVar[bool] = False  # whether clients may have different models

    trainers: ClassVar[tuple[str, ...]] = ("reference", "taped", "stacked", "graphs")  # that really do its fits

    ignores: ClassVar[tuple[str, ...]] = ()  # settings of [train] that it does not go by

    one_model: ClassVar[bool] = True  # whether a client trains one model a round, so that its last fit is its model

    validates: ClassVar[bool] = False  # whether clients decide by their validation data

    def __post_init__(self) -> None:
        """A scaler that was not asked for rests unless norm statistics are taken anew before each evaluation.

        Those that training keeps would be of divided activations, and a model is evaluated without the division.
        """
        if isinstance(self.objective, Masked) and self.objective.scaler is None and not isinstance(self.share, Static):
            object.__setattr__(self, "objective", replace(self.objective, scaler=False))

    @property
    def adapts(self) -> bool:
        """Whether weak devices get less to train than the whole model."""
        return not isinstance(self.cut, Whole)

    @property
    def personal(self) -> bool:
        """Whether clients normalise their images by statistics of their own, whatever the study says."""
        return False

    @property
    def serverless(self) -> bool:
        """Whether it has stages in place of a round."""
        return type(self).round is Method.round

    tells: ClassVar[Mapping[str, float]] = FIT  # numbers without which its reports are of no use, and the least of each

    def check(self) -> None:
        """Refuse a composition that makes no sense: raise InputError with the reason."""
        name = type(self).__name__.lower()
        check_merge(self.merge, name, self.tells, self.adapts)
        star = isinstance(self.topology, Star)
        if self.serverless == star:
            reason = "has no server and cannot run as a star" if star else "has a server and runs as a star only"
            raise InputError(f"{name} {reason}; got topology '{name_of(self.topology)}'")

    def round(self, server: Server, fleet: Fleet) -> Server:
        """The server's half of one round."""
        raise TypeError(f"{type(self).__name__} has no server; it runs by its stages")

    def stages(self, round: int, members: Sequence[int]) -> Stages:
        """Without a server: who hands its last report to whom, stage by stage."""
        return self.topology.stages(round, members)

    def work(self, client: Client, task: Task) -> Work[Report]:
        """The client's half of one round."""
        raise NotImplementedError(f"{type(self).__name__} must say what a client does")

    def loss(self) -> Objective:
        """What a local step descends."""
        return self.objective

    def fixed(self, client: Client, tensors: Tensors) -> dict[str, Any]:
        """What a local step reads and does not change; an objective with a teacher learns from where it starts."""
        return client.fixed(**(lesson(client, tensors) if teaching(self.loss()) else {}))

    def final(self, client: Client, task: Task) -> Work[Tensors]:
        """The model that the client really uses; by default what it would start from."""
        return client.used((yield from self.start(client)))

    def model(self, server: Server) -> Tensors | None:
        """The global model, or None where there is none: some of its tensors never reach the server."""
        return None if self.share.private(server.network) else server.tensors

    def suits(self, network: Network) -> None:
        """Refuse a model that the method cannot train: raise InputError with the reason."""
        name = type(self).__name__.lower()
        if not isinstance(self.cut, Whole):
            check_units(network, name)
        check_rows(self.merge, network, name)
        if taught := teaching(self.loss()):
            taught.points(network)

    def takes(self, train: Train) -> None:
        """Refuse training settings that the method cannot go by: raise InputError with the reason."""

    def adapt(self, build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
        """The model as the method needs it, for images of a shape; most take it as it is."""
        return build

    def recipe(self, line: str, shape: tuple[int, ...], classes: int, found: Mapping[str, Any]) -> str:
        """The line of Python that builds what `adapt`, or a search, makes of the model that `line` builds."""
        return line

    def found(self, server: Server) -> dict[str, Any]:
        """What a method that searches has found, in plain data for the summary; most search nothing."""
        return {}

    def evaluated(self, server: Server, fleet: Fleet) -> Server:
        """The server as it is evaluated: what a share leaves out of training is asked for first."""
        return self.share.completed(server, fleet)

    def sent(self, server: Server) -> Tensors:
        """The server's tensors that travel."""
        held_back = self.share.private(server.network) | self.share.dropped(server.network)
        return {name: tensor for name, tensor in server.tensors.items() if name not in held_back}

    def evaluation(self, server: Server) -> Tensors:
        """The server's tensors that clients are sent to evaluate: those that travel, and those that were asked for."""
        private = self.share.private(server.network)
        return {name: tensor for name, tensor in server.tensors.items() if name not in private}

    def where(self, server: Server, fleet: Fleet, client: int) -> Where | None:
        """The units a client gets, unless it chooses them itself."""
        if isinstance(self.cut, Whole) or self.cut.reading is not None:
            return None
        generator = fleet.torch_generator("cut", client)
        return self.cut(server.network, fleet.columns["capacity"][client], server.round, generator)

    def report(self, client: Client, fit: Fitted, where: Where | None = None) -> Report:
        """What a client tells of a fit: its shared tensors. The others, and what it starts from, become its own."""
        private = self.share.private(client.network)
        if kept := private | self.start.keeps(client.network):
            client.keep({name: tensor for name, tensor in fit.tensors.items() if name in kept}, where)
        held_back = private | self.share.dropped(client.network)
        public = {name: tensor for name, tensor in fit.tensors.items() if name not in held_back}
        classes = client.classes if self.merge.by_class else None
        return Report(public, float(client.samples), fit.numbers, where, classes)
