"""What methods have in common whose clients tell what they answer on public images, and no tensors of their models.

Everybody has a model of its own, of any architecture, and the same public images. A round's work: learn from the joint
answers of the last round, train on the own data, tell the answers on the images of this round. So there is one exchange
a round; its images are drawn from the study's seed and need not travel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from fedloom.client import Client
from fedloom.copies import to_device
from fedloom.encoding import dense
from fedloom.fleet.fleet import Fleet
from fedloom.method import Method
from fedloom.methods.unasked import refuse
from fedloom.policies.consensus import Agree, Answers, drawn, lesson
from fedloom.steps import Descent
from fedloom.types import Fit, Measure, Report, Server, Task, Tensors, Train, Work

__all__ = ["Answering"]

ANSWERS = "answers"
UNUSED = ("cut", "share", "start", "merge", "filter")  # slots that are about tensors of models


@dataclass(frozen=True)
class Answering(Method):
    """Models stay where they are; answers on public images travel."""

    samples: Annotated[int, Ge(1), "public images that a round is about, drawn anew; all if there are fewer"] = 1000
    public: ClassVar[bool] = True
    public_everywhere: ClassVar[bool] = True
    mixes: ClassVar[bool] = True
    agree: ClassVar[Agree]  # how far a model is from the joint answers

    def told(self, logits: Tensor) -> Tensor:
        """What a client tells of its logits."""
        return logits

    def joint(self, mean: Tensor) -> Tensor:
        """The answers to learn from, of the mean of what was told."""
        return mean

    def learning(self, train: Train) -> Train:
        """How one learns from them, where `train` is how one trains on own data."""
        return train

    def check(self) -> None:
        """Slots that are about tensors have nothing to do."""
        super().check()
        refuse(self, UNUSED, "sends answers on public images and no models")

    def round(self, server: Server, fleet: Fleet) -> Server:
        """Send the last joint answers, join the new ones: a mean in which everybody counts the same."""
        last: dict[str, Any] = server.memory.get("consensus", {})
        parts = {"consensus": {ANSWERS: last[ANSWERS]}} if last else None
        numbers = {"drawn": float(last["round"])} if last else {}
        size, network = min(self.samples, len(fleet.home.train)), server.network
        like = {ANSWERS: torch.empty(size, network.classes, dtype=network.dtype, device="meta")}
        total = torch.zeros(size, network.classes, dtype=torch.float64, device=network.device)
        tasks = (fleet.task(client, parts, numbers=numbers) for client in self.select(fleet, server))
        count = 0
        for report in fleet.run(tasks, form=replace(fleet.form, tensors=like)):
            total += dense(report.tensors[ANSWERS])
            count += 1
        if count:
            joint = self.joint(total / count).to(network.dtype)
            server.memory["consensus"] = {"round": server.round, ANSWERS: joint}
        return server.next(server.tensors)

    def work(self, client: Client, task: Task) -> Work[Report]:
        """Learn, train, answer."""
        own = client.whole if "own" in client.state else (yield from self.begin(client))
        if answers := client.received("consensus"):
            own = (yield self.fit(client, own, answers[ANSWERS], int(task.numbers["drawn"]))).tensors
        fit = yield Fit(own, Descent.of(self.loss(), task.train), client.plan(), self.fixed(client, own))
        client.keep(fit.tensors)
        about = drawn(client, self.samples, task.round)
        read = yield Measure(fit.tensors, Answers(about.total), about.samples)
        (numbers,) = to_device([about.numbers], client.network.device)
        return Report({ANSWERS: self.told(read["logits"][numbers])}, float(client.samples), fit.numbers)

    def begin(self, client: Client) -> Work[Tensors]:
        """The model that a client starts with when it first takes part."""
        return client.whole
        yield

    def fit(self, client: Client, tensors: Tensors, answers: Tensor, round: int) -> Fit:
        """A model's fit to joint answers on the images of a round."""
        about, train = drawn(client, self.samples, round), self.learning(client.task.train)
        return lesson(client, tensors, about.table(answers), about.samples, self.agree, train)

    def final(self, client: Client, task: Task) -> Work[Tensors]:
        """The own model."""
        return client.whole
        yield

    def evaluation(self, server: Server) -> Tensors:
        """Nothing travels: clients have what they use."""
        return {}
