"""FedNAS: He et al., Towards non-i.i.d. and invisible data with FedNAS, CVPR workshop 2020.

Clients search for an architecture together: the model holds all candidate operations with weights w, and alpha says how
much each counts (models/darts.py). A client's step moves alpha by Adam along the gradient of its validation loss plus
lambda times that of its training loss (first order, equation 4), then w by the study's optimiser along the gradient of
its training loss. The server averages both by samples. The structure that alpha says in the end is in the summary; it
is trained as model `darts`.

Differences. Validation batches come from the client's validation images, not from its test images (the authors' code
takes the first test batch again and again). One port averages w alone and lets everybody adopt one client's alpha;
alpha is averaged here. The rate of w changes between rounds only (`train.schedule`), not within a round.
`train.clip` bounds the gradient of w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt
from torch import Tensor

from fedloom.client import Client
from fedloom.errors import InputError
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.unasked import refuse
from fedloom.network import Network
from fedloom.policies.objective import Objective
from fedloom.policies.optimizer import Adam, Optimizer, optimizer_of
from fedloom.registry import register
from fedloom.steps import clip_
from fedloom.types import Batch, Fixed, Model, Plan, Server, Tensors


@dataclass(frozen=True)
class Bilevel:
    """One step: first the architecture, on both batches, then the weights, on the training batch."""

    objective: Objective
    architecture: tuple[str, ...]
    weights: Optimizer
    structure: Adam
    balance: float
    clip: float | None = None

    @property
    def passes(self) -> float:
        """A pass a gradient."""
        return 3 if self.balance else 2

    def seen(self, tensors: Tensors, fixed: Fixed) -> Tensors:
        """All operations are computed."""
        return tensors

    def slots(self, tensors: Tensors) -> dict[str, Tensors]:
        """Two memories that share no name."""
        alpha, rest = self._parts(tensors)
        both = (("alpha", self.structure.slots(alpha)), ("w", self.weights.slots(rest)))
        return {f"{which} {kind}": slot for which, slots in both for kind, slot in slots.items()}

    def __call__(
        self, model: Model, tensors: Tensors, slots: dict[str, Tensors], fixed: Fixed, batches: Sequence[Batch]
    ) -> Tensor:
        """One update of both; gives the training loss of every sample."""
        train, validation = batches
        # Only what is asked for needs a gradient; buffers are the same memory.
        still = {name: t if name in self.architecture else t.detach() for name, t in tensors.items()}
        slopes, _ = model.grad(lambda seen: self.objective(model, seen, validation, fixed), still)
        if self.balance:
            more, _ = model.grad(lambda seen: self.objective(model, seen, train, fixed), still)
            slopes = {name: slope + self.balance * more[name] for name, slope in slopes.items()}
        self.structure.update(tensors, self._memory("alpha", slots), slopes, fixed["alpha_lr"])
        still = {name: t.detach() if name in self.architecture else t for name, t in tensors.items()}
        grads, losses = model.grad(lambda seen: self.objective(model, seen, train, fixed), still)
        if self.clip is not None:
            clip_(grads, self.clip)
        self.weights.update(tensors, self._memory("w", slots), grads, fixed["lr"])
        return losses

    def _parts(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        return (
            {name: t for name, t in tensors.items() if name in self.architecture},
            {name: t for name, t in tensors.items() if name not in self.architecture},
        )

    @staticmethod
    def _memory(which: str, slots: dict[str, Tensors]) -> dict[str, Tensors]:
        return {kind.removeprefix(f"{which} "): slot for kind, slot in slots.items() if kind.startswith(f"{which} ")}


@register("method", "fednas", paper="He et al., CVPR workshop 2020")
@dataclass(frozen=True)
class FedNAS(FedAvg):
    """Clients search for an architecture together, by gradients; needs a model such as darts_search."""

    alpha_lr: Annotated[float, Gt(0), "rate of the architecture's Adam"] = 3e-4
    alpha_decay: Annotated[float, Ge(0), "weight decay of the architecture's Adam"] = 1e-3
    balance: Annotated[
        float, Ge(0), "weight of the training loss for the architecture, lambda; 0: validation alone"
    ] = 1.0
    validates: ClassVar[bool] = True
    trainers: ClassVar[tuple[str, ...]] = ("reference", "taped", "graphs")  # two batches a step cannot be stacked

    def check(self) -> None:
        """Everybody trains all operations."""
        super().check()
        refuse(self, ("cut",), "trains the whole search space and cannot run under a cut")

    def suits(self, network: Network) -> None:
        """The model must say which of its tensors are its architecture."""
        super().suits(network)
        if not getattr(network.module, "architecture", ()):
            raise InputError(
                f"fednas needs a model with an architecture to search for; got {type(network.module).__name__}; use "
                "--model darts_search, or give the model `architecture`, the names of the tensors that weigh its parts"
            )

    def plan(self, client: Client) -> Plan:
        """A training and a validation batch a step."""
        return client.plan([client.train, client.validation])

    def fixed(self, client: Client, tensors: Tensors) -> dict[str, Any]:
        """Two rates."""
        return super().fixed(client, tensors) | {"alpha_lr": client.network.scalar(self.alpha_lr)}

    def step(self, client: Client) -> Bilevel:
        """Both optimisers."""
        structure, train = Adam(self.alpha_decay, beta1=0.5), client.task.train
        named: Any = client.network.module
        return Bilevel(self.loss(), tuple(named.architecture), optimizer_of(train), structure, self.balance, train.clip)

    def found(self, server: Server) -> dict[str, Any]:
        """The structure, if the model can say it."""
        read = getattr(server.network.module, "found", None)
        return dict(read(server.tensors)) if read else {}
