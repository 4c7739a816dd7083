"""A worker of the Ray engine: what runs as an actor on a machine of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedloom import wire
from fedloom.engine import memory
from fedloom.engine.bases import Parts
from fedloom.engine.cluster import library
from fedloom.engine.states import States
from fedloom.engine.sums import kept_back
from fedloom.engine.worker import Workplace, perform
from fedloom.fleet.blocks import Summed, Sums
from fedloom.types import Moment, Outcome, Report, Server, Task

__all__ = ["Worker"]


class Worker:
    """An actor of the cluster: a workplace, the states that live there, and sums under way."""

    def begin(self, build: Callable[[], Workplace]) -> None:
        """Start anew for a run."""
        self.place = build()
        memory.begin(self.place.network.device)
        self.states = States(self.place.network.device)
        self.base: tuple[bytes, Parts] = b"", {}
        self.token, self.reports = -1, dict[int, Report]()

    def settled(self) -> None:
        """All workers have begun."""
        settle = getattr(self.place, "moved_in", None)
        if settle is not None:
            settle()

    def run(
        self,
        frame: bytes,
        base: list[Any],
        states: Mapping[int, tuple[Moment, bytes]],
        reduction: tuple[int, Any, list[Any], Mapping[int, bool]] | None,
    ) -> tuple[bytes, list[int]]:
        """Do a batch: its outcomes, and which clients have a state now. With a reduction, reports stay here."""
        device = self.place.network.device
        for client, (moment, state) in states.items():
            self.states.replace(client, moment, wire.unpack(state, device))
        if reduction is not None:
            self._begin_sums(*reduction)
        parts = self._parts(base) if base else None
        tasks: list[Task] = [replace(task, base=parts) for task in wire.unpack(frame, device)]
        outcomes, held = [], []
        window = max(1, self.place.trainer.window)
        for start in range(0, len(tasks), window):
            group = [(task, self.states.load(task.client, task.accepted)) for task in tasks[start : start + window]]
            for outcome in perform(self.place, group):
                if outcome.state is not None:
                    self.states.propose(outcome.client, (outcome.round, outcome.stage), outcome.state)
                    held.append(outcome.client)
                kept = replace(outcome, state=None)
                outcomes.append(kept if reduction is None else self._set_aside(kept))
        return wire.pack(outcomes), held

    def _parts(self, base: list[Any]) -> Parts:
        """The tensors that a round's tasks share, fetched once."""
        (reference,) = base
        if self.base[0] != reference.binary():
            frame = library().get(reference)
            self.base = reference.binary(), wire.unpack(memoryview(frame), self.place.network.device)
        return self.base[1]

    def _begin_sums(self, token: int, merge: Any, base: list[Any], verdicts: Mapping[int, bool]) -> None:
        if token != self.token:
            self.server, self.merge = Server(0, dict(self._parts(base)["model"]), self.place.network), merge
            self.joined: Summed = merge.begin(self.server)
            self.token, self.reports = token, {}
        self._add(verdicts)

    def _set_aside(self, outcome: Outcome) -> Outcome:
        """Keep a report until it is known whether it counts."""
        bare = kept_back(outcome, self.place.network, self.place.form)
        if outcome.report is not None and bare.failure is None:
            self.reports[outcome.client] = outcome.report
        return bare

    def _add(self, verdicts: Mapping[int, bool]) -> None:
        for client, counts in verdicts.items():
            report = self.reports.pop(client)
            if counts:
                self.joined.add(report)

    def sums(self, verdicts: Mapping[int, bool]) -> Sums:
        """All reports here that count, added up."""
        self._add(verdicts)
        self.token, self.reports = -1, {}
        return self.joined.sums()

    def combine(self, *parts: Sums) -> Sums:
        """Sums of several workers, added up."""
        whole: Summed = self.merge.begin(self.server)
        for part in parts:
            whole.combine(part)
        return whole.sums()

    def versions(self, accepted: Mapping[int, Moment]) -> list[tuple[int, Moment, bytes]]:
        """The accepted states of these clients; older ones are forgotten."""
        settled = ((client, self.states.settle(client, moment)) for client, moment in accepted.items())
        return [(client, each[0], wire.pack(each[1])) for client, each in settled if each is not None]

    def peak_memory(self) -> int | None:
        """This process's peak, or its device's."""
        return memory.highest(self.place.network.device)
