"""The engine of a deployment: tasks go to real devices over Flower's grid, outcomes come back in order.

Private state stays on the devices. What a client says about itself in an outcome is checked or replaced by what the
server knows: which task it was, how many bytes travelled, that it did not take longer than it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedloom import wire
from fedloom.deploy.messages import Letter
from fedloom.deploy.roster import PAUSES, Roster, Sent
from fedloom.engine import memory
from fedloom.engine.local import solve
from fedloom.engine.states import States
from fedloom.engine.worker import Workplace
from fedloom.errors import line
from fedloom.fleet.outgoing import arrived
from fedloom.types import NEVER, Failure, Moment, Outcome, Server, Task

__all__ = ["Flower"]

WINDOW = 64  # tasks under way at once, at most
PATIENCE = 3600.0  # seconds a task may take where the study sets no deadline
GRACE = 10.0  # seconds that a task may take longer than the deadline, for its way there and back


class Remote(States):
    """States that stay with their clients; the server only remembers which versions it may still ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.safe: dict[int, Moment] = {}

    def checkpoint(self, folder: Path, accepted: Mapping[int, Moment]) -> dict[str, str]:
        """From here on clients may forget what is older."""
        self.safe = dict(accepted)
        return {}


class Flower:
    """Real clients, reached over Flower."""

    def __init__(
        self,
        roster: Roster,
        place: Workplace,
        run: str,
        *,
        limit: int,
        deadline: float | None,
        arrivals: Callable[[], Mapping[str, np.ndarray]],
    ) -> None:
        self.roster, self.place, self.id, self.limit = roster, place, run, limit
        self.seconds = PATIENCE if deadline is None else deadline + GRACE
        self._remote = Remote()
        self.states: States = self._remote
        self._arrivals = arrivals

    def roll_call(self) -> Mapping[str, np.ndarray]:
        """Greet whoever came since the last round, and say who is here."""
        return self._arrivals()

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks, each device working on its own."""
        waiting, number, given, pause = enumerate(tasks), 0, 0, PAUSES[0]
        under_way: dict[str, Sent] = {}
        doing: dict[str, tuple[int, Task]] = {}
        done: dict[int, Outcome] = {}
        while True:
            while number in done:
                yield done.pop(number)
                number += 1
            while given < number + WINDOW and (following := next(waiting, None)) is not None:
                given += 1
                self._send(*following, under_way, doing, done)
            if not under_way:
                if number in done:
                    continue
                return
            found = False
            for name, sent, answer in self.roster.collect(under_way, self.limit, self.place.network.device):
                found = True
                place, task = doing.pop(name)
                done[place] = self._counted(task, self._outcome(task, sent.at, answer))
            until = time.monotonic() - self.seconds
            for name in [name for name, sent in under_way.items() if sent.at < until]:
                del under_way[name]
                place, task = doing.pop(name)
                done[place] = self._failed(task, "late", f"no report within {self.seconds:g} s")
            pause = PAUSES[0] if found else min(PAUSES[1], pause * 1.5)
            if under_way and number not in done:
                time.sleep(pause)

    def _send(
        self,
        place: int,
        task: Task,
        under_way: dict[str, Sent],
        doing: dict[str, tuple[int, Task]],
        done: dict[int, Outcome],
    ) -> None:
        member = self.roster.members[task.client]
        self.roster.round = task.round
        if member.state != "connected" or not member.ready:
            done[place] = self._failed(task, "lost", f"{member.name} is {member.state}")
            return
        whole = arrived(task, self.place.network)
        body = {"run": self.id, "task": whole, "safe": self._remote.safe.get(task.client, NEVER)}
        sent = self.roster.post({task.client: Letter("work" if task.job == "work" else "ask", body)}, self.seconds + 60)
        if not sent:
            done[place] = self._failed(task, "lost", f"{member.name} cannot be reached")
            return
        under_way |= sent
        doing |= dict.fromkeys(sent, (place, whole))

    def _outcome(self, task: Task, at: float, answer: dict[str, Any] | str) -> Outcome:
        """What an answer to a task that was sent `at` amounts to; what it tells of costs can at least be true."""
        if isinstance(answer, str):
            return self._failed(task, "lost", answer)
        claimed = answer.get("outcome")
        if "raised" in answer:
            return self._failed(task, "raised", str(answer["raised"]))
        if not isinstance(claimed, Outcome):
            return self._failed(task, "nonsense", str(answer.get("nonsense", "the answer holds no outcome")))
        told = (claimed.client, claimed.round, claimed.stage, claimed.job)
        if told != (task.client, task.round, task.stage, task.job):
            return self._failed(task, "nonsense", f"it reports on another task: client, round, stage, job are {told}")
        failure, report = claimed.failure, claimed.report
        if failure is not None:
            kind = failure.kind if failure.kind in ("raised", "late", "nonsense", "lost") else "raised"
            return self._failed(task, kind, failure.message)
        if report is None:
            return self._failed(task, "nonsense", "the outcome holds no report")
        elapsed, member = time.monotonic() - at, self.roster.members[task.client]
        if report.weight > (samples := member.facts["samples"]):
            return self._failed(task, "nonsense", f"its weight is {report.weight:g}, but it has {samples} samples")
        peak = claimed.peak_memory_bytes
        member.reports += task.job == "work"
        member.last = f"{task.job} of round {task.round + 1}"
        return Outcome(
            task.client, task.round, task.stage, task.job, replace(report, client=task.client),
            download_bytes=_count(claimed.download_bytes), upload_bytes=_count(claimed.upload_bytes),
            macs=_count(claimed.macs), forward_macs=_count(claimed.forward_macs),
            step_memory_bytes=_count(claimed.step_memory_bytes),
            parameters=_count(claimed.parameters), seconds=min(max(0.0, claimed.seconds), elapsed),
            peak_memory_bytes=None if peak is None else _count(peak),
        )  # fmt: skip

    def _counted(self, task: Task, outcome: Outcome) -> Outcome:
        """What travelled, as seen from here."""
        report = outcome.report
        if report is None:
            return outcome
        return replace(
            outcome, download_bytes=wire.size(task), upload_bytes=task.copies * wire.size(report),
            parameters=sum(value.numel() for value in report.tensors.values()),
        )  # fmt: skip

    def _failed(self, task: Task, kind: str, message: str) -> Outcome:
        member, message = self.roster.members[task.client], line(message)
        member.failures, member.last = member.failures + 1, f"{kind} in round {task.round + 1}: {message}"
        failure = Failure(task.client, task.round, task.stage, kind, message)
        return Outcome(task.client, task.round, task.stage, task.job, failure=failure)

    def reduce(self, merge: object, server: Server, settled: bool) -> None:
        """Reports are added up as they come."""

    def solve(self, requests: Sequence[Any]) -> list[Any]:
        """The server's own requests, here."""
        return solve(self.place, requests)

    def peak_memory(self) -> int | None:
        """The server's own; each device tells its own in the ledger."""
        return memory.highest()

    def close(self) -> None:
        """Nothing to let go of: the grid belongs to whoever made it."""


def _count(claimed: int) -> int:
    """What a client tells of itself, if it can be true; even the sum over a thousand clients fits into 64 bits."""
    return claimed if 0 <= claimed < 2**53 else 0
