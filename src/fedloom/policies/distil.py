"""Learning from a teacher: an objective and, on top of it, a distance to what a frozen model says.

The teacher is fixed["teacher"], one more set of tensors of the task; fixed["strength"] weighs the distance (lambda).
The student is run once, by the objective that the distance is added to, and is read on the way; the teacher is run
once, as in evaluation. Code that runs the student a second time for its features updates batch norm twice a batch.

Features: Romero et al., FitNets, ICLR 2015, and FedCKD and FedRKD, equations 3.2 to 3.5. Soft targets: Hinton et al.,
Distilling the knowledge in a neural network, 2015.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedloom.client import Client
from fedloom.errors import ClientError, InputError
from fedloom.network import Network
from fedloom.policies.objective import Masked, Objective
from fedloom.registry import find, register
from fedloom.types import Batch, Fixed, Model, Points, Tensors
from fedloom.units import tapped

__all__ = ["Distilling", "Features", "Soft", "lesson", "masking", "teaching"]

T = TypeVar("T")
ADAPTER = "adapter."


class Seen:
    """A model that remembers what passed the points in its last pass."""

    logits: Tensor
    features: list[Tensor]

    def __init__(self, model: Model, points: Points) -> None:
        self.model, self.network, self.points = model, model.network, points

    def __call__(self, tensors: Tensors, x: Tensor, *, scaler: bool = False) -> Tensor:
        """The logits; they and the features are kept. No scaler: a teacher is read at its own scale."""
        self.logits, self.features = self.model.read(tensors, x, self.points)
        return self.logits

    def read(
        self, tensors: Tensors, x: Tensor, points: Points = (), *, scaler: bool = False, still: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """As the model reads, nothing kept."""
        return self.model.read(tensors, x, points, scaler=scaler, still=still)

    def grad(self, loss: Callable[[Tensors], tuple[Tensor, T]], tensors: Tensors) -> tuple[Tensors, T]:
        """The model's."""
        return self.model.grad(loss, tensors)


@dataclass(frozen=True)
class Distilling:
    """What objectives with a teacher have in common."""

    to: Annotated[str, "the objective that it is added to: cross_entropy, masked, or an import path"] = "cross_entropy"
    hard: Annotated[float, Ge(0), "weight of that objective; 0: the teacher alone"] = 1.0

    def __post_init__(self) -> None:
        """Refuse an objective that is not there before every client fails on it."""
        find("objective", self.to)

    @property
    def plain(self) -> Objective:
        """The objective without a teacher; one that masks rests its scaler unless it says otherwise, as `Seen` does."""
        objective: Objective = find("objective", self.to)()
        if isinstance(objective, Masked) and objective.scaler is None:
            return replace(objective, scaler=False)
        return objective

    @property
    def widens(self) -> bool:
        """Whether a teacher may be wider than its student."""
        return False

    def points(self, network: Network) -> Points:
        """Where student and teacher are read, besides their logits."""
        return ()

    def distance(
        self, student: tuple[Tensor, list[Tensor]], teacher: tuple[Tensor, list[Tensor]], tensors: Tensors
    ) -> Tensor:
        """How far the student's logits and features are from the teacher's: a scalar, a mean over the batch."""
        raise NotImplementedError(f"{type(self).__name__} must say how far a student is from its teacher")

    def adapters(self, client: Client, student: Tensors, teacher: Tensors) -> Tensors:
        """What is trained beside the student so that both can be compared."""
        return {}

    def __call__(self, model: Model, tensors: Tensors, batch: Batch, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """Both together; the samples' losses are those of the objective."""
        student = Seen(model, self.points(model.network))
        total, losses = self.plain(student, tensors, batch, fixed)
        with torch.no_grad():
            teacher = model.read(fixed["teacher"], batch.x, student.points, still=True)
        apart = self.distance((student.logits, student.features), teacher, tensors)
        return self.hard * total + fixed["strength"] * apart, losses


@register("objective", "features", paper="Romero et al., ICLR 2015")
@dataclass(frozen=True)
class Features(Distilling):
    """Squared distance between features of student and teacher, added up over layers."""

    layers: Annotated[int | tuple[str, ...], "how many of the last fully connected layers, or paths of layers"] = 2
    side: Annotated[Literal["output", "input"], "what comes out of the layers or what goes in"] = "output"
    reduction: Annotated[Literal["mean", "sum"], "over the features of a layer; over samples it is the mean"] = "mean"
    adapter: Annotated[bool, "learn a linear map from the student's width to the teacher's where they differ"] = False

    @property
    def widens(self) -> bool:
        """With an adapter."""
        return self.adapter

    def points(self, network: Network) -> Points:
        """The layers by name, or the last fully connected ones; before a non-linearity that follows."""
        if not isinstance(self.layers, int):
            if not self.layers:
                raise InputError("objective.layers names no layer; name one, or say how many of the last")
            known = {path for path, _ in network.module.named_modules()}
            for path in self.layers:
                if path not in known or not path:
                    raise InputError(f"objective.layers names '{path}', but the model has no such layer")
            return tuple((path, self.side == "output") for path in self.layers)
        if not 1 <= self.layers <= len(network.linears):
            raise InputError(
                f"objective.layers is {self.layers}, but the model has {len(network.linears)} fully connected layers"
            )
        return tuple((path, self.side == "output") for path in network.linears[-self.layers :])

    def distance(
        self, student: tuple[Tensor, list[Tensor]], teacher: tuple[Tensor, list[Tensor]], tensors: Tensors
    ) -> Tensor:
        """Equation 3.4."""
        gaps = []
        for number, (own, aim) in enumerate(zip(student[1], teacher[1], strict=True)):
            adapted = tensors.get(f"{ADAPTER}{number}")
            seen = own if adapted is None else torch.einsum("tc,bc...->bt...", adapted, own)
            if seen.shape != aim.shape:
                raise ClientError(
                    f"features {tuple(seen.shape[1:])} of the student and {tuple(aim.shape[1:])} of the teacher differ "
                    "in size; set objective.adapter = true or compare other layers"
                )
            square = (seen - aim).square().flatten(1)
            gaps.append((square.mean(1) if self.reduction == "mean" else square.sum(1)).mean())
        return torch.stack(gaps).sum()

    def adapters(self, client: Client, student: Tensors, teacher: Tensors) -> Tensors:
        """One map (teacher's width, student's width) a layer where they differ; kept from round to round."""
        if not self.adapter:
            return {}
        network, kept = client.network, client.state.get("adapter", {})
        widths = [
            [read.shape[1] for read in _still(network, tensors, self.points(network))] for tensors in (teacher, student)
        ]
        found: Tensors = {}
        for number, (wide, narrow) in enumerate(zip(*widths, strict=True)):
            if wide != narrow:
                name, generator = f"{ADAPTER}{number}", client.generator(f"{ADAPTER}{number}")
                first = torch.randn(wide, narrow, generator=generator).div(narrow**0.5)
                old = kept.get(name)
                usable = old is not None and old.shape == first.shape
                found[name] = old if usable else first.to(network.device, network.dtype)
        return found


def _still(network: Network, tensors: Tensors, points: Points) -> list[Tensor]:
    """What passes the points for one blank image."""
    blank = torch.zeros(1, *network.shape, dtype=network.dtype, device=network.device)
    module = network.bound(tensors, training=False)
    with torch.no_grad(), tapped(module, points) as seen:
        module(blank)
    return [seen[point] for point in points]


@register("objective", "soft", paper="Hinton et al., arXiv:1503.02531")
@dataclass(frozen=True)
class Soft(Distilling):
    """T^2 times the divergence of the student's softened prediction from the teacher's.

    Equation 2.5 is a cross-entropy: it differs by the teacher's entropy, which has no gradient.
    """

    temperature: Annotated[float, Gt(0), "both logits are divided by it, T"] = 4.0

    def distance(
        self, student: tuple[Tensor, list[Tensor]], teacher: tuple[Tensor, list[Tensor]], tensors: Tensors
    ) -> Tensor:
        """T^2 KL(teacher || student), since its gradient shrinks as 1 / T^2."""
        own, aim = ((logits / self.temperature).log_softmax(-1) for logits in (student[0], teacher[0]))
        return self.temperature**2 * (aim.exp() * (aim - own)).sum(-1).mean()


def teaching(objective: Objective) -> Distilling | None:
    """The part of an objective that wants a teacher, if it has one."""
    while not isinstance(objective, Distilling):
        if not hasattr(objective, "objective"):
            return None
        objective = objective.objective  # what terms are added to, or what is made ternary
    return objective


def masking(objective: Objective) -> Masked | None:
    """The part of an objective that masks classes, if it has one."""
    if isinstance(objective, Masked):
        return objective
    inner = objective.plain if isinstance(objective, Distilling) else getattr(objective, "objective", None)
    return masking(inner) if inner else None


def lesson(client: Client, teacher: Tensors, strength: float = 1.0) -> dict[str, Any]:
    """What such an objective reads."""
    return {"teacher": teacher, "strength": client.network.scalar(strength)}
