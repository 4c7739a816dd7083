"""The Ray engine: workers on a cluster, or several on one machine.

A worker is an actor with a workplace of its own: it loads the data itself, keeps the states of the clients that it has
seen, and has the trainer of its device. Tasks travel in batches. The tensors that a round's tasks share are put into
the object store once, and every worker cuts its clients' sub-models out of them. A client that has a state goes to the
worker that holds it, any other to whoever is free.

`flat` brings every report here and yields it in the order of the tasks: the same bits as the local engine. `tree` adds
reports up at their workers and then the workers' sums in a tree; only the last sum comes here.

A worker that dies is replaced. What it was doing is done again elsewhere (or fails, as `lost` says). If states died
with it that no checkpoint has, the round is done again, or all rounds since the last checkpoint: the result is that of
a run in which nothing died.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import ceil
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt

from fedloom import wire
from fedloom.engine import memory
from fedloom.engine.actor import Worker
from fedloom.engine.bases import Parts, same_parts
from fedloom.engine.cluster import connect, first_line, library
from fedloom.engine.holdings import Holdings, Numbered, Slot
from fedloom.engine.local import solve
from fedloom.engine.worker import Workplace
from fedloom.errors import FedloomError, InputError, RoundLost, RunError
from fedloom.fleet.blocks import Reduction, Sums
from fedloom.registry import register
from fedloom.types import Failure, Moment, Outcome, Report, Server, Task, Tensors

__all__ = ["Ray", "dismiss"]

Key = tuple[str, float, float]
AHEAD = 2  # batches a worker holds: one it does and one that waits
BATCH = 64  # tasks in a batch at most, unless the trainer wants more at once
HELD = 2**30  # bytes of reports that may wait here for their turn, about
TRIES = 3  # times that a task's worker may die before the task counts as lost
FAN = 4  # sums that are added in one step of the tree
PATIENCE = 300  # seconds that workers may take to start
_tokens = count()
_warm: dict[Key, list[Any]] = {}  # workers that a finished run of this process left


@register("engine", "ray")
class Ray:
    """Workers on a Ray cluster, on one machine or many."""

    def __init__(
        self,
        factory: Callable[[], Workplace],
        workers: int = 0,
        *,
        address: Annotated[str, "local (this machine alone), auto (the cluster running here) or host:port"] = "local",
        cpus: Annotated[float, Gt(0), "CPUs of a worker"] = 1.0,
        gpus: Annotated[float | None, Ge(0), "GPUs of a worker; by default one if the device is cuda"] = None,
        reduce: Annotated[
            Literal["flat", "tree"], "reports one by one, as the local engine; or added up at the workers"
        ] = "flat",
        lost: Annotated[Literal["again", "fail"], "what a dead worker was doing is done again, or failed"] = "again",
    ) -> None:
        self.check(reduce=reduce, lost=lost)
        self.ray = library()
        self.place = factory()
        self.tree, self.again = reduce == "tree", lost == "again"
        self.states = Holdings(self.ask)
        self.own = connect(address)
        self.resources = cpus, float(self.place.network.device.type == "cuda") if gpus is None else gpus
        self.deaths, self._bytes, self._base = 0, 0, (dict[str, Tensors](), None)
        try:
            dismiss(self.key)
            self.build = self.ray.put(self.place.elsewhere())  # type: ignore[attr-defined]
            self.slots = [self._slot(number, _warm_worker(self.key)) for number in range(self._room(workers))]
            self._started()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def check(reduce: str = "flat", lost: str = "again", **_: Any) -> None:
        """Refuse what cannot run: no Ray, or failures that could not be told apart."""
        library()
        if reduce == "tree" and lost == "fail":
            raise InputError(
                "engine.lost = 'fail' needs engine.reduce = 'flat': of sums that died with a worker nobody knows which "
                "clients were in them"
            )

    @property
    def key(self) -> Key:
        """What workers must have in common to take one another's place."""
        return (self.ray.get_runtime_context().get_job_id(), *self.resources)

    # Workers: how many there is room for, how they start and how they are followed by others.

    def _room(self, wanted: int) -> int:
        """How many workers to start."""
        cpus, gpus = self.resources
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        room = sum(
            min(int(each.get("CPU", 0) / cpus), int(each.get("GPU", 0) / gpus) if gpus else 10**9) for each in nodes
        )
        if not room or wanted > room:
            offers = "; ".join(f"{each.get('CPU', 0):g} CPUs, {each.get('GPU', 0):g} GPUs" for each in nodes)
            raise InputError(
                f"engine.workers is {wanted or 'as many as fit'}, but the cluster has room for {room} (a worker takes "
                f"{cpus:g} CPUs and {gpus:g} GPUs; its machines have {offers}); change engine.workers, cpus or gpus"
            )
        return wanted or room

    def _slot(self, number: int, actor: Any = None) -> Slot:
        cpus, gpus = self.resources
        if actor is None:
            # Worker is restarted by us, not by Ray: a worker that came back without its states would be taken for one
            # that has them.
            options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
            actor = self.ray.remote(**options)(Worker).remote()
        return Slot(number, actor, actor.begin.remote(self.build))

    def _started(self) -> None:
        """Wait for all workers; what one cannot begin with is the user's to know."""
        while starting := [slot for slot in self.slots if slot.starting is not None]:
            ready, _ = self.ray.wait([slot.starting for slot in starting], num_returns=1, timeout=PATIENCE)
            if not ready:
                free = self.ray.available_resources()
                raise RunError(
                    f"{len(starting)} of {len(self.slots)} workers did not start in {PATIENCE} s; the cluster has "
                    f"{free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs free"
                )
            self._live()
        self.ray.get([slot.actor.settled.remote() for slot in self.slots])

    def _begun(self, slot: Slot) -> None:
        try:
            self.ray.get(slot.starting)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, FedloomError) else None
            kind = InputError if isinstance(cause, InputError) else RunError
            raise kind(f"a worker could not begin: {first_line(cause or error)}") from error
        slot.starting = None

    def _live(self) -> list[Slot]:
        """Workers that can take tasks; those that have started since the last look are among them."""
        for slot in self.slots:
            if slot.starting is not None and self.ray.wait([slot.starting], timeout=0)[0]:
                try:
                    self._begun(slot)
                except self._gone:
                    self._bury(slot)
        return [slot for slot in self.slots if slot.starting is None]

    def _bury(self, slot: Slot) -> list[Moment]:
        """Another worker for this slot; the moments of states that are gone for good."""
        self.deaths += 1
        if self.deaths > TRIES * len(self.slots) + TRIES:
            raise RunError("workers keep dying; run with --engine local to see why") from None
        self.ray.kill(slot.actor, no_restart=True)
        self.slots[slot.number] = self._slot(slot.number)
        return self.states.bury(slot)

    def ask(self, slot: Slot, call: Any) -> Any:
        """What a worker answers; if it died, what it held is lost."""
        try:
            return self.ray.get(call)
        except self._gone as error:
            self._bury(slot)
            raise RoundLost(f"a worker died: {first_line(error)}", before=True) from error

    @property
    def _gone(self) -> tuple[type[Exception], ...]:
        """What Ray says when a worker, its machine or what it made is no more."""
        found = self.ray.exceptions
        return found.RayActorError, found.ObjectLostError, found.WorkerCrashedError, found.NodeDiedError

    # Tasks: pulled as far ahead as memory allows, sent in batches, yielded in order.

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks."""
        return self._run(tasks, None)

    def reduce(self, merge: Any, server: Server, settled: bool) -> Reduction | None:
        """Reports added up at the workers, if that is asked for."""
        return _Sums(self, merge, server) if self.tree else None

    def _run(self, tasks: Iterable[Task], reduction: _Sums | None) -> Iterator[Outcome]:
        waiting, number, pulled = enumerate(tasks), 0, 0
        self._loose: deque[Numbered] = deque()
        self._tries: Counter[int] = Counter()
        done: dict[int, tuple[Slot | None, Outcome]] = {}
        flying: dict[Any, tuple[Slot, list[Numbered]]] = {}
        more = True
        try:
            while True:
                while number in done:
                    slot, outcome = done.pop(number)
                    yield outcome
                    if reduction is not None and slot is not None and outcome.failure is None and outcome.report:
                        slot.verdicts[outcome.client] = reduction.counts(outcome.client)
                    number += 1
                while more and pulled - number < 2 * AHEAD * len(self.slots) * self._size:
                    following = next(waiting, None)
                    more = following is not None
                    if following is not None:
                        pulled += 1
                        self._place(following, reduction is not None)
                live = self._live()
                while wanting := [each for each in live if len(each.batches) < AHEAD and (each.bound or self._loose)]:
                    # By tasks, not by batches: who waits with long batches must not take what others could do sooner.
                    slot = min(wanting, key=lambda each: sum(map(len, each.batches)))
                    batch = self._batch(slot, len(live))
                    flying[self._send(slot, batch, reduction)] = slot, batch
                if number == pulled and not more:
                    self.deaths = 0
                    return
                self._wait(flying, done, reduction)
        finally:
            for slot in self.slots:
                slot.stale = slot.stale or bool(slot.batches)
                slot.batches.clear()
                slot.bound.clear()

    @property
    def _size(self) -> int:
        """Tasks in a batch at most: what the trainer wants at once, but no more reports than memory here allows."""
        room = HELD // (2 * AHEAD * len(self.slots) * max(1, self._bytes))
        return max(1, min(max(BATCH, self.place.trainer.window), room))

    def _place(self, numbered: Numbered, fixed: bool) -> None:
        """To the worker that holds the client's state; else to anybody, or by turns where sums must not depend on
        who was faster."""
        number, task = numbered
        if task.base is not None:
            self._bytes = sum(tensor.nbytes for tensors in task.base.values() for tensor in tensors.values())
        slot = self.states.slots.get(task.client)
        if slot is None and fixed:
            live = self._live() or self.slots
            slot = live[number % len(live)]
        (self._loose if slot is None else slot.bound).append(numbered)

    def _batch(self, slot: Slot, workers: int) -> list[Numbered]:
        """The next tasks of a worker: its own first, then its share of those that anybody can do."""
        queue = slot.bound or self._loose
        # Late batches are small, so that nobody is left with many of them; a trainer of many wants them together.
        together = self.place.trainer.window > 1 or queue is slot.bound
        share = ceil(len(queue) / (1 if queue is slot.bound else workers if together else 2 * workers))
        batch: list[Numbered] = []
        while queue and len(batch) < min(share, self._size):
            suspect, first = self._tries[queue[0][0]], batch[0][1] if batch else queue[0][1]
            if batch and (suspect or not same_parts(queue[0][1].base, first.base)):
                break
            batch.append(queue.popleft())
            if suspect:  # its worker died: alone, it can take nobody else with it
                break
        return batch

    def _send(self, slot: Slot, batch: list[Numbered], reduction: _Sums | None) -> Any:
        tasks = [task for _, task in batch]
        base = [] if tasks[0].base is None else [self._put(tasks[0].base)]
        states = self.states.sent_along(slot, (task.client for task in tasks))
        summing = None
        if reduction is not None:
            summing = reduction.token, reduction.merge, reduction.based(tasks[0].base, base), slot.verdicts
            slot.verdicts, slot.sums = {}, True
        frame = wire.pack([replace(task, base=None) for task in tasks])
        slot.batches.append(batch)
        return slot.actor.run.remote(frame, base, states, summing)

    def _put(self, parts: Parts) -> Any:
        """The reference to what tasks share; it goes into the object store once."""
        if not same_parts(parts, self._base[0]) or self._base[1] is None:
            self._base = dict(parts), self.put(parts)
        return self._base[1]

    def put(self, parts: Parts) -> Any:
        """Tensors in the object store."""
        frame = wire.pack({part: dict(tensors) for part, tensors in parts.items()})
        return self.ray.put(np.frombuffer(frame, np.uint8))

    def _wait(
        self,
        flying: dict[Any, tuple[Slot, list[Numbered]]],
        done: dict[int, tuple[Slot | None, Outcome]],
        reduction: _Sums | None,
    ) -> None:
        """Take in what has come back, or wait for something to happen."""
        calls = list(flying) or [slot.starting for slot in self.slots if slot.starting is not None]
        ready, _ = self.ray.wait(calls, num_returns=1, timeout=1.0 if flying else PATIENCE)
        if not ready and not flying:
            raise RunError(f"no worker is left, and none could be started in {PATIENCE} s")
        for call in ready:
            if call not in flying:  # a worker that has started
                continue
            slot, batch = flying.pop(call)
            try:
                frame, held = self.ray.get(call)
            except self._gone as error:
                for other in [other for other, (where, _) in flying.items() if where is slot]:
                    del flying[other]
                self._recover(slot, done, reduction, first_line(error))
                return
            except self.ray.exceptions.RayTaskError as error:
                raise RunError(f"a worker failed: {first_line(error)}") from error
            slot.batches.remove(batch)
            outcomes: list[Outcome] = wire.unpack(frame, self.place.network.device)
            done |= {number: (slot, outcome) for (number, _), outcome in zip(batch, outcomes, strict=True)}
            if held:
                self.states.held(slot, held, (outcomes[0].round, outcomes[0].stage))

    def _recover(
        self, slot: Slot, done: dict[int, tuple[Slot | None, Outcome]], reduction: _Sums | None, reason: str
    ) -> None:
        """Replace a dead worker; do again what it was doing, or the round, or all since the last checkpoint."""
        first = slot.batches[0] if slot.batches else []
        queued = [numbered for batch in list(slot.batches)[1:] for numbered in batch]
        round = first[0][1].round if first else 0
        gone = self._bury(slot)
        if self.again and (gone or reduction is not None):
            raise RoundLost(f"a worker died: {reason}", before=any(moment < (round, 0) for moment in gone))
        for number, task in [*first, *queued]:
            self._tries[number] += (number, task) in first
            if not self.again or self._tries[number] >= TRIES:
                failure = Failure(task.client, task.round, task.stage, "lost", f"its worker died: {reason}")
                done[number] = None, Outcome(task.client, task.round, task.stage, task.job, failure=failure)
            else:
                self._loose.append((number, task))
        self._loose.extend(slot.bound)
        self._loose = deque(sorted(self._loose, key=lambda numbered: numbered[0]))

    def roll_call(self) -> dict[str, Any]:
        """Clients neither come nor go."""
        return {}

    def solve(self, requests: Sequence[Any]) -> list[Any]:
        """The server's own requests, here."""
        return solve(self.place, requests)

    def peak_memory(self) -> int | None:
        """Peaks of this process and of the workers added."""
        calls = [slot.actor.peak_memory.remote() for slot in self._live()]
        known = [memory.highest(), *self.ray.get(calls)]
        return sum(peak for peak in known if peak is not None) or None

    def close(self) -> None:
        """Leave idle workers for the next run of this process, end the others; end the cluster if it is ours."""
        if not self.ray.is_initialized():
            return
        self._base = {}, None
        for slot in getattr(self, "slots", []):
            if slot.starting is None and not slot.stale and not self.own:
                _warm.setdefault(self.key, []).append(slot.actor)
            else:
                self.ray.kill(slot.actor, no_restart=True)
        self.slots = []  # a worker that is left twice would be two workers to the next run
        if self.own:
            self.ray.shutdown()


class _Sums:
    """A merge whose reports stay at the workers until their sums are wanted."""

    def __init__(self, engine: Ray, merge: Any, server: Server) -> None:
        self.engine, self.merge, self.server, self.token = engine, merge, server, next(_tokens)
        self._counting: set[int] = set()
        self._reference: list[Any] = []

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks, without tensors."""
        for slot in self.engine.slots:
            slot.verdicts, slot.sums = {}, False
        return self.engine._run(tasks, self)

    def based(self, parts: Parts | None, reference: list[Any]) -> list[Any]:
        """Where workers find the server's tensors: mostly they are what the tasks share."""
        model = (parts or {}).get("model", {})
        if model and all(self.server.tensors.get(name) is tensor for name, tensor in model.items()):
            return reference
        self._reference = self._reference or [self.engine.put({"model": self.server.tensors})]
        return self._reference

    def add(self, report: Report) -> None:
        """This one counts."""
        self._counting.add(report.client)

    def counts(self, client: int) -> bool:
        """Whether a report counted; asked once."""
        found = client in self._counting
        self._counting.discard(client)
        return found

    def sums(self) -> Sums:
        """The workers' sums, a few at a time, until one is left."""
        engine, workers = self.engine, [slot for slot in self.engine.slots if slot.sums]
        parts = [slot.actor.sums.remote(slot.verdicts) for slot in workers]
        while len(parts) > 1:
            groups = [parts[start : start + FAN] for start in range(0, len(parts), FAN)]
            actors = [workers[number % len(workers)].actor for number in range(len(groups))]
            parts = [actor.combine.remote(*group) for actor, group in zip(actors, groups, strict=True)]
        try:
            sums: Sums = engine.ray.get(parts[0]) if parts else self.merge.begin(self.server).sums()
            return sums
        except engine._gone as error:
            raise RoundLost(f"a worker died: {first_line(error)}", before=False) from error


def _warm_worker(key: Key) -> Any:
    """A worker that an earlier run left, if there is one."""
    left = _warm.get(key)
    return left.pop() if left else None


def dismiss(but: Key | None = None) -> None:
    """End the workers that earlier runs left, but for those of one kind: they would be in the way of others."""
    for key in [key for key in _warm if key != but]:
        for actor in _warm.pop(key):
            with suppress(ValueError, RuntimeError):  # of a cluster that is gone
                library().kill(actor, no_restart=True)
