"""FedSGD: McMahan et al., AISTATS 2017, section 2: the baseline with one full-batch gradient step a client.

Averaging models after one step of equal size is averaging gradients, so this is FedAvg with E = 1 and B = infinity;
the study's batch size, epochs and steps do not apply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedloom.client import Client
from fedloom.methods.fedavg import FedAvg
from fedloom.registry import register
from fedloom.types import Plan


@register("method", "fedsgd", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
class FedSGD(FedAvg):
    """One gradient over all of a client's data, averaged at the server."""

    ignores: ClassVar[tuple[str, ...]] = ("batch_size", "epochs", "steps")

    def plan(self, client: Client) -> Plan:
        """One step over everything."""
        # At least two: a client that has one sample sees it twice where there are norm layers.
        return client.plan(train=replace(client.task.train, batch_size=max(2, client.samples), epochs=1, steps=None))
