"""The graphs trainer (CUDA): a client's step is captured once and replayed, clients side by side on streams.

An eager step of a small network is mostly the host's time for launching kernels. Captured as a CUDA graph it is one
launch. A *machine* holds static memory for one client (or for K stacked ones: `engine/stacked.py`) and one graph a kind
of step (variant, batch size). Its graphs read their batch from a table of row numbers by a counter that they advance
themselves, and write the samples' losses into another table, so that a whole fit is a row of replays during which the
host neither waits nor copies. Machines of equal signature are kept and used again in later rounds; ten clients of five
widths are ten machines on ten streams.

Measures are captured too, by a *gauge*: one batch's sums as a graph, replayed for every client that asks the same. A
batch size is captured when it comes the third time; until then, and for readings that carry tensors, the reference
does it. Steps that cannot be hashed or captured, or that draw with Python's own generators, run step by step, and the
log says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from math import ceil
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fedloom.batches import batches_of
from fedloom.engine.reference import Eager, Reference, trained
from fedloom.engine.stacked import Beat, Stack, room, shared_images, signature, stackable, timetable, wasted
from fedloom.engine.undrawn import undrawn
from fedloom.network import Network
from fedloom.seeds import seeded
from fedloom.types import Fit, Fitted, Images, Measure, Plan, Request, Tensors

__all__ = ["Graphs"]

log = logging.getLogger("fedloom.engine")
STREAMS = 16
SIDE_BY_SIDE = 32  # machines of one signature; more clients run in waves
STACK_BELOW = 2_000_000  # forward MACs a sample: smaller networks gain by stacking, larger ones by streams
STACK_FROM = 8  # clients
MACHINES_KEPT = 96  # signatures
GRAPHS_KEPT = 64  # batch sizes that a gauge captures
Kind = tuple[int, tuple[int, ...], bool]  # variant, batch sizes, masked


class Lane:
    """A stream and the memory in which all graphs of that stream keep what lives for one replay.

    They replay one after another and leave their results in memory of their own, so they may share it: what a step
    needs beside its tensors is there once a stream, not once a machine.
    """

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        # A pool ends with its last graph, and its name must not be used again then: one graph stays.
        with torch.cuda.stream(self.stream):
            mark = torch.zeros((), device=self.stream.device)
            self._stays = mark, self.record(mark.zero_)

    def record(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The work as a graph; called on the lane's stream.

        PyTorch's context manager for this hands all cached memory back first, on the device and on the host. Where
        every round brings new sizes that costs more than the capture, and stops what runs beside it.
        """
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        graph.capture_begin(pool=self.pool)
        try:
            work()
        finally:
            graph.capture_end()
        return graph


class Machine:
    """Static memory and captured steps for one fit at a time (or for one stack of fits)."""

    def __init__(self, network: Network, fits: Sequence[Fit], lane: Lane, steps: int) -> None:
        self.network, self.lane, self.steps, self.stacked = network, lane, steps, len(fits) > 1
        self.stream, self.graphs = lane.stream, dict[Kind, torch.cuda.CUDAGraph]()
        first = fits[0]
        self.variants = first.steps
        self.model = Eager(network, training=True)
        images = shared_images(fits) if self.stacked else first.plan.images
        x, y = images.x, images.y
        if images.own:
            x, y = x.new_zeros(room(images), *x.shape[1:]), y.new_zeros(room(images))
        self.images = Images(x, y, images.mean.clone(), images.std.clone(), images.own)
        self.normed = images.mean  # whose numbers normalise now
        self.rows: dict[tuple[int, ...], Tensor] = {}
        self.active: dict[tuple[int, ...], Tensor] = {}
        self.losses: dict[tuple[int, ...], Tensor] = {}
        self.count: dict[tuple[int, ...], Tensor] = {}
        if self.stacked:
            self.stack = Stack(network, fits, self.model)
            self.tensors, self.slots = self.stack.tensors, self.stack.slots
            self.fixed: Mapping[str, Any] = self.stack.joint.fixed
        else:
            self.tensors = {name: tensor.detach().clone() for name, tensor in first.tensors.items()}
            self.slots = self.variants[0].slots(trained(self.tensors, network))
            self.fixed = {name: _clone(value) for name, value in first.fixed.items()}
        self.first_slots = {kind: {n: t.clone() for n, t in slot.items()} for kind, slot in self.slots.items()}

    @torch.no_grad()
    def load(
        self, fits: Sequence[Fit], orders: Mapping[tuple[int, ...], Tensor], masks: Mapping[tuple[int, ...], Tensor]
    ) -> None:
        """Copy a fit (or K of them) into the static memory."""
        if self.stacked:
            for name, tensor in self.tensors.items():
                torch.stack([fit.tensors[name].detach() for fit in fits], out=tensor.detach())
        else:
            _copy(
                [tensor.detach() for tensor in self.tensors.values()],
                [fits[0].tensors[name].detach() for name in self.tensors],
            )
        _copy([t for slot in self.slots.values() for t in slot.values()],
              [t for slot in self.first_slots.values() for t in slot.values()])  # fmt: skip
        for name, value in self.fixed.items():
            own = [fit.fixed[name] for fit in fits]
            for target, part in _pairs(value, own[0] if not self.stacked or name == "lr" else _stacked(own)):
                target.copy_(part)
        images = shared_images(fits) if self.stacked else fits[0].plan.images
        if images.own:
            self.images.x[: len(images.x)].copy_(images.x)
            self.images.y[: len(images.y)].copy_(images.y)
        if self.stacked or images.mean is not self.normed:
            self.images.mean.copy_(images.mean)
            self.images.std.copy_(images.std)
            self.normed = images.mean
        for sizes, rows in orders.items():
            if sizes not in self.rows:
                self._allocate(sizes, rows)
            self.rows[sizes][: len(rows)].copy_(rows, non_blocking=True)
            self.count[sizes].zero_()
            if self.stacked:
                self.active[sizes][: len(rows)].copy_(masks[sizes], non_blocking=True)

    def _allocate(self, sizes: tuple[int, ...], rows: Tensor) -> None:
        device = self.network.device
        clients = next(iter(self.tensors.values())).shape[0] if self.stacked else 1
        self.rows[sizes] = torch.zeros(self.steps, *rows.shape[1:], dtype=torch.long, device=device)
        self.active[sizes] = torch.ones(self.steps, clients, dtype=torch.bool, device=device)
        self.losses[sizes] = torch.zeros(self.steps, clients * sizes[0], dtype=torch.float32, device=device)
        self.count[sizes] = torch.zeros(1, dtype=torch.long, device=device)

    def advance(self, kind: Kind) -> None:
        """One step: read the next rows, update, write the losses, move the counter on."""
        variant, sizes, masked = kind
        count = self.count[sizes]
        rows = self.rows[sizes].index_select(0, count).squeeze(0)
        if self.stacked:
            active = self.active[sizes].index_select(0, count).squeeze(0) if masked else None
            losses = self.stack.advance(self.images, rows, active).reshape(-1)
        else:
            batches = [self.images.batch(part) for part in rows.split(list(sizes))]  # type: ignore[no-untyped-call]
            with torch.no_grad():
                losses = self.variants[variant](self.model, self.tensors, self.slots, self.fixed, batches)
        self.losses[sizes].index_copy_(0, count, losses.float()[None])
        count.add_(1)

    def capture(self, kind: Kind) -> None:
        """Record a step as a graph, after one trial of it; what that did to the static memory the next load undoes."""
        with undrawn():
            self.advance(kind)
            self.graphs[kind] = self.lane.record(lambda: self.advance(kind))


def _means(plan: Plan, loss: float, squared: float) -> tuple[float, float]:
    """Of the sums of all losses, and of the squared ones of the first epoch."""
    sizes = [each[0] for each in plan.sizes]
    return loss / sum(sizes), squared / sum(sizes[: plan.epoch])


def said(error: Exception) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else {name: tensor.clone() for name, tensor in value.items()}


def _stacked(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values))
    return {name: torch.stack([value[name] for value in values]) for name in values[0]}


def _pairs(static: Any, given: Any) -> list[tuple[Tensor, Tensor]]:
    return (
        [(static, given)] if isinstance(static, Tensor) else [(tensor, given[name]) for name, tensor in static.items()]
    )


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    pairs = list(zip(targets, sources, strict=True))
    # One type a call: a mixed list is copied tensor by tensor.
    for dtype in dict.fromkeys(target.dtype for target in targets):
        alike = [pair for pair in pairs if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])


class Gauge:
    """Static memory and captured sums of one batch for measures of one kind: equal shapes, reading and images."""

    def __init__(self, network: Network, first: Measure, lane: Lane) -> None:
        images, self.lane = first.samples.images, lane
        self.what, self.model = first.what, Eager(network, training=first.what.training)
        self.tensors: Tensors = {}  # made with the first capture: most kinds are seen once
        self.images = replace(images, mean=images.mean.clone(), std=images.std.clone())
        self.given: Tensors = {}  # the model that the static tensors hold now
        self.sums: Tensors = {}
        self.rows: dict[int, Tensor] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.seen: dict[int, int] = {}

    def ready(self, measure: Measure) -> bool:
        """Whether all its batch sizes are captured, or worth it now."""
        new = {len(rows) for rows in batches_of(measure.samples.rows, measure.batch_size)} - self.graphs.keys()
        for size in new:
            self.seen[size] = self.seen.get(size, 0) + 1
        return all(self.seen[size] > 2 for size in new) and len(self.graphs) + len(new) <= GRAPHS_KEPT

    @torch.no_grad()
    def read(self, measure: Measure) -> Tensors:
        """The sums over all batches, as the reference gives them."""
        main, images = torch.cuda.current_stream(), measure.samples.images
        self.lane.stream.wait_stream(main)
        with torch.cuda.stream(self.lane.stream):
            self.images.mean.copy_(images.mean)
            self.images.std.copy_(images.std)
            batches = [rows.pin_memory() for rows in batches_of(measure.samples.rows, measure.batch_size)]
            for rows in batches:
                if len(rows) not in self.graphs:
                    self._load(measure.tensors)
                    self._capture(rows)
            if any(self.given.get(name) is not tensor for name, tensor in measure.tensors.items()):
                self._load(measure.tensors)
            for total in self.sums.values():
                total.zero_()
            with seeded(0, self.images.x.device):  # as the reference: dropout in training mode
                for rows in batches:
                    self.rows[len(rows)].copy_(rows, non_blocking=True)
                    self.graphs[len(rows)].replay()
            found = {name: total.clone() for name, total in self.sums.items()}
        main.wait_stream(self.lane.stream)
        return found

    def _load(self, tensors: Tensors) -> None:
        if not self.tensors:
            self.tensors = {name: torch.empty_like(tensor.detach()) for name, tensor in tensors.items()}
        names = list(self.tensors)
        _copy([self.tensors[name] for name in names], [tensors[name].detach() for name in names])
        # Buffers are written in training mode, so such a model is copied again for the next measure.
        self.given = {} if self.what.training else dict(tensors)

    def _capture(self, rows: Tensor) -> None:
        size = len(rows)
        self.rows[size] = rows.to(self.images.x.device, copy=True)

        def sums() -> Tensors:
            return self.what(self.model, self.tensors, self.images.batch(self.rows[size]))

        def add() -> None:
            for name, value in sums().items():
                self.sums[name].add_(value)

        with undrawn():
            for name, value in sums().items():
                self.sums.setdefault(name, torch.zeros_like(value))
            self.graphs[size], self.given = self.lane.record(add), {}


class _Job:
    """Some fits on their way through a machine."""

    def __init__(self, numbers: list[int], fits: list[Fit], beats: Sequence[Beat] = ()) -> None:
        self.numbers, self.fits, self.kinds = numbers, fits, list[Kind]()
        self.orders: dict[tuple[int, ...], Tensor] = {}
        self.masks: dict[tuple[int, ...], Tensor] = {}
        rows: dict[tuple[int, ...], list[Tensor]] = {}
        masks: dict[tuple[int, ...], list[Tensor]] = {}
        everybody = torch.ones(len(fits), dtype=torch.bool)
        if len(fits) > 1:
            for size, table, active in beats:
                rows.setdefault((size,), []).append(table)
                masks.setdefault((size,), []).append(everybody if active is None else active)
                self.kinds.append((0, (size,), active is not None))
        else:
            plan = fits[0].plan
            for step, sizes, variant in zip(plan.steps, plan.sizes, plan.variants, strict=True):
                rows.setdefault(sizes, []).append(torch.cat(step) if len(step) > 1 else step[0])
                masks.setdefault(sizes, []).append(everybody)
                self.kinds.append((variant, sizes, False))
        self.orders = {sizes: torch.stack(each).pin_memory() for sizes, each in rows.items()}
        self.masks = {sizes: torch.stack(each).pin_memory() for sizes, each in masks.items()}
        self.weights = {sizes: self._weights(sizes, mask) for sizes, mask in self.masks.items()}

    def _weights(self, sizes: tuple[int, ...], mask: Tensor) -> Tensor:
        """Which beats count for each fit, and which of those lie in its first epoch: (2, beats, fits)."""
        first = [fit.plan.sizes[: fit.plan.epoch].count(sizes) for fit in self.fits]
        early = mask & (mask.long().cumsum(0) <= torch.tensor(first))
        return torch.stack([mask, early]).double().pin_memory()

    @property
    def steps(self) -> int:
        """The longest table it needs."""
        return max(len(rows) for rows in self.orders.values())


class Graphs(Reference):
    """Captured steps on parallel streams; small networks stacked; measures captured where that is worth it."""

    window = 256

    def __init__(self, network: Network, *, stack: bool = True) -> None:
        super().__init__(network)
        self.stack = stack
        self._lanes = cycle([Lane() for _ in range(STREAMS)])
        self._machines: dict[tuple[object, ...], list[Machine]] = {}
        self._side = Lane()
        self._gauges: dict[tuple[object, ...], Gauge | None] = {}
        self._said: set[str] = set()

    def solve(self, requests: Sequence[Request]) -> list[Fitted | Tensors | Exception]:
        """One answer a request."""
        self._let_go()
        answers: dict[int, Fitted | Tensors | Exception] = {}
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, request in enumerate(requests):
            if isinstance(request, Fit) and (key := self._key(request)) is not None:
                groups.setdefault(key, []).append(number)
        # The rate is copied into static memory: a machine serves any. Clients that are stacked share one.
        jobs = [(key[:-1], job) for key, numbers in groups.items() for job in self._jobs(numbers, requests)]
        # The longest first: the last to begin should not be the last to end by much.
        jobs.sort(key=lambda each: -self._cost(each[1].fits[0])[0])
        while jobs:
            wave, jobs, used, short = jobs, [], dict[tuple[object, ...], int](), False
            now = []
            try:
                for key, job in wave:
                    full = (*key, len(job.fits))
                    place = used.get(full, 0)
                    used[full] = place + 1
                    if place < SIDE_BY_SIDE:
                        now.append((self._machine(full, place, job), job))
                    else:
                        jobs.append((key, job))
                answers |= self._replay(now)
            except Exception as error:  # noqa: BLE001 (a failure of one client is found by running each alone)
                # Whatever cannot be captured still runs, one step after another.
                self._say(f"a step could not be captured and runs step by step: {said(error)}")
                for full in used:
                    self._machines.pop(full, None)
                short = isinstance(error, torch.OutOfMemoryError)
            if short:  # only here does the error no longer hold what was in the way
                now.clear()
                self._drop(1.0)
                torch.cuda.empty_cache()
        for number, request in enumerate(requests):
            if isinstance(request, Measure) and (read := self._read(request)) is not None:
                answers[number] = read
        alone = [number for number in range(len(requests)) if number not in answers]
        answers |= dict(zip(alone, super().solve([requests[number] for number in alone]), strict=True))
        return [answers[number] for number in range(len(requests))]

    def close(self) -> None:
        """Forget what was captured: the next run's trainer needs the memory."""
        self._drop(1.0)

    def _let_go(self) -> None:
        """Drop what was used longest ago where there is much, or little memory left: sizes that evolve are all new."""
        free, total = torch.cuda.mem_get_info(self.network.device)
        short = free < total / 10
        if short or len(self._machines) > MACHINES_KEPT:
            self._drop(0.5)
        if short:
            torch.cuda.empty_cache()

    def _drop(self, share: float) -> None:
        torch.cuda.synchronize()
        for captured in (self._machines, self._gauges):
            for key in list(captured)[: ceil(share * len(captured))]:
                del captured[key]

    def _key(self, fit: Fit) -> tuple[object, ...] | None:
        try:
            key = signature(fit)
            hash(key)
        except TypeError as error:
            self._say(f"{type(fit.step).__name__} runs step by step: {error}")
            return None
        return key

    def _read(self, measure: Measure) -> Tensors | None:
        """The sums by a gauge of this kind of measure, once it is worth capturing; None: not yet, or it cannot be."""
        fields = vars(measure.what).values()
        if not len(measure.samples) or not all(isinstance(value, bool | int | float | str) for value in fields):
            return None
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in measure.tensors.items())
        images = measure.samples.images
        held = images.x.data_ptr(), images.y.data_ptr()
        key = (measure.what, shapes, held, images.mean.shape, images.origin is None)
        gauge = self._gauges.pop(key) if key in self._gauges else Gauge(self.network, measure, self._side)
        self._gauges[key] = gauge
        if gauge is None or not gauge.ready(measure):
            return None
        try:
            return gauge.read(measure)
        except Exception as error:  # noqa: BLE001 (the reference says whose failure it is)
            self._gauges[key] = None
            self._say(f"{type(measure.what).__name__} could not be captured: {said(error)}")
            return None

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("graphs: %s", text)

    def _jobs(self, numbers: list[int], requests: Sequence[Request]) -> list[_Job]:
        fits = [request for number in numbers if isinstance(request := requests[number], Fit)]
        small = stackable(fits[0]) and self._forward(fits[0]) < STACK_BELOW
        if self.stack and small and len(fits) >= STACK_FROM and all(stackable(fit) for fit in fits):
            plans = [fit.plan for fit in fits]
            beats = timetable(plans)
            if wasted(plans, beats) <= 2:
                return [_Job(numbers, fits, beats)]
        return [_Job([number], [fit]) for number, fit in zip(numbers, fits, strict=True)]

    def _forward(self, fit: Fit) -> int:
        """Forward MACs a sample of the model that a fit's last step runs through."""
        return self.network.macs(fit.steps[-1].seen(fit.tensors, fit.fixed))

    def _machine(self, key: tuple[object, ...], place: int, job: _Job) -> Machine:
        machines = self._machines[key] = self._machines.pop(key, [])
        if place < len(machines) and machines[place].steps >= job.steps:
            return machines[place]
        lane = machines[place].lane if place < len(machines) else next(self._lanes)
        lane.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane.stream):
            made = Machine(self.network, job.fits, lane, max(64, 1 << (job.steps - 1).bit_length()))
        machines[place : place + 1] = [made]
        return made

    def _replay(self, now: Sequence[tuple[Machine, _Job]]) -> dict[int, Fitted | Exception]:
        begin, main = perf_counter(), torch.cuda.current_stream()
        for machine, job in now:
            machine.stream.wait_stream(main)
            if missing := [kind for kind in dict.fromkeys(job.kinds) if kind not in machine.graphs]:
                with torch.cuda.stream(machine.stream):
                    machine.load(job.fits, job.orders, job.masks)
                    for kind in missing:
                        machine.capture(kind)
        done: list[Tensors] = []
        sums: list[Tensor] = []
        # What networks draw themselves (dropout) starts from the first fit's seed, after all captures: a run that is
        # resumed captures again. Step by step through the clients: all of one client's replays in a row would leave
        # the other streams idle.
        with seeded(now[0][1].fits[0].plan.seed, self.network.device), torch.cuda.stream(main):
            for number in range(max(len(job.kinds) for _, job in now)):
                for machine, job in now:
                    if number < len(job.kinds):
                        torch.cuda.set_stream(machine.stream)  # a context of its own would cost as much as the replay
                        if number == 0:
                            machine.load(job.fits, job.orders, job.masks)
                        machine.graphs[job.kinds[number]].replay()
        for machine, job in now:
            with torch.cuda.stream(machine.stream):
                tensors, total = self._unload(machine, job)
            done, sums = done + tensors, [*sums, total]
        for machine, _ in now:
            main.wait_stream(machine.stream)
        losses, squares = torch.cat(sums, dim=1).tolist()  # the one wait of a wave
        seconds = (perf_counter() - begin) / max(1, len(done))
        fits = [(number, fit) for _, job in now for number, fit in zip(job.numbers, job.fits, strict=True)]
        return {
            number: self._fitted(fit, tensors, *_means(fit.plan, loss, squared), seconds)
            for (number, fit), tensors, loss, squared in zip(fits, done, losses, squares, strict=True)
        }

    @torch.no_grad()
    def _unload(self, machine: Machine, job: _Job) -> tuple[list[Tensors], Tensor]:
        """Each fit's tensors; and the sums of losses and of early squared losses, one column a fit."""
        static = {name: tensor.detach() for name, tensor in machine.tensors.items()}
        done = {name: torch.empty_like(tensor) for name, tensor in static.items()}
        _copy(list(done.values()), list(static.values()))
        clients = len(job.fits)
        total = torch.zeros(2, clients, dtype=torch.float64, device=self.network.device)
        for sizes, weights in job.weights.items():
            losses = machine.losses[sizes][: weights.shape[1]].double().reshape(-1, clients, sizes[0])
            counted = weights.to(total.device, non_blocking=True)
            total[0] += (losses.sum(2) * counted[0]).sum(0)
            total[1] += (losses.square().sum(2) * counted[1]).sum(0)
        if not machine.stacked:
            return [done], total
        return [{name: tensor[place] for name, tensor in done.items()} for place in range(clients)], total
