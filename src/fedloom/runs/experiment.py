"""The loop over rounds: train, evaluate, write down, checkpoint; stop and go on at any point with the same result."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from fedloom.errors import Interrupted, RoundLost, RunError
from fedloom.fleet.fleet import Engine, Fleet
from fedloom.methods.fedavg import FedAvg
from fedloom.runs.engine import arithmetic, engine_of
from fedloom.runs.evaluation import costs, evaluate, gaps, summarise
from fedloom.runs.schedule import settings
from fedloom.runs.serverless import pass_round
from fedloom.runs.signals import Signals
from fedloom.runs.store import FAILURE, Store
from fedloom.runs.world import World
from fedloom.types import Named, Server, Train

__all__ = ["Experiment", "Watch", "experiment"]

# Sees every round's row as it is written. Its `heard`, if it has one, is told of every task that is over: how many
# clients the round asks at most, and the task's job.
Watch = Callable[[Mapping[str, Any]], None]
REDONE = 5  # times that a round may be lost before the run gives up
TIMES = 20  # evaluations and checkpoints a run, about, unless the study says otherwise


def experiment(store: Store, world: World, watch: Watch, engine: Engine | None = None) -> dict[str, Any]:
    """Run a study from its last checkpoint to its end, on an engine of its own unless given one; gives the summary."""
    precision = arithmetic(world.study.engine.device, world.study.engine.precision)
    with store.claimed(), precision, nullcontext(engine) if engine else engine_of(store, world) as doing:
        try:
            return Experiment(store, world, doing).run(watch)
        except RunError as error:
            store.write(FAILURE, {"sentence": str(error), "trace": error.trace})
            if not error.trace:
                raise
            raise RunError(f"{error}; its traceback: {store.folder / FAILURE}", error.trace) from error


class Experiment:
    """One run, from where its folder says it is."""

    def __init__(self, store: Store, world: World, engine: Engine) -> None:
        self.study = world.study
        self.store, self.engine, self.world, self.method = store, engine, world, world.method
        self._restore()
        self.furthest, self.redone = self.server.round, 0  # rounds that were done at most, and losses since then
        self.completed: Server | None = None  # the server as it was last evaluated

    def _restore(self) -> None:
        """Stand where the last checkpoint stands, or at the start."""
        study, world = self.study, self.world
        self.fleet = Fleet(
            world.columns, self.engine, world.network, world.home(), others=world.networks[1:], seed=study.run.seed,
            names=[Named(each.name, each.fields) for each in (study.method, *study.model.each)],
            quorum=study.engine.quorum, deadline=study.fleet.deadline, form=world.form, shown=world.shown,
            completed=world.method.evaluated,
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
                        if hasattr(watch, "heard"):
                            self.fleet.heard = partial(watch.heard, self.world.cohort)
                        row = self._round()
                        if self.server.round % every == 0 or self.server.round == rounds:
                            self._checkpoint()
                    except RoundLost as lost:
                        self._redo(lost)
                        continue
                    if self.server.round > self.furthest:
                        self.furthest, self.redone = self.server.round, 0
                    watch(row)
                self.store.tabulate()
            except KeyboardInterrupt:
                self._checkpoint()
                self.store.tabulate()
                raise Interrupted(
                    self.store.folder, self.signals.received[-1] if self.signals.received else signal.SIGINT
                ) from None
            except RunError:
                self.store.tabulate()
                raise
        study, final = self.study, self.method.model(self._completed())
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

    def _completed(self) -> Server:
        """The last server as it was evaluated; a run that was stopped after its last round asks again, as then."""
        if self.completed is None:
            self.fleet.begin(last := self.server.round - 1, self.train(last))
        return self.completed or self.method.evaluated(self.server, self.fleet)

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
        after = pass_round(self.method, forked, fleet) if self.method.serverless else self.method.round(forked, fleet)
        row: dict[str, Any] = {"round": after.round, "seconds": perf_counter() - begin}
        row |= costs(fleet.ledger, fleet.elapsed, len(fleet.failed))
        if self.study.evaluate.gap and isinstance(self.method, FedAvg):
            row |= gaps(self.method, server, fleet)
        if self._evaluates(after.round):
            fleet.columns |= self.engine.roll_call()  # who was lost while training is not asked in vain once more
            self.completed, found = evaluate(self.method, after, fleet, self.study.evaluate.clients)
            row |= found
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
