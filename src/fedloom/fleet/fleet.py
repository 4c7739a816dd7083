"""The fleet: all that a method's server half sees of the world.

Clients are columns (samples, capacity, what their last reports said), so that a million of them are a few arrays. What
a round learns of them is held back until the round is over: an interrupted round leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from fedloom.client import Client
from fedloom.errors import RunError
from fedloom.fleet.blocks import Blocks, Joined, Reduction, Summed
from fedloom.fleet.clock import seconds_of
from fedloom.fleet.nonsense import FREE, Form, nonsense
from fedloom.fleet.outgoing import Turns, unanswered
from fedloom.fleet.traces import presence
from fedloom.network import Network
from fedloom.seeds import SERVER, numpy_generator, torch_generator
from fedloom.types import NEVER, Failure, Moment, Named, Outcome, Report, Server, Task, Tensors, Train, Where

if TYPE_CHECKING:
    from fedloom.policies.merge import Merge

__all__ = ["Engine", "Fleet", "Keeper"]


LEARNED = {"loss", "squared_loss", "seconds"}  # what the server remembers of a client's last report


class Keeper(Protocol):
    """Who keeps the clients' states, as far as a run's checkpoints go."""

    def checkpoint(self, folder: Path, accepted: Mapping[int, Moment]) -> dict[str, str]:
        """Write the accepted version of every client and name the files by client."""

    def restore(self, folder: Path, files: Mapping[str, str]) -> None:
        """Go back to what a checkpoint names."""


class Engine(Protocol):
    """Whatever runs tasks: in this process, in several, on a cluster, on real machines."""

    @property
    def states(self) -> Keeper:
        """Who keeps the clients' states."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks, with a bounded number of tasks under way."""

    def reduce(self, merge: Merge, server: Server, settled: bool) -> Reduction | None:
        """Reports added up where they are made, if the engine does that; `settled`: each will count unless it is
        nonsense."""

    def solve(self, requests: Sequence[Any]) -> list[Any]:
        """Do the server's own heavy work."""

    def roll_call(self) -> Mapping[str, np.ndarray]:
        """Columns that may have changed since the last round: who is there, with what; nothing in a simulation."""

    def peak_memory(self) -> int | None:
        """Largest memory of all its processes together, in bytes, where it can be known."""

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
        names: Sequence[Named],
        others: Sequence[Network] = (),
        quorum: float = 0.5,
        deadline: float | None = None,
        form: Form = FREE,
        shown: Callable[[Server], Tensors] = lambda server: server.tensors,
        completed: Callable[[Server, Fleet], Server] = lambda server, fleet: server,
    ) -> None:
        self.columns = dict(columns)
        self.size = len(self.columns["samples"])
        last = dict(zip(("round", "stage", "asked"), (*NEVER, NEVER[0]), strict=True)) | dict.fromkeys(LEARNED, np.nan)
        self.columns |= {name: np.full(self.size, value) for name, value in last.items()}
        self.engine, self.networks, self.home, self.seed = engine, (network, *others), home, seed
        self.quorum, self.deadline, self.form, self.shown, self._completed = quorum, deadline, form, shown, completed
        self.method, *self.models = names
        self.heard: Callable[[str], None] = lambda job: None  # told of every task that is over
        self.begin(0, Train())

    def begin(self, round: int, train: Train, now: float = 0.0) -> None:
        """Forget what an unfinished round left, and start this one, `now` virtual seconds into the run."""
        self.round, self.stage, self.train = round, 0, train
        self.ledger: list[dict[str, Any]] = []
        self.failed: list[Failure] = []
        self._news: dict[int, tuple[Moment, Mapping[str, float]]] = {}
        nobody = np.zeros(self.size, bool)
        out = self.columns.get("excluded", nobody) | self.columns.get("absent", nobody)
        # Virtual seconds spent: at first, waiting for somebody who may train.
        self.elapsed, self._leaves = presence(self.columns, now, out)
        chance = self.columns.get("availability", np.ones(self.size))
        drawn = self.generator("availability").random(self.size) if chance.min() < 1 else np.zeros(self.size)
        late = np.where(out | (self._leaves <= self.elapsed), np.inf, drawn / chance)
        # A round that would begin with nobody waits for the first who comes.
        self.available = np.flatnonzero(late < max(1.0, np.nextafter(late.min(), np.inf)))

    @property
    def present(self) -> np.ndarray:
        """Clients that can be asked at all: everybody, but for real devices that are not connected."""
        return np.flatnonzero(~self.columns.get("absent", np.zeros(self.size, bool)))

    def commit(self) -> None:
        """The round counts: its news become columns."""
        for client, ((round, stage), numbers) in self._news.items():
            self.columns["round"][client], self.columns["stage"][client] = round, stage
            for name in numbers.keys() & LEARNED:
                self.columns[name][client] = numbers[name]
        for entry in (entry for entry in self.ledger if entry["job"] == "work"):
            self.columns["asked"][entry["client"]] = self.round
            if entry["failed"] == "late" and self.deadline is not None:
                self.columns["seconds"][entry["client"]] = self.deadline  # at least that
        self._news = {}

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

    def kind(self, client: int) -> int:
        """The place of the client's model in the study's list."""
        return int(self.columns["kind"][client]) if "kind" in self.columns else 0

    def completed(self, server: Server) -> Server:
        """The server as it is evaluated: with what the method asks the clients for first."""
        return self._completed(server, self)

    def show(
        self, server: Server, clients: Iterable[int], numbers: Mapping[str, float] | None = None
    ) -> Iterator[Task]:
        """Tasks that show clients the server's model, everyone the one of its kind, to be asked about."""
        parts = [{"model": self.shown(server.of(kind))} for kind in range(len(self.networks))]
        return (self.task(client, parts[self.kind(client)], numbers=numbers) for client in clients)

    def task(
        self,
        client: int,
        parts: Mapping[str, Tensors] | None = None,
        *,
        where: Where | None = None,
        only: tuple[str, ...] | None = None,
        numbers: Mapping[str, float] | None = None,
        inbox: Mapping[int, Report] | None = None,
        copies: int = 1,
    ) -> Task:
        """A task for a client in this round; `parts` are shared by the round's tasks and cut to `where` on the way."""
        kind = self.kind(client)
        return Task(
            int(client), self.round, self.stage, where=where, only=only, numbers=numbers or {}, inbox=inbox or {},
            copies=copies, train=self.train, accepted=self.accepted(client), method=self.method,
            model=self.models[kind], kind=kind, base=parts,
        )  # fmt: skip

    def run(self, tasks: Iterable[Task], quorum: float | None = None, form: Form | None = None) -> Iterator[Report]:
        """Reports of the clients that did their work, in the order of the tasks; RunError below the quorum.

        They hold what every report of the method must, or what this form says instead.
        """
        turns, needed = Turns(tasks, self._drops_out), self.quorum if quorum is None else quorum
        return self._stream(self.engine.run(turns), turns, needed, form or self.form)

    def join(self, merge: Merge, server: Server, tasks: Iterable[Task]) -> Joined:
        """Run tasks of which only the joined reports are wanted; an engine may add them up where they are made."""
        joined = merge.begin(server)
        if not isinstance(joined, Summed):
            for report in self.run(tasks):
                joined.add(report)
            return joined
        settled = self.deadline is None and bool(np.isinf(self._leaves).all())  # nobody will turn out late, or gone
        blocks = self.engine.reduce(merge, server, settled) or Blocks(self.engine.run, partial(merge.begin, server))
        turns = Turns(tasks, self._drops_out)
        for report in self._stream(blocks.run(turns), turns, self.quorum, self.form):
            blocks.add(report)
        joined.combine(blocks.sums())
        return joined

    def ask(self, question: str, tasks: Iterable[Task], form: Form = FREE) -> Iterator[Report]:
        """Answers to a question, of this form; clients that fail to answer are left out."""
        turns = Turns((replace(task, job=question) for task in tasks), lambda task: False)
        return self._stream(self.engine.run(turns), turns, 0.0, form)

    def solve(self, *requests: Any) -> list[Any]:
        """The server's own heavy work, on `home` data: one answer a request."""
        return self.engine.solve(requests)

    def _drops_out(self, task: Task) -> bool:
        chance = self.columns.get("dropout")
        return chance is not None and 0 < chance[task.client] > self.generator("dropout", task.client).random()

    def _silent(self, tasks: Sequence[Task]) -> bool:
        """Write down who was asked and never reports; whether there is anybody."""
        for task in tasks:
            self._fail(unanswered(task, self.networks[task.kind]), "dropped", "never reported")
        return bool(tasks)

    def _fail(self, outcome: Outcome, kind: str, reason: str, trace: str = "") -> None:
        self.failed.append(Failure(outcome.client, outcome.round, outcome.stage, kind, reason, trace))
        self.ledger.append(outcome.entry() | {"virtual_seconds": 0.0, "failed": kind, "reason": reason})

    def _stream(self, outcomes: Iterable[Outcome], turns: Turns, needed: float, form: Form) -> Iterator[Report]:
        answered, slowest, before = 0, 0.0, len(self.failed)
        waited = False  # for somebody who never reports: the server cannot know, and waits for the deadline
        # A task does not start from what others of the same call brought: engines pull them ahead by more or less.
        news: dict[int, tuple[Moment, Mapping[str, float]]] = {}
        try:
            for outcome in outcomes:
                self.heard(outcome.job)
                waited |= self._silent(turns.passed())
                report, failure = outcome.report, outcome.failure
                if failure is not None or report is None:
                    why = (failure.kind, failure.message, failure.trace) if failure else ("lost", "no report")
                    self._fail(outcome, *why)
                    continue
                if reason := nonsense(report, self.networks[self.kind(outcome.client)], form, outcome.finite):
                    self._fail(replace(outcome, report=None, parameters=0), "nonsense", reason)
                    continue
                seconds = seconds_of(outcome, self.columns, self.generator)
                if outcome.job == "work":
                    stays = self._leaves[outcome.client] - self.elapsed
                    if self.deadline is not None and min(seconds, stays) > self.deadline:
                        slowest = self.deadline
                        needs = f"needs {seconds:.3g} virtual seconds, the deadline is {self.deadline:g}"
                        self._fail(outcome, "late", needs)
                        continue
                    if seconds > stays:
                        slowest = max(slowest, stays)
                        self._fail(outcome, "dropped", f"left after {stays:.3g} of {seconds:.3g} virtual seconds")
                        continue
                    news[outcome.client] = (self.round, self.stage), {**report.numbers, "seconds": seconds}
                slowest = max(slowest, seconds)
                self.ledger.append(outcome.entry() | {"virtual_seconds": seconds, "failed": "", "reason": ""})
                answered += 1
                yield report
            waited |= self._silent(turns.passed())
        finally:
            self._news |= news
        self.elapsed += self.deadline if waited and self.deadline is not None else slowest
        self.require(answered, answered + len(self.failed) - before, needed)

    def require(self, answered: int, asked: int, needed: float) -> None:
        """RunError if fewer than this share reported."""
        if answered < ceil(needed * asked - 1e-9):
            last = self.failed[-1]
            raise RunError(
                f"round {self.round + 1}: {answered} of {asked} clients reported, the quorum is {needed:.0%}; "
                f"last failure: client {last.client} {last.kind}: {last.message}. "
                "A new run with engine.quorum=0 lets such rounds pass",
                last.trace,
            )
