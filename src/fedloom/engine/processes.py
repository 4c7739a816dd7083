"""The processes engine: one single-threaded worker a core, for CPUs.

Workers are forked once the data are loaded, so they share them without a copy; where fork does not exist they are
spawned and load the data themselves. A worker gets a round's base tensors once and cuts clients' tensors out of them.
Private state stays with this engine and travels with a task, so any worker can take any client. Of small models tasks
travel in parcels, and a worker that has done a whole block adds its reports up if only their sum is wanted.

A worker that dies costs the one task it was doing; workers end by themselves when their parent is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from fedloom import wire
from fedloom.engine import memory
from fedloom.engine.bases import Parts, same_parts
from fedloom.engine.local import Local
from fedloom.engine.sums import added
from fedloom.engine.worker import Workplace, perform
from fedloom.errors import RunError
from fedloom.fleet.blocks import BLOCK, Blocks, Reduction, Sums
from fedloom.policies.merge import Merge
from fedloom.registry import register
from fedloom.types import Failure, Outcome, Server, Task, Tensors

__all__ = ["Processes", "end_with"]

AHEAD = 2  # parcels a worker holds: one it does and one that waits, so that it never idles between two
WINDOW = 4  # parcels a worker that may be under way, or wait here for their turn
ROOM = 2**25  # bytes that the reports of a parcel may have, about
DEATHS = 3  # times a worker, without an answer between, that workers may die before the run gives up


@dataclass(frozen=True, eq=False)
class _Parcel:
    """Consecutive tasks that go to a worker together, numbered from `first`."""

    first: int
    tasks: Sequence[Task]
    summed: bool = False  # whether their reports are to be added up there


@dataclass(frozen=True, eq=False)
class _Summing:
    """A merge over this server's tensors, and the sums of its blocks that workers have made."""

    server: Server
    made: dict[int, Sums] = field(default_factory=dict)

    def suits(self, tasks: Sequence[Task]) -> bool:
        """Whether these are a block over tensors that workers have: what they share is the server's."""
        model = (tasks[0].base or {}).get("model", {})
        ours = self.server.tensors
        return len(tasks) == BLOCK and bool(model) and all(ours.get(name) is each for name, each in model.items())


class _Worker:
    """The parent's end of a worker process."""

    def __init__(self, factory: Callable[[], Workplace]) -> None:
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(factory, theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.parcels: deque[_Parcel] = deque()
        self.base: Parts | None = None
        self.peak = 0  # of all its tasks so far

    def send(self, parcel: _Parcel, states: Sequence[dict[str, Any]], base: Parts | None, packed: bytes) -> None:
        if base is not None and self.base is not base:
            self.pipe.send_bytes(packed)
            self.base = base
        tasks = [replace(task, base=None) for task in parcel.tasks]
        message = {"tasks": tasks, "states": states, "based": base is not None, "summed": parcel.summed}
        self.pipe.send_bytes(wire.pack(message))
        self.parcels.append(parcel)

    def answered(self, outcomes: Sequence[Outcome]) -> None:
        """The first parcel is done."""
        self.parcels.popleft()
        self.peak = max([self.peak, *(outcome.peak_memory_bytes or 0 for outcome in outcomes)])

    def peak_memory(self) -> int | None:
        """Its largest memory; a task begins by forgetting the peaks of those before it."""
        return max(self.peak, memory.resident_peak(Path(f"/proc/{self.process.pid}/status")) or 0) or None


@register("engine", "processes")
class Processes(Local):
    """One single-threaded worker process per core, sharing the data."""

    def __init__(self, factory: Callable[[], Workplace], workers: int = 0) -> None:
        super().__init__(factory)
        self._factory = factory
        self._workers = [_Worker(factory) for _ in range(workers or os.cpu_count() or 1)]
        self._base: tuple[Parts, bytes] = {}, b""

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks; a bounded number of them is under way."""
        return self._run(tasks, None)

    def reduce(self, merge: Merge, server: Server, settled: bool) -> Reduction | None:
        """Blocks are added up by the worker that does them, if what counts is known there."""
        if not settled or merge != self.place.merge:
            return None
        summing = _Summing(server)
        return Blocks(partial(self._run, summing=summing), partial(merge.begin, server), summing.made)

    def _run(self, tasks: Iterable[Task], summing: _Summing | None) -> Iterator[Outcome]:
        parcels, again, done = self._parcels(tasks, summing), deque[_Parcel](), dict[int, Outcome]()
        ends = deque[int]()  # of the parcels that were given out and not yielded yet
        number, deaths = 0, 0  # of the outcome to yield next; of workers since the last answer
        try:
            while True:
                while number in done:
                    outcome = done.pop(number)
                    if outcome.state is not None:
                        self.states.propose(outcome.client, (outcome.round, outcome.stage), outcome.state)
                    yield outcome
                    number += 1
                while ends and ends[0] <= number:
                    ends.popleft()
                while len((worker := min(self._workers, key=lambda each: len(each.parcels))).parcels) < AHEAD:
                    # What is given again is what everybody waits for: no window holds it back.
                    fresh = not again and len(ends) < WINDOW * len(self._workers)
                    following = again.popleft() if again else next(parcels, None) if fresh else None
                    if following is None:
                        break
                    if fresh:
                        ends.append(following.first + len(following.tasks))
                    try:
                        self._send(worker, following)
                    except OSError:  # it is dead, and what it may have answered is lost
                        deaths += 1
                        again.extend([*_apart(worker.parcels), following])
                        self._bury(worker, deaths)
                busy = {worker.pipe: worker for worker in self._workers if worker.parcels}
                if not busy:
                    return
                for pipe in wait(list(busy)):
                    worker = busy[pipe]
                    parcel = worker.parcels[0]
                    try:
                        answer = wire.unpack(worker.pipe.recv_bytes())
                        worker.answered(answer["outcomes"])
                        deaths = 0
                        done |= dict(enumerate(answer["outcomes"], parcel.first))
                        if summing is not None and answer["sums"] is not None:
                            summing.made[parcel.first // BLOCK] = answer["sums"]
                    except (EOFError, OSError):
                        deaths += 1
                        if len(parcel.tasks) == 1:
                            done[parcel.first] = _lost(parcel.tasks[0])
                            worker.parcels.popleft()
                        again.extend(_apart(worker.parcels) if len(parcel.tasks) > 1 else worker.parcels)
                        self._bury(worker, deaths)
        finally:
            # Left early: what is still under way would answer for the next run's tasks.
            for worker in [worker for worker in self._workers if worker.parcels]:
                self._bury(worker, 0)

    def _parcels(self, tasks: Iterable[Task], summing: _Summing | None) -> Iterator[_Parcel]:
        """The tasks in parcels: large ones while there are many, small ones at the end, so that workers end together.

        No parcel reaches from one block into the next.
        """
        waiting, queue, first, workers = iter(tasks), deque[Task](), 0, len(self._workers)
        while queue or (queue := deque(islice(waiting, 1))):
            base = queue[0].base
            most = 1 if base is None else max(1, min(BLOCK, ROOM // len(self._packed(base))))
            queue.extend(islice(waiting, max(0, workers * most - len(queue))))
            share = most if len(queue) >= workers * most else len(queue) // (2 * workers)
            size = min(share, BLOCK - first % BLOCK)
            chosen = [queue.popleft()]
            while len(chosen) < size and base is not None and same_parts(queue[0].base, base):
                chosen.append(queue.popleft())
            yield _Parcel(first, chosen, summing is not None and summing.suits(chosen))
            first += len(chosen)

    def _packed(self, base: Parts) -> bytes:
        """What tasks share, as bytes; made once."""
        if not same_parts(base, self._base[0]):
            self._base = base, wire.pack({"base": {part: dict(tensors) for part, tensors in base.items()}})
        return self._base[1]

    def _bury(self, worker: _Worker, deaths: int) -> None:
        if deaths >= DEATHS * len(self._workers):
            raise RunError("worker processes keep dying; run with --engine local to see why") from None
        worker.pipe.close()
        worker.process.kill()
        worker.process.join()
        self._workers[self._workers.index(worker)] = _Worker(self._factory)

    def _send(self, worker: _Worker, parcel: _Parcel) -> None:
        base = parcel.tasks[0].base
        states = [self.states.load(task.client, task.accepted) for task in parcel.tasks]
        packed = b"" if base is None else self._packed(base)
        # The base that was packed last stands for every equal one: a worker that has it does not get it again.
        worker.send(parcel, states, None if base is None else self._base[0], packed)

    def peak_memory(self) -> int | None:
        """Peaks of this process and its workers added; what they share is counted in each."""
        known = [memory.highest(), *(worker.peak_memory() for worker in self._workers)]
        return sum(peak for peak in known if peak is not None) or None

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()  # it has nothing to put in order, and a polite signal may meet it before it listens
        for worker in self._workers:
            worker.process.join()
        super().close()


def _apart(parcels: Iterable[_Parcel]) -> list[_Parcel]:
    """What a dead worker held, the first parcel task by task, so that whoever killed it takes nobody along."""
    first, *others = parcels or [_Parcel(0, [])]
    return [*(_Parcel(number, [task]) for number, task in enumerate(first.tasks, first.first)), *others]


def _lost(task: Task) -> Outcome:
    failure = Failure(task.client, task.round, task.stage, "lost", "its worker process died")
    return Outcome(task.client, task.round, task.stage, task.job, failure=failure)


def _serve(factory: Callable[[], Workplace], pipe: Connection, parent: int) -> None:
    """A worker's life: parcels in, outcomes out, until the pipe closes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    # Read in a thread of its own: a parent that sends to a busy worker must not wait for it, or both wait for ever.
    arrivals: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, arrivals), daemon=True).start()
    place, base = factory(), dict[str, Tensors]()
    while (frame := arrivals.get()) is not None:
        message = wire.unpack(frame)
        if "base" in message:
            base = message["base"]
            continue
        tasks = [replace(task, base=base if message["based"] else None) for task in message["tasks"]]
        given = list(zip(tasks, message["states"], strict=True))
        # A trainer of one client at a time gets them all, which keeps what runs between its fits warm; who else trains
        # together must not depend on the number of workers.
        groups = [given] if place.trainer.window == 1 else [[each] for each in given]
        outcomes = [outcome for group in groups for outcome in perform(place, group)]
        sums = None
        if message["summed"]:
            outcomes, sums = added(place, base["model"], outcomes)
        pipe.send_bytes(wire.pack({"outcomes": outcomes, "sums": sums}))


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
