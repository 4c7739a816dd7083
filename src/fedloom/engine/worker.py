"""The client's side of every engine: take a task, run the method's half, answer its requests, make an outcome."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

from fedloom import wire
from fedloom.client import Client
from fedloom.engine import memory
from fedloom.fleet.nonsense import Form, looked_at
from fedloom.fleet.outgoing import arrived
from fedloom.network import Network
from fedloom.policies.merge import Merge
from fedloom.types import Failure, Fit, Fitted, Measure, Outcome, Report, Task

__all__ = ["Trainer", "Workplace", "perform"]


class Trainer(Protocol):
    """Does fits and measures, for as many clients at once as it likes."""

    window: int

    def solve(self, requests: Sequence[Any]) -> list[Any]:
        """One answer a request, an exception for one that failed."""

    def close(self) -> None:
        """Let go of what was made for the run."""


class Workplace(Protocol):
    """Where clients' data are: what `run` hands to an engine."""

    @property
    def network(self) -> Network:
        """The model at any width."""

    @property
    def trainer(self) -> Trainer:
        """What does the heavy work."""

    @property
    def deadline(self) -> float | None:
        """Seconds that a task may take."""

    @property
    def filter(self) -> Callable[[Client, Report], Report] | None:
        """What is done to reports before they leave a client."""

    @property
    def merge(self) -> Merge:
        """How the method joins reports."""

    @property
    def form(self) -> Form:
        """What reports of the method's work must hold."""

    @property
    def jobs(self) -> Mapping[str, Callable[[Client, Task], Generator[Any, Any, Report]]]:
        """What a task can ask for."""

    def client(self, task: Task, state: dict[str, Any]) -> Client:
        """The client that a task is for."""


class _Job:
    """One client's generator under way; whatever fails in it fails as this client."""

    def __init__(self, place: Workplace, task: Task, state: dict[str, Any]) -> None:
        self.place, self.network, self.task, self.state, self.before = place, place.network, task, state, dict(state)
        self.download_bytes = self.upload_bytes = self.macs = self.forward_macs = self.step_memory = 0
        self.generator: Generator[Any, Any, Report] | None = None
        self.requests: tuple[Any, ...] | None = ()  # None: nothing more to come
        self.seconds, self.single = 0.0, True
        self.report: Report | None = None
        self.failure: Failure | None = None

    def advance(self, answers: Sequence[Any]) -> None:
        """Hand over the answers to the last requests, and get the next ones."""
        begin = perf_counter()
        try:
            self._in_time()
            asked = self._next(answers)
            self.single = not isinstance(asked, tuple)
            each = (asked,) if self.single else asked
            self.requests = tuple(replace(request, kind=self.task.kind) for request in each)
        except StopIteration as stop:
            self.requests, self.report = None, stop.value
        except Exception as error:  # noqa: BLE001 (a client's failure is a value)
            self.requests, self.failure = None, self._failed(error)
        self.seconds += perf_counter() - begin

    def pressing(self) -> Sequence[Any]:
        """What it requests now, and until when."""
        if self.place.deadline is None:
            return self.requests or ()
        until = perf_counter() + self.place.deadline - self.seconds
        return [replace(each, until=until) if isinstance(each, Fit) else each for each in self.requests or ()]

    def _in_time(self) -> None:
        if self.place.deadline is not None and self.seconds > self.place.deadline:
            raise TimeoutError(f"not done after {self.place.deadline:g} s")

    def _next(self, answers: Sequence[Any]) -> Any:
        if self.generator is None:
            self.generator = self._open()
            return next(self.generator)
        for request, answer in zip(self.requests or (), answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            if isinstance(request, Measure):
                self.macs += request.what.passes * self.network.macs(request.tensors) * len(request.samples)
            if isinstance(answer, Fitted):
                self.macs += answer.macs
                self.forward_macs = answer.forward_macs  # the last fit is mostly that of the model that is sent
                self.step_memory = max(self.step_memory, answer.step_memory)
        return self.generator.send(answers[0] if self.single else tuple(answers))

    def _open(self) -> Generator[Any, Any, Report]:
        task = arrived(self.task, self.place.network)
        self.download_bytes = wire.size(task)
        client = self.place.client(task, self.state)
        self.network = client.network
        report = yield from self.place.jobs[task.job](client, task)
        if self.place.filter is not None and task.job == "work":
            report = self.place.filter(client, report)
        report = replace(report, client=task.client)
        # Here, so that what cannot travel fails as this client.
        self.upload_bytes = task.copies * wire.size(wire.fitting(report))
        if _changed(self.before, self.state):
            wire.size(self.state)
        return report

    def _failed(self, error: Exception) -> Failure:
        message = str(error) if (late := isinstance(error, TimeoutError)) else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return Failure(self.task.client, self.task.round, self.task.stage, "late" if late else "raised", message, trace)

    def outcome(self, peak: int | None, finite: bool | None) -> Outcome:
        """What became of it, with its costs; a question leaves the state as it was."""
        task = self.task
        sent = self.report.tensors.values() if self.report else ()
        # A client that tried several models tells the cost of the one that it sent.
        forward = int((self.report.numbers if self.report else {}).get("forward_macs", self.forward_macs))
        proposes = self.report is not None and task.job == "work" and _changed(self.before, self.state)
        return Outcome(
            task.client, task.round, task.stage, task.job, self.report, self.failure, self.state if proposes else None,
            self.download_bytes, self.upload_bytes, self.macs, forward, self.seconds,
            peak if self.report else None, self.step_memory, sum(value.numel() for value in sent),
            finite,
        )  # fmt: skip


def _changed(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() != after.keys() or any(after[key] is not value for key, value in before.items())


def perform(place: Workplace, tasks: Sequence[tuple[Task, dict[str, Any]]]) -> list[Outcome]:
    """Run some clients' work side by side: whatever they request at the same time goes to the trainer together.

    They share the process, so its peak of memory is that of all of them.
    """
    memory.reset(place.network.device)
    jobs = [_Job(place, task, state) for task, state in tasks]
    for job in jobs:
        job.advance([])
    while pending := [job for job in jobs if job.requests is not None]:
        # Who wants one client at a time is asked client by client, so that each one's time is known.
        groups = [[job] for job in pending] if place.trainer.window == 1 else [pending]
        for group, answers in [(group, _solved(place, group)) for group in groups]:
            for job in group:
                job.advance([next(answers) for _ in job.requests or ()])
    peak = memory.peak(place.network.device)
    sound = looked_at([job.report for job in jobs])
    return [job.outcome(peak, finite) for job, finite in zip(jobs, sound, strict=True)]


def _solved(place: Workplace, jobs: Sequence[_Job]) -> Iterator[Any]:
    """The answers to all that they request, in order; the time that took is theirs in equal parts."""
    begin = perf_counter()
    answers = place.trainer.solve([request for job in jobs for request in job.pressing()])
    for job in jobs:
        job.seconds += (perf_counter() - begin) / len(jobs)
    return iter(answers)
