"""FedMD: Li and Wang, Heterogenous federated learning via model distillation, arXiv:1910.03581.

Every party has a model of its own design. It first learns the public images with their labels, then its
own (transfer learning). Then, round by round: communicate (tell logits on public images), aggregate (their plain mean),
digest (fit them by mean absolute error, as the paper's code does), revisit (train on own data). What is told at the end
of a round is digested at the start of the next, so the last answers are not digested any more.

The paper's code stops its transfer learning early by test data; here epochs are counted instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from fedloom.client import Client
from fedloom.methods.answers import Answering
from fedloom.policies.consensus import Agree, absolute
from fedloom.policies.objective import CrossEntropy
from fedloom.registry import register
from fedloom.steps import Descent
from fedloom.types import Fit, Server, Tensors, Train, Work


@register("method", "fedmd", paper="Li and Wang, arXiv:1910.03581")
@dataclass(frozen=True)
class FedMD(Answering):
    """Models of any kind learn from the mean of all logits on public images."""

    samples: Annotated[int, Ge(1), "public images that a round is about, drawn anew; all if there are fewer"] = 5000
    public_epochs: Annotated[int, Ge(0), "passes over the labelled public images before all else; 0: no labels"] = 20
    private_epochs: Annotated[int, Ge(0), "passes over the own images after that"] = 25
    digest_epochs: Annotated[int, Ge(1), "passes over a round's public images"] = 1
    digest_lr: Annotated[float, Gt(0), "rate of digesting, with Adam"] = 1e-3
    digest_batch: Annotated[int, Ge(1), "batch size of digesting"] = 256
    agree: ClassVar[Agree] = Agree(absolute)

    def learning(self, train: Train) -> Train:
        """Digest: its own rate and batches, Adam."""
        return Train(self.digest_lr, self.digest_batch, self.digest_epochs, optimizer="adam")

    def begin(self, client: Client) -> Work[Tensors]:
        """Transfer learning: public images first, then the own ones."""
        own, train = client.whole, client.task.train
        stages = (
            ("labelled", client.public, self.public_epochs, CrossEntropy()),
            ("private", client.train, self.private_epochs, self.loss()),
        )
        for purpose, samples, epochs, objective in stages:
            if samples is not None and epochs:
                longer = replace(train, epochs=epochs, steps=None)
                plan = client.plan([samples], train=longer, purpose=purpose)
                own = (yield Fit(own, Descent.of(objective, longer), plan, self.fixed(client, own))).tensors
        return own

    def model(self, server: Server) -> Tensors | None:
        """There is no global model."""
        return None
