"""FedCPN: Zhao and Chen, Local adaptive federated learning with channel personalized normalization, JEIT 2024.

For clients whose images look different though their labels do not. Three parts: images are augmented (RandAugment, a
matter of the study: `data.augment = "randaugment"`), normalised by the mean and standard deviation of the client's own
images (equations 3 to 5), and a client starts between its own last model and the global one (equations 6 to 8,
`policies/adaptive.py`) in the top p = 5 layers. The server takes the weighted mean (equation 9).

Not said in the paper, and chosen here: weights of the mixture are clipped to [0, 1] as in FedALA; they have settled
when ten losses differ by less than 0.1; statistics are those of the images before augmentation. Algorithm 1 trains on
all data and takes a sample for the weights only, the experiments sample the training data too: `train_on`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fedloom.client import Client
from fedloom.errors import InputError
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.adaptive import Adaptive
from fedloom.policies.start import Start
from fedloom.registry import register
from fedloom.types import Plan


@register("method", "fedcpn", paper="Zhao and Chen, JEIT 2024")
@dataclass(frozen=True)
class FedCPN(FedAvg):
    """Clients normalise by their own statistics and start from a learned mixture of their own and the global model."""

    normalise: Annotated[Literal["personal", "study"], "by the client's own statistics, or as data.normalise says"] = (
        "personal"
    )
    train_on: Annotated[Literal["all", "sample"], "all training images, or the round's sample alone"] = "all"
    start: Start = Adaptive()

    @property
    def personal(self) -> bool:
        """Whether equations 3 to 5 hold."""
        return self.normalise == "personal"

    def check(self) -> None:
        """The sample is that of the start."""
        super().check()
        if self.train_on == "sample" and not isinstance(self.start, Adaptive):
            raise InputError("fedcpn's sample is that of the start 'adaptive'; with another start set train_on to all")

    def plan(self, client: Client) -> Plan:
        """Line 16, or the experiments."""
        if self.train_on == "sample" and isinstance(self.start, Adaptive):
            return client.plan((self.start.sampled(client),))
        return client.plan()
