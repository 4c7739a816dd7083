"""FedNova: Wang et al., Tackling the objective inconsistency problem in federated optimization, NeurIPS 2020.

Equation 6: every client's change is divided by its normaliser a_i, the number of plain steps its local steps amount to,
and the mean is multiplied by tau_eff = sum p_i a_i. a_i for plain steps is tau; for momentum rho,
[tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho); for the proximal term, a <- (1 - eta mu) a + 1 a step. With both, the
pull goes through the momentum too: c <- rho c + 1 - eta mu a, a <- a + c a step, of which the others are special cases.
The authors' code puts one recursion after the other there, a <- (1 - eta mu) (a + c) + 1, which counts a gradient twice
a step; it also takes sum p_i tau_i for tau_eff when mu is not 0: `merge.effective = "steps"`. Adam, which the paper
does not treat, moves by about the rate in every step, whatever the gradient: a_i is tau (ours). Buffers are averaged by
samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from fedloom.client import Client
from fedloom.errors import InputError
from fedloom.fleet.nonsense import FIT
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.cut import Whole
from fedloom.policies.merge import Merge
from fedloom.policies.normalised import Normalised
from fedloom.policies.objective import Objective, Proximal, Sum
from fedloom.registry import register
from fedloom.types import Fitted, Report, Tensors, Train, Where


def normaliser(steps: int, momentum: float, shrink: float) -> float:
    """a_i after `steps` steps with momentum rho and shrink = eta mu.

    >>> normaliser(5, 0.0, 0.0), normaliser(1, 0.9, 0.0), normaliser(2, 0.5, 0.0)
    (5.0, 1.0, 2.5)
    """
    speed = moved = 0.0  # under a constant gradient of 1 and a rate of 1
    for _ in range(steps):
        speed = momentum * speed + 1 - shrink * moved
        moved += speed
    return moved


@register("method", "fednova", paper="Wang et al., NeurIPS 2020")
@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg in which clients that took more steps do not pull harder."""

    mu: Annotated[float, Ge(0), "weight of the proximal term; 0: none"] = 0.0
    merge: Merge = Normalised()
    tells: ClassVar[Mapping[str, float]] = {**FIT, "normaliser": -inf}

    def check(self) -> None:
        """a_i is about steps of one and the same model."""
        super().check()
        if not isinstance(self.cut, Whole):
            raise InputError(
                "fednova cannot run under a cut: its normaliser counts steps of the whole model, and elements that few "
                "clients train would be scaled by steps of others; use fedavg or fedprox with this cut"
            )

    def takes(self, train: Train) -> None:
        """A step must not overshoot the anchor."""
        if train.lr * self.mu >= 1:
            raise InputError(f"fednova needs train.lr x method.mu below 1; got {train.lr:g} x {self.mu:g}")

    def loss(self) -> Objective:
        """The local objective, with the proximal term if there is one."""
        return Sum(self.objective, Proximal(self.mu)) if self.mu else self.objective

    def fixed(self, client: Client, tensors: Tensors) -> dict[str, Any]:
        """The anchor is where the client starts."""
        return super().fixed(client, tensors) | {"anchor": client.trained(tensors)}

    def report(self, client: Client, fit: Fitted, where: Where | None = None) -> Report:
        """The normaliser travels with the report."""
        train, plain = client.task.train, super().report(client, fit, where)
        recursion = (train.momentum, train.lr * self.mu) if train.optimizer == "sgd" else (0.0, 0.0)
        numbers: dict[str, Any] = {"normaliser": normaliser(fit.steps, *recursion)}
        return replace(plain, numbers={**plain.numbers, **numbers})
