"""DS-FL: Itahara et al., Distillation-based semi-supervised federated learning, IEEE Trans. Mobile Computing 2023.

Clients train on their own images and tell the class probabilities of open (public, unlabelled) images; the server
averages them and sharpens the mean, softmax(mean / T) with T = 0.1 (entropy reduction averaging); clients and the
server's own model learn from that by cross-entropy. What is told at the end of a round is learnt by clients at the
start of the next.

Where ports differ we take the paper: probabilities are averaged, not logits. The server's model is the first of the
study's list and learns after every round; it is the global model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt
from torch import Tensor

from fedloom.fleet.fleet import Fleet
from fedloom.methods.answers import ANSWERS, Answering
from fedloom.policies.consensus import Agree, cross_entropy
from fedloom.registry import register
from fedloom.types import Server, Train

__all__ = ["DSFL", "sharpened"]


def sharpened(mean: Tensor, temperature: float) -> Tensor:
    """Entropy reduction: softmax(mean / T).

    >>> import torch
    >>> [round(p, 3) for p in sharpened(torch.tensor([0.6, 0.4]), 0.1).tolist()]
    [0.881, 0.119]
    """
    return (mean / temperature).softmax(-1)


@register("method", "dsfl", paper="Itahara et al., IEEE TMC 2023")
@dataclass(frozen=True)
class DSFL(Answering):
    """Models of any kind, and the server's, learn from sharpened mean probabilities on public images."""

    aggregate: Annotated[Literal["era", "sa"], "sharpen the mean (era) or take it as it is (sa)"] = "era"
    temperature: Annotated[float, Gt(0), "T of the sharpening; the smaller, the surer"] = 0.1
    epochs: Annotated[int, Ge(1), "passes over a round's public images; all else as in [train]"] = 5
    agree: ClassVar[Agree] = Agree(cross_entropy)

    def told(self, logits: Tensor) -> Tensor:
        """Probabilities."""
        return logits.softmax(-1)

    def joint(self, mean: Tensor) -> Tensor:
        """Sharpened, or the mean as it is."""
        return sharpened(mean, self.temperature) if self.aggregate == "era" else mean

    def learning(self, train: Train) -> Train:
        """As on own data."""
        return replace(train, epochs=self.epochs, steps=None)

    def round(self, server: Server, fleet: Fleet) -> Server:
        """The exchange; then the server's model learns as clients will."""
        after = super().round(server, fleet)
        known = after.memory.get("consensus")
        if known is None or known["round"] != server.round:
            return after
        home = replace(fleet.home, task=replace(fleet.home.task, round=server.round, train=fleet.train))
        (fit,) = fleet.solve(self.fit(home, server.tensors, known[ANSWERS], server.round))
        return replace(after, tensors=fit.tensors)
