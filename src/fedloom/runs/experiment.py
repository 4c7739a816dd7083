"""The loop over rounds: train, evaluate, write down, checkpoint; stop and go on at any point with the same result."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import parent_process
from time import perf_counter
from typing import Any

import torch

from fedloom.errors import Interrupted, RoundLost, RunError
from fedloom.fleet.fleet import Engine, Fleet
from fedloom.method import Method
from fedloom.methods.fedavg import FedAvg
from fedloom.registry import find
from fedloom.runs.evaluation import costs, evaluate, gaps, summarise
from fedloom.runs.schedule import settings
from fedloom.runs.serverless import pass_round
from fedloom.runs.signals import Signals
from fedloom.runs.store import FAILURE, Store
from fedloom.runs.world import World, world_of
from fedloom.settings import must_have
from fedloom.types import Named, Server, Train

__all__ = ["Experiment", "Watch", "arithmetic", "experiment"]

Watch = Callable[[Mapping[str, Any]], None]  # sees every round's row as it is written
REDONE = 5  # times that a round may be lost before the run gives up
TIMES = 20  # evaluations and checkpoints a run, about, unless the study says otherwise


def experiment(store: Store, world: World, watch: Watch, engine: Engine | None = None) -> dict[str, Any]:
    """Run a study from its last checkpoint to its end, on an engine of its own unless given one; gives the summary."""
    precision = arithmetic(world.study.engine.device, world.study.engine.precision)
    with store.claimed(), precision, nullcontext(engine) if engine else _engine(store, world) as doing:
        try:
            return Experiment(store, world, doing).run(watch)
        except RunError as error:
            store.write(FAILURE, {"sentence": str(error)})
            raise


@contextmanager
def arithmetic(device: str, precision: str) -> Iterator[None]:
    """On the CPU one thread, in every engine: sums of several threads are not the same sums. On a GPU TF32 as asked."""
    threads, cudnn, matmul = torch.get_num_threads(), torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    if device == "cpu":
        torch.set_num_threads(1)
    cudnn.allow_tf32 = matmul.allow_tf32 = precision in ("tf32", "bf16")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        cudnn.allow_tf32, matmul.allow_tf32 = before


@contextmanager
def _engine(store: Store, world: World) -> Iterator[Engine]:
    chosen = world.study.engine
    # A second process pays off only where there is a second core, a second client and no faster device; a run that is
    # itself one of several leaves the other cores to its neighbours.
    alone = chosen.device == "cpu" and parent_process() is None
    several = alone and (os.cpu_count() or 1) > 1 and world.study.fleet.clients > 1
    name = ("processes" if several else "local") if chosen.name == "auto" else chosen.name
    # Called as `start` and `resume` do, so that the world they built is found and not built again.
    factory = partial(world_of, world.study.model_dump_json(), *([store.split_file] if world.restored else []))
    engine: Engine = find("engine", name)(factory, chosen.workers, **chosen.fields)
    must_have(f"engine '{name}'", engine, Engine)
    try:
        yield engine
    finally:
        engine.close()


class Experiment:
    """One run, from where its folder says it is."""

    def __init__(self, store: Store, world: World, engine: Engine) -> None:
        self.study = world.study
        self.store, self.engine, self.world, self.method = store, engine, world, world.method
        self._restore()
        self.furthest, self.redone = self.server.round, 0  # rounds that were done at most, and losses since then

    def _restore(self) -> None:
        """Stand where the last checkpoint stands, or at the start."""
        study, world = self.study, self.world
        names = [Named(each.name, each.fields) for each in (study.method, *study.model.each)]
        self.fleet = Fleet(
            world.columns, self.engine, world.network, world.home(), others=world.networks[1:],
            seed=study.run.seed, names=names, quorum=study.engine.quorum, deadline=study.fleet.deadline,
            shown=world.shown, completed=world.method.evaluated,
        )  # fmt: skip
        first, *others = (network.initial(study.run.seed) for network in world.networks)
        begin = Server(0, first, world.network, {"models": others} if others else {})
        self.server = self.store.restore(begin, self.fleet, self.engine.states)
        self.rows = self.store.rows("metrics")

    def run(self, watch: Watch) -> dict[str, Any]:
        """Rounds until the last; on a signal, what is done is made safe first."""
        rounds = self.study.run.rounds
        every = self.study.run.checkpoint_every or max(1, rounds // TIMES)
        with Signals() as self.signals:
            try:
                while self.server.round < rounds:
                    try:
                        row = self._round()
                        if self.server.round % every == 0 or self.server.round == rounds:
                            self._checkpoint()
                    except RoundLost as lost:
                        self._redo(lost)
                        continue
                    if self.server.round > self.furthest:
                        self.furthest, self.redone = self.server.round, 0
                    watch(row)
            except KeyboardInterrupt:
                self._checkpoint()
                raise Interrupted(
                    self.store.folder, self.signals.received[-1] if self.signals.received else signal.SIGINT
                ) from None
        study, final = self.study, self.method.model(self.method.evaluated(self.server, self.fleet))
        if final is not None:
            self.store.save_model(final)
        summary = {
            "method": study.method.name, "dataset": study.data.name, "model": study.model.label,
            "engine": type(self.engine).__name__.lower(), "rounds": len(self.rows), "clients": study.fleet.clients,
            **summarise(self.rows, study.evaluate.target),
            **({"found": found} if (found := self.method.found(self.server)) else {}),
            "peak_memory_bytes": self.engine.peak_memory(), "run_dir": str(self.store.folder),
        }  # fmt: skip
        self.store.write("summary.json", summary)
        return summary

    def _redo(self, lost: RoundLost) -> None:
        """Go back to where nothing was lost: a round leaves no trace until it is committed, a checkpoint is whole."""
        self.redone += 1
        if self.redone > REDONE:
            raise RunError(f"round {self.server.round + 1} was lost {self.redone} times; last: {lost}") from lost
        if lost.before:
            self._restore()

    def _checkpoint(self) -> None:
        self.store.checkpoint(self.server, self.fleet, self.engine.states)

    def _round(self) -> dict[str, Any]:
        """Train, evaluate, write down. Until `commit`, nothing outside this method has changed."""
        server, fleet, begin = self.server, self.fleet, perf_counter()
        fleet.columns |= self.engine.roll_call()
        fleet.begin(server.round, self.train(server.round), sum(row["virtual_seconds"] for row in self.rows))
        forked = replace(server, memory=dict(server.memory))
        serverless = type(self.method).round is Method.round
        after = pass_round(self.method, forked, fleet) if serverless else self.method.round(forked, fleet)
        row: dict[str, Any] = {"round": after.round, "seconds": perf_counter() - begin}
        row |= costs(fleet.ledger, fleet.elapsed, len(fleet.failed))
        if self.study.evaluate.gap and isinstance(self.method, FedAvg):
            row |= gaps(self.method, server, fleet)
        if self._evaluates(after.round):
            fleet.columns |= self.engine.roll_call()  # who was lost while training is not asked in vain once more
            row |= evaluate(self.method, after, fleet, self.study.evaluate.clients)
        with self.signals.held():
            fleet.commit()
            self.store.append("clients", fleet.ledger)
            self.store.append("metrics", [row])
            self.rows.append(row)
            self.server = after
        return row

    def train(self, round: int) -> Train:
        """The training settings of a round, with its learning rate."""
        return settings(self.study.train, round, self.study.run.rounds)

    def _evaluates(self, done: int) -> bool:
        rounds = self.study.run.rounds
        every = self.study.evaluate.every or max(1, round(rounds / TIMES))
        return done % every == 0 or done == rounds
