"""The fleet: all that a method's server half sees of the world.

Clients are columns (samples, capacity, what their last reports said), so that a million of them are a few arrays. What
a round learns of them is held back until the round is over: an interrupted round leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, Protocol

import numpy as np
import torch

from fedloom.client import Client, States
from fedloom.encoding import dense
from fedloom.errors import RunError
from fedloom.network import Network
from fedloom.seeds import SERVER, numpy_generator, torch_generator
from fedloom.types import NEVER, Base, Failure, Moment, Named, Outcome, Report, Task, Tensors, Train, Where

__all__ = ["Engine", "Fleet"]


class Engine(Protocol):
    """Whatever runs tasks: in this process, in several, on a cluster, on real machines."""

    states: States

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks, with a bounded number of tasks under way."""

    def solve(self, requests: Sequence[Any]) -> list[Any]:
        """Do the server's own heavy work."""

    def close(self) -> None:
        """Let go of workers."""


class Fleet:
    """Clients as columns, a random generator, and `run`, `ask`, `solve`."""

    def __init__(
        self,
        columns: Mapping[str, np.ndarray],
        engine: Engine,
        network: Network,
        home: Client,
        *,
        seed: int,
        names: tuple[Named, Named],
        quorum: float = 0.5,
    ) -> None:
        self.columns = dict(columns)
        self.size = len(self.columns["samples"])
        blank = {
            "loss": np.nan,
            "squared_loss": np.nan,
            "seconds": np.nan,
            "seen": -1,
            "round": NEVER[0],
            "stage": NEVER[1],
        }
        for name, value in blank.items():
            self.columns.setdefault(name, np.full(self.size, value))
        self.engine, self.network, self.home, self.seed, self.quorum = engine, network, home, seed, quorum
        self.method, self.model = names
        self.ledger: list[dict[str, Any]] = []
        self.failures: list[Failure] = []
        self.begin(0, Train())

    def begin(self, round: int, train: Train) -> None:
        """Forget what an unfinished round left, and start this one."""
        self.round, self.stage, self.train = round, 0, train
        self._news: dict[int, tuple[Moment, Mapping[str, float]]] = {}

    def commit(self) -> None:
        """The round counts: its news become columns."""
        for client, ((round, stage), numbers) in self._news.items():
            self.columns["round"][client], self.columns["stage"][client] = round, stage
            self.columns["seen"][client] = round
            for name in numbers.keys() & {"loss", "squared_loss", "seconds"}:
                self.columns[name][client] = numbers[name]
        self._news = {}

    @property
    def available(self) -> np.ndarray:
        """Clients that could train now, ascending."""
        mask = self.columns.get("available")
        return np.arange(self.size) if mask is None else np.flatnonzero(mask)

    def generator(self, purpose: str, client: int = SERVER) -> np.random.Generator:
        """Random numbers for this purpose in this round and stage (NumPy)."""
        return numpy_generator(self.seed, self.round, self.stage, client, purpose)

    def torch_generator(self, purpose: str, client: int = SERVER) -> torch.Generator:
        """Random numbers for this purpose in this round and stage (torch, CPU)."""
        return torch_generator(self.seed, self.round, self.stage, client, purpose)

    def accepted(self, client: int) -> Moment:
        """The moment of the client's last report that counted."""
        if client in self._news:
            return self._news[client][0]
        return int(self.columns["round"][client]), int(self.columns["stage"][client])

    def task(
        self,
        client: int,
        parts: Mapping[str, Tensors] | None = None,
        *,
        where: Where | None = None,
        numbers: Mapping[str, float] | None = None,
        inbox: Mapping[int, Report] | None = None,
    ) -> Task:
        """A task for a client in this round; `parts` are shared by the round's tasks and cut to `where` on the way."""
        base = None if parts is None else Base(f"{self.round}.{self.stage}:{'+'.join(parts)}", parts)
        return Task(
            int(client), self.round, self.stage, where=where, numbers=numbers or {}, inbox=inbox or {},
            train=self.train, accepted=self.accepted(client), method=self.method, model=self.model, base=base,
        )  # fmt: skip

    def run(self, tasks: Iterable[Task]) -> Iterator[Report]:
        """Reports of the clients that did their work, in the order of the tasks; RunError below the quorum."""
        return self._stream(tasks, needed=self.quorum)

    def ask(self, question: str, tasks: Iterable[Task]) -> Iterator[Report]:
        """Answers to a question; clients that fail to answer are left out."""
        return self._stream((replace(task, job=question) for task in tasks), needed=0.0)

    def solve(self, *requests: Any) -> list[Any]:
        """The server's own heavy work, on `home` data: one answer a request."""
        return self.engine.solve(requests)

    def _stream(self, tasks: Iterable[Task], needed: float) -> Iterator[Report]:
        asked = answered = 0
        for outcome in self.engine.run(tasks):
            asked += 1
            report, failure = outcome.report, outcome.failure
            if report is not None and (reason := self._nonsense(report)):
                failure = Failure(outcome.client, self.round, self.stage, "nonsense", reason)
            self.ledger.append(outcome.entry() | {"failed": failure.kind if failure else ""})
            if failure is not None or report is None:
                self.failures.append(failure or Failure(outcome.client, self.round, self.stage, "lost", "no report"))
                continue
            answered += 1
            if outcome.job == "work":
                self._news[outcome.client] = (self.round, self.stage), {**report.numbers, "seconds": outcome.seconds}
            yield report
        if answered < ceil(needed * asked):
            last = self.failures[-1]
            raise RunError(
                f"round {self.round + 1}: {answered} of {asked} clients reported, the quorum is {needed:.0%}; "
                f"last failure: client {last.client} {last.kind}: {last.message}"
            )

    def _nonsense(self, report: Report) -> str:
        """Why a report cannot be used; empty if it can."""
        shapes = self.network.shapes(report.where)
        finite = []
        for name, value in (
            (name, value) for part in (report.tensors, *report.extra.values()) for name, value in part.items()
        ):
            if name not in shapes:
                return f"tensor '{name}' is not in the model"
            tensor = dense(value)
            if tensor.shape != shapes[name]:
                return f"tensor '{name}' has shape {tuple(tensor.shape)}, expected {tuple(shapes[name])}"
            finite.append(torch.isfinite(tensor).all())
        if finite and not bool(torch.stack(finite).all()):
            return "a tensor is not finite"
        if not all(np.isfinite(number) for number in (report.weight, *report.numbers.values())):
            return "a number is not finite"
        return ""
