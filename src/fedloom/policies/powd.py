"""Power-of-Choice: Cho, Wang, Joshi, Client selection in federated learning, arXiv:2010.01243.

d candidates are drawn without replacement in proportion to their data; the m of them with the largest loss train.
With `ask` (pow-d; with `samples` cpow-d) every candidate is sent the model and tells its loss, which costs traffic and
virtual time for the transfers; without (rpow-d) the mean training loss of the last report stands for it, infinite
before the first one. The paper averages the chosen models with equal weights: `merge.weights = "equal"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from fedloom.client import Client
from fedloom.fleet.fleet import Fleet
from fedloom.fleet.nonsense import Form
from fedloom.policies.select import Floats, Fraction, by_data, cohort_size, drawn
from fedloom.questions import QUESTIONS
from fedloom.readings import Accuracy
from fedloom.registry import register
from fedloom.types import Measure, Report, Server, Task, Work

__all__ = ["PowerOfChoice", "loss"]


@register("select", "powd", paper="Cho et al., Power-of-Choice, arXiv:2010.01243")
@dataclass(frozen=True)
class PowerOfChoice:
    """Of candidates drawn by data size, those with the largest loss."""

    fraction: Fraction = 1.0
    candidates: Annotated[float, Ge(1), "candidates for every client that trains, d / m"] = 2.0
    ask: Annotated[bool, "ask the candidates for the loss of this round's model; else go by their last report"] = True
    samples: Annotated[int, Ge(0), "training samples that an asked candidate looks at; 0: all"] = 0

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """Draw, compare, take; of equals, whoever was drawn first."""
        size = cohort_size(self.fraction, fleet)
        number = round(min(len(fleet.available), self.candidates * size))
        pool = drawn(fleet.generator("select"), fleet.available, number, by_data(fleet, fleet.available))
        losses = self._asked(fleet, server, pool) if self.ask else fleet.columns["loss"][pool]
        unknown_first = np.where(np.isnan(losses), np.inf, losses)
        return np.sort(pool[np.argsort(-unknown_first, kind="stable")[:size]])

    def _asked(self, fleet: Fleet, server: Server, pool: np.ndarray) -> Floats:
        """What each candidate answers; those who do not come last."""
        told = dict.fromkeys(pool.tolist(), -np.inf)
        shown = fleet.show(server, sorted(told), {"samples": float(self.samples)})
        for report in fleet.ask("loss", shown, Form({"loss": -np.inf})):
            told[report.client] = report.numbers["loss"]
        return np.array([told[client] for client in pool.tolist()])


def loss(method: Any, client: Client, task: Task) -> Work[Report]:
    """How well does the model you would use fit your training data, or `samples` of them, as training would see it?"""
    tensors = yield from method.final(client, task)
    seen = client.normed(client.some(int(task.numbers.get("samples", 0)), "loss"))
    read = yield Measure(tensors, Accuracy(training=True), seen)
    return Report(numbers={"loss": float(read["loss"]) / len(seen)})


QUESTIONS["loss"] = loss
