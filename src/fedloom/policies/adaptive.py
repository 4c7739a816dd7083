"""Adaptive local aggregation: a client starts between its own last model and the one it received, element by element.

Zhang et al., FedALA: adaptive local aggregation for personalized federated learning, AAAI 2023; FedCPN, equations 6 to
8. start = own + (received - own) * W, where W is 1 below the top of the model and learned there by gradient while all
else is frozen: W <- clip(W - eta dL/dW, 0, 1). W begins with ones and is kept between rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import pstdev
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from fedloom.client import Client
from fedloom.network import Network
from fedloom.policies.layers import layers_of
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD
from fedloom.policies.start import Replace
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Fit, Fixed, Plan, Samples, Tensors, Work

__all__ = ["Adaptive", "Boxed", "mixed"]

log = logging.getLogger("fedloom.start")


@dataclass(frozen=True)
class Boxed(SGD):
    """Gradient descent that stays between 0 and 1."""

    def update(self, tensors: Tensors, slots: dict[str, Tensors], grads: Tensors, lr: Tensor) -> None:
        """Move the tensors that have a gradient, and clip them."""
        super().update(tensors, slots, grads, lr)
        for name in grads:
            tensors[name].clamp_(0, 1)


def mixed(weights: Tensors, fixed: Fixed) -> Tensors:
    """Equation 7; exactly the received tensor where a weight is 1 and exactly the own one where it is 0."""
    own = fixed["own"]
    return {
        name: torch.lerp(own[name], tensor, weights[name]) if name in weights else tensor
        for name, tensor in fixed["received"].items()
    }


@register("start", "adaptive", paper="Zhang et al., FedALA, AAAI 2023")
@dataclass(frozen=True)
class Adaptive:
    """Between the client's own last model and the received one, by weights that it learns for the top layers.

    A client that has no model of its own yet, as in round 1, takes the received one. The first time that it has, it
    learns the weights until their loss settles; later it goes once through its sample. The loss settles when the
    standard deviation of the last `window` losses, of more than that many, is below `settle`.
    """

    top: Annotated[int, Ge(0), "layers (or tensors), counted from the output, that are mixed; p"] = 5
    count: Annotated[Literal["layers", "tensors"], "what p counts; a norm belongs to its layer"] = "layers"
    rate: Annotated[float, Ge(0), "step of the weights; eta"] = 1.0
    sample: Annotated[float, Gt(0), Le(1), "share of the training images that they learn on, drawn each round"] = 0.8
    block: Annotated[bool, "the sample is a row of neighbours, taken in order; else drawn and shuffled"] = False
    settle: Annotated[float, Gt(0), "standard deviation of losses below which they have settled"] = 0.1
    window: Annotated[int, Ge(2), "how many losses that is taken over"] = 10
    losses: Annotated[Literal["pass", "last_batch"], "mean of a pass, or of its last batch alone"] = "pass"
    most: Annotated[int, Ge(1), "passes after which a client goes on though nothing has settled"] = 50

    def keeps(self, network: Network) -> frozenset[str]:
        """The top layers, or the top tensors."""
        groups = self.counted(network)
        return frozenset(name for group in groups[max(0, len(groups) - self.top) :] for name in group)

    def counted(self, network: Network) -> Sequence[tuple[str, ...]]:
        """What p counts, from input to output."""
        layers = layers_of(network)
        return layers if self.count == "layers" else [(name,) for layer in layers for name in layer]

    def __call__(self, client: Client) -> Work[Tensors]:
        """Learn the weights, keep them, and mix."""
        received = yield from Replace()(client)
        kept: Tensors = client.state.get("own", {})
        names = self.keeps(client.network) & kept.keys() & client.received().keys()
        if not names:
            return received
        first = "mix" not in client.state
        whole = {name: torch.ones_like(kept[name]) for name in sorted(names)} | client.state.get("mix", {})
        own, weights = ({name: tensors[name] for name in received if name in names} for tensors in (kept, whole))
        where, units = client.task.where, client.network.units if client.task.where else None
        if where and units:
            own, weights = units.take(own, where), units.take(weights, where)
        fixed = client.fixed(lr=client.network.scalar(self.rate), received=received, own=own)
        if self.rate:
            weights = yield from self._learned(client, weights, fixed, self.most if first else 1)
        client.state["mix"] = {**whole, **(units.place(weights, where, whole) if where and units else weights)}
        return mixed(weights, fixed)

    def sampled(self, client: Client) -> Samples:
        """The training images of this round's sample."""
        count = max(1, int(self.sample * client.samples))
        if not self.block:
            return client.some(count, "adapt")
        begin = int(torch.randint(client.samples - count + 1, (), generator=client.generator("adapt")))
        return replace(client.train, rows=client.train.rows[begin : begin + count])

    def _learned(self, client: Client, weights: Tensors, fixed: Fixed, most: int) -> Work[Tensors]:
        """Passes until the loss settles, at most so many."""
        step, images = Descent(CrossEntropy(), Boxed(), make=mixed), self.sampled(client)
        train = replace(client.task.train, epochs=1, steps=None)
        losses: list[float] = []
        for number in range(most):
            plan = client.plan((images,), train=train, purpose=f"adapt {number}", shuffle=not self.block)
            for part in self._parts(plan):
                fit = yield Fit(weights, step, part, fixed)
                weights = fit.tensors
            losses.append(fit.loss)
            if len(losses) > self.window and pstdev(losses[-self.window :]) < self.settle:
                return weights
        if most > 1:
            log.warning(
                "client %d, round %d: mixing weights have not settled after %d passes",
                client.id, client.task.round + 1, most,
            )  # fmt: skip
        return weights

    def _parts(self, plan: Plan) -> list[Plan]:
        """A pass as fits whose last one tells the loss that counts."""
        if self.losses == "pass" or len(plan.steps) == 1:
            return [plan]
        cut = len(plan.steps) - 1
        return [
            replace(plan, steps=plan.steps[part], variants=plan.variants[part], epoch=1)
            for part in (slice(cut), slice(cut, None))
        ]
