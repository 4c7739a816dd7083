"""A client as its own half of a method sees it: its data, its private state, its random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedloom.batches import sizes_of, stream
from fedloom.copies import to_device
from fedloom.encoding import dense
from fedloom.network import Network
from fedloom.seeds import seed_of, torch_generator
from fedloom.types import Images, Plan, Samples, Task, Tensors, Train, Where

__all__ = ["Client"]


@dataclass(frozen=True, eq=False)
class Client:
    """One participant during one task. Nothing here leaves it except through its report.

    `state` starts as the last accepted version; what the work puts into it is proposed, and counts once the report has
    been accepted. Entries are replaced, never changed in place.
    """

    id: int
    task: Task
    seed: int
    network: Network
    train: Samples
    validation: Samples
    test: Samples
    capacity: float = 1.0
    state: dict[str, Any] = field(default_factory=dict)
    groups: Mapping[str, Samples] = field(default_factory=dict)  # the test part by group, where all test on all groups
    public: Samples | None = None  # images that all have, where the method wants that
    secret: int | None = None  # a real device's own: whoever knows the run's seed could take its noise away again

    @property
    def samples(self) -> int:
        """How many samples it trains on."""
        return len(self.train)

    @property
    def classes(self) -> Tensor:
        """The classes it holds."""
        return self.held.nonzero().squeeze(1)

    @cached_property
    def held(self) -> Tensor:
        """One boolean a class of the data set, on the host: whether the client trains on it."""
        return torch.bincount(self.train.images.labels[self.train.rows], minlength=self.network.classes) > 0

    @property
    def rate(self) -> Tensor:
        """The round's learning rate, as a step wants it."""
        return self.network.scalar(self.task.train.lr)

    def fixed(self, **more: Any) -> dict[str, Any]:
        """What every step may read: the rate and the classes held; and what a method adds."""
        return {"lr": self.rate, "held": self.network.mask(self.held), **more}

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers of its own for this purpose in this round and stage."""
        return torch_generator(self.seed, self.task.round, self.task.stage, self.id, purpose)

    def noise(self, purpose: str) -> torch.Generator:
        """Random numbers of its own that nobody else can draw; in a simulation they repeat like all others."""
        if self.secret is None:
            return self.generator(purpose)
        return torch_generator(self.secret, self.task.round, self.task.stage, self.id, purpose)

    def received(self, part: str = "model") -> Tensors:
        """A part of the task as plain tensors."""
        return {name: dense(value) for name, value in self.task.tensors.get(part, {}).items()}

    def trained(self, tensors: Tensors) -> Tensors:
        """Those of the tensors that training changes by gradients: no buffers."""
        return {name: tensor for name, tensor in tensors.items() if name not in self.network.buffers}

    def own(self, names: frozenset[str]) -> Tensors:
        """Its own full-size version of these tensors; at first, the common initial one."""
        kept: Tensors = self.state.get("own", {})
        missing = names - kept.keys()
        first = self.network.initial(self.seed) if missing else {}
        return {name: first[name] if name in missing else kept[name] for name in sorted(names)}

    @property
    def whole(self) -> Tensors:
        """Its own version of the whole model, in the network's order; at first, the common initial one."""
        own = self.own(frozenset(self.network.names))
        return {name: own[name] for name in self.network.names}

    def keep(self, tensors: Tensors, where: Where | None = None) -> None:
        """Propose its own version of these tensors, put back to full size where they were cut."""
        full = self.network.units.place(tensors, where, self.own(frozenset(tensors))) if where else tensors
        self.state["own"] = {**self.state.get("own", {}), **full}
        self.state.pop("where", None)  # a device that grew trains the whole model now
        if where:
            self.state["where"] = dict(where)

    def used(self, tensors: Tensors) -> Tensors:
        """The part of a whole model that it uses: where it keeps tensors, the units that it last trained them for."""
        where = None if self.task.where else self.state.get("where")
        return self.network.units.take(tensors, where) if where else tensors

    def some(self, count: int, purpose: str) -> Samples:
        """So many of its training samples, drawn at random; all of them for 0 or for more than it has."""
        rows = self.train.rows
        if not 0 < count < len(rows):
            return self.train
        chosen = torch.randperm(len(rows), generator=self.generator(purpose))[:count]
        return replace(self.train, rows=rows[chosen.to(rows.device)])

    def amount(self, train: Train) -> int:
        """How many epochs, or steps, it does in this round: all of them, or where work is uneven as chance will."""
        if not train.uneven or torch.rand((), generator=(draw := self.generator("work"))) >= train.uneven:
            return train.most
        return int(torch.randint(min(train.least, train.most), train.most + 1, (), generator=draw))

    def normed(self, part: Samples) -> Samples:
        """A part that batch norm can go by: a single sample is there twice where there are norm layers."""
        return replace(part, rows=part.rows.repeat(2)) if len(part) == 1 and self.network.norms else part

    def plan(
        self,
        parts: Sequence[Samples] = (),
        variants: int = 1,
        train: Train | None = None,
        purpose: str = "fit",
        shuffle: bool = True,
    ) -> Plan:
        """The batches of a fit: one of each part a step (default: the training part), drawn without replacement.

        A part that is named twice gives two different batches of it. An epoch is one pass over the first part; the
        others start again when they run out. With several variants, each step draws one of them. A last batch of one
        sample joins the one before it: batch norm cannot train on a single sample. Two fits of one task that should
        see different batches say what each is for.
        """
        parts = parts or (self.train,)
        if not min(len(part) for part in parts):
            raise ValueError(f"client {self.id} has no samples to train on")
        train, generator = train or self.task.train, self.generator(f"plan {purpose}")
        uses = {id(part): sum(part is other for other in parts) for part in parts}
        epoch = max(1, len(sizes_of(len(parts[0]), train.batch_size)) // uses[id(parts[0])])
        amount = self.amount(train)
        number = amount * epoch if train.steps is None else amount
        apart = len(uses) > 1 and any(part.augment for part in parts)  # then each has copies of its own
        pools = {id(part): self._pool(part, -(-number // epoch), generator, apart) for part in parts}
        images, start = pools[id(parts[0])][0], 0
        if apart:
            x, y = (torch.cat([getattr(pool, name) for pool, _ in pools.values()]) for name in ("x", "y"))
            images = replace(images, x=x, y=y)
            for key, (pool, rows) in pools.items():
                pools[key] = pool, [each + start for each in rows]
                start += len(pool.x)
        streams = {
            key: stream(pool, train.batch_size, generator, uses[key], shuffle) for key, (_, pool) in pools.items()
        }
        steps = [tuple(next(streams[id(part)]) for part in parts) for _ in range(number)]
        drawn = torch.randint(variants, (number,), generator=generator).tolist() if variants > 1 else [0] * number
        seed = seed_of(self.seed, self.task.round, self.task.stage, self.id, purpose)
        return Plan(images, steps, drawn, min(epoch, number), seed)

    def _pool(self, part: Samples, epochs: int, generator: torch.Generator, apart: bool) -> tuple[Images, list[Tensor]]:
        """Images to draw from and, epoch by epoch, their rows: the client's as they are, or (augmented) copies."""
        rows = self.normed(part).rows
        if part.augment is None and not apart:
            return part.images, [rows]
        (own,), epochs = to_device([rows], part.images.x.device), epochs if part.augment else 1
        seen = part.augment or (lambda x, _: x)
        copies = torch.cat([seen(part.images.x[own], generator) for _ in range(epochs)])
        images = replace(part.images, x=copies, y=part.images.y[own].repeat(epochs), own=True)
        return images, [torch.arange(len(own)) + number * len(own) for number in range(epochs)]
