"""Server optimisers: the mean change of a round is a gradient that the server follows with a memory.

FedAvgM: Hsu et al., arXiv:1909.06335. FedAdam and FedYogi: Reddi et al., Adaptive federated optimization, ICLR 2021,
algorithm 2 (no bias correction, v starts at tau^2). Elements that nobody trained keep their value and their moments.
Buffers are plain means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from fedloom.fleet.blocks import Joined
from fedloom.policies.merge import Mean, Totals
from fedloom.registry import register
from fedloom.types import Server, Tensors

__all__ = ["Adaptive", "Momentum"]


@register("merge", "momentum", paper="Hsu et al., arXiv:1909.06335")
@dataclass(frozen=True)
class Momentum(Mean):
    """The mean change, with momentum at the server."""

    rate: Annotated[float, Gt(0), "step of the server, eta"] = 1.0
    momentum: Annotated[float, Ge(0), Lt(1), "share of the last move that goes on, beta"] = 0.9

    def begin(self, server: Server) -> Joined:
        """Nothing added yet."""
        return Stepped(server, self)

    def rest(self, like: Tensor) -> Tensors:
        """Moments before the first round."""
        return {"speed": torch.zeros_like(like)}

    def move(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """v <- beta v + change; the server moves by eta v."""
        speed = self.momentum * moments["speed"] + change
        return self.rate * speed, {"speed": speed}


@register("merge", "adaptive", paper="Reddi et al., ICLR 2021")
@dataclass(frozen=True)
class Adaptive(Mean):
    """The mean change, followed by Adam or Yogi at the server."""

    yogi: Annotated[bool, "Yogi's second moment instead of Adam's"] = False
    rate: Annotated[float, Gt(0), "step of the server, eta"] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), "memory of the first moment"] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), "memory of the second moment"] = 0.99
    tau: Annotated[float, Gt(0), "degree of adaptivity: added to the root of the second moment"] = 1e-3

    def begin(self, server: Server) -> Joined:
        """Nothing added yet."""
        return Stepped(server, self)

    def rest(self, like: Tensor) -> Tensors:
        """Moments before the first round."""
        return {"first": torch.zeros_like(like), "second": torch.full_like(like, self.tau**2)}

    def move(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """Algorithm 2, lines 10 to 14."""
        first = self.beta1 * moments["first"] + (1 - self.beta1) * change
        second, square = moments["second"], change.square()
        if self.yogi:
            second = second - (1 - self.beta2) * square * (second - square).sign()
        else:
            second = self.beta2 * second + (1 - self.beta2) * square
        return self.rate * first / (second.sqrt() + self.tau), {"first": first, "second": second}


class Stepped(Totals):
    """Totals whose mean change is given to the server's optimiser."""

    def __init__(self, server: Server, rule: Momentum | Adaptive) -> None:
        super().__init__(server, rule.weight)
        self.rule = rule

    def result(self) -> Tensors:
        """The server's next tensors; moments go to its memory."""
        mean, moments = super().result(), dict(self.server.memory.get("merge", {}))
        for name in self.total.keys() - self.server.network.buffers:
            old, voted = self.server.tensors[name], self.count(name) > 0
            change = self.total[name] / self.count(name) - old.double()  # not of the mean that was rounded already
            before: Tensors = moments.get(name) or self.rule.rest(change)
            move, after = self.rule.move(change, before)
            moments[name] = {key: torch.where(voted, value, before[key]) for key, value in after.items()}
            mean[name] = torch.where(voted, (old.double() + move).to(old.dtype), old)
        self.server.memory["merge"] = moments
        return mean
