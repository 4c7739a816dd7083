"""The processes engine: one single-threaded worker a core, for CPUs.

Workers are forked once the data are loaded, so they share them without a copy; where fork does not exist they are
spawned and load the data themselves. A worker gets a round's base tensors once and cuts clients' tensors out of them.
Private state stays with this engine and travels with a task, so any worker can take any client. A worker that dies
costs the one task it was doing; workers end by themselves when their parent is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from fedloom import wire
from fedloom.engine import memory
from fedloom.engine.local import Local
from fedloom.engine.worker import Workplace, perform
from fedloom.errors import RunError
from fedloom.registry import register
from fedloom.types import Failure, Outcome, Task, Tensors

__all__ = ["Processes", "end_with"]

Parts = Mapping[str, Tensors]
AHEAD = 2  # tasks a worker holds: one it does and one that waits, so that it never idles between two


class _Worker:
    """The parent's end of a worker process."""

    def __init__(self, factory: Callable[[], Workplace]) -> None:
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(factory, theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.tasks: deque[tuple[int, Task]] = deque()
        self.base: Parts | None = None

    def send(self, number: int, task: Task, state: dict[str, Any], base: Parts | None, packed: bytes) -> None:
        if base is not None and self.base is not base:
            self.pipe.send_bytes(packed)
            self.base = base
        self.tasks.append((number, task))
        self.pipe.send_bytes(
            wire.pack({"task": replace(task, base=None), "based": task.base is not None, "state": state})
        )


@register("engine", "processes")
class Processes(Local):
    """One single-threaded worker process per core, sharing the data."""

    def __init__(self, factory: Callable[[], Workplace], workers: int = 0) -> None:
        super().__init__(factory)
        self._factory = factory
        self._workers = [_Worker(factory) for _ in range(workers or os.cpu_count() or 1)]
        self._base: tuple[Parts, bytes] = {}, b""

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks; at most a few tasks a worker are under way."""
        waiting, number, given, deaths = enumerate(tasks), 0, 0, 0
        again: deque[tuple[int, Task]] = deque()
        done: dict[int, Outcome] = {}
        try:
            while True:
                while number in done:
                    outcome = done.pop(number)
                    if outcome.state is not None:
                        self.states.propose(outcome.client, (outcome.round, outcome.stage), outcome.state)
                    yield outcome
                    number += 1
                while len((worker := min(self._workers, key=lambda each: len(each.tasks))).tasks) < AHEAD:
                    # What is given again is what everybody waits for: no window holds it back.
                    fresh = not again and given < number + 4 * len(self._workers)
                    following = again.popleft() if again else next(waiting, None) if fresh else None
                    if following is None:
                        break
                    given = max(given, following[0] + 1)
                    try:
                        self._send(worker, *following)
                    except OSError:  # it died while idle: nothing of it is lost
                        deaths = self._bury(worker, deaths)
                        again.extend([*worker.tasks, following] if following not in worker.tasks else worker.tasks)
                busy = {worker.pipe: worker for worker in self._workers if worker.tasks}
                if not busy:
                    return
                for pipe in wait(list(busy)):
                    worker = busy[pipe]
                    try:
                        done[worker.tasks[0][0]] = wire.unpack(worker.pipe.recv_bytes())
                        worker.tasks.popleft()
                    except (EOFError, OSError):
                        place, task = worker.tasks.popleft()
                        failure = Failure(task.client, task.round, task.stage, "lost", "its worker process died")
                        done[place] = Outcome(task.client, task.round, task.stage, task.job, failure=failure)
                        again.extend(worker.tasks)
                        deaths = self._bury(worker, deaths)
        finally:
            # Left early: what is still under way would answer for the next run's tasks.
            for worker in [worker for worker in self._workers if worker.tasks]:
                self._bury(worker, 0)

    def _bury(self, worker: _Worker, deaths: int) -> int:
        if deaths >= 3 * len(self._workers):
            raise RunError("worker processes keep dying; run with --engine local to see why") from None
        worker.pipe.close()
        worker.process.kill()
        worker.process.join()
        self._workers[self._workers.index(worker)] = _Worker(self._factory)
        return deaths + 1

    def _send(self, worker: _Worker, number: int, task: Task) -> None:
        if task.base is not None and not _same(task.base, self._base[0]):
            self._base = task.base, wire.pack({"base": {part: dict(tensors) for part, tensors in task.base.items()}})
        base, packed = self._base if task.base is not None else (None, b"")
        worker.send(number, task, self.states.load(task.client, task.accepted), base, packed)

    def peak_memory(self) -> int | None:
        """Peaks of this process and its workers added; what they share is counted in each."""
        paths = [Path(f"/proc/{worker.process.pid}/status") for worker in self._workers]
        known = [memory.peak(), *(memory.peak(path) for path in paths)]
        return sum(peak for peak in known if peak is not None) or None

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()  # it has nothing to put in order, and a polite signal may meet it before it listens
        for worker in self._workers:
            worker.process.join()


def _same(one: Parts, two: Parts) -> bool:
    """Whether two bases are made of the very same tensors."""
    return one.keys() == two.keys() and all(
        one[part].keys() == two[part].keys() and all(tensor is two[part][name] for name, tensor in one[part].items())
        for part in one
    )


def _serve(factory: Callable[[], Workplace], pipe: Connection, parent: int) -> None:
    """A worker's life: tasks in, outcomes out, until the pipe closes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    # Read in a thread of its own: a parent that sends to a busy worker must not wait for it, or both wait for ever.
    arrivals: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, arrivals), daemon=True).start()
    place, base = factory(), None
    while (frame := arrivals.get()) is not None:
        message = wire.unpack(frame)
        if "base" in message:
            base = message["base"]
            continue
        task: Task = replace(message["task"], base=base if message["based"] else None)
        (outcome,) = perform(place, [(task, message["state"])])
        pipe.send_bytes(wire.pack(outcome))


def _receive(pipe: Connection, arrivals: SimpleQueue[bytes | None]) -> None:
    while True:
        try:
            arrivals.put(pipe.recv_bytes())
        except (EOFError, OSError):
            arrivals.put(None)
            return


def end_with(parent: int) -> None:
    """Wait until the parent is gone, and end this process then."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
