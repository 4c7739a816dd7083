"""What a study says with little or no effect, where the same study may well make sense for another method or model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from fedloom.errors import oxford
from fedloom.policies.adaptive import Adaptive
from fedloom.policies.cut import Whole, left
from fedloom.policies.share import NotNorms
from fedloom.runs.study import Training

if TYPE_CHECKING:
    from fedloom.runs.world import World

__all__ = ["notices", "tell"]

log = logging.getLogger("fedloom.study")
FAR = 4  # times its capacity that a device may train of the parameters before that is said


@cache
def tell(sentence: str) -> None:
    """Say it once a process: a comparison looks at a study before its first run and again when it is its turn."""
    log.warning("%s", sentence)


def notices(world: World) -> Iterator[str]:
    """One sentence a setting that changes nothing, or hardly anything."""
    study, method = world.study, world.method
    train, name = study.train, study.method.name
    if isinstance(method.share, NotNorms) and not any(network.norms for network in world.networks):
        yield (
            f"{name}: share 'fedbn' keeps norm layers at the clients, but model '{study.model.label}' has none: "
            "everything travels, as under fedavg"
        )
    usual = Training()
    if idle := [key for key in method.ignores if getattr(train, key) != getattr(usual, key)]:
        yield f"{name} does not go by {oxford((f'train.{key}' for key in idle), 'and')}"
    elif train.steps is not None and train.epochs != usual.epochs:
        yield f"train.steps = {train.steps} counts, train.epochs = {train.epochs} does not"
    if late := [milestone for milestone in train.milestones if milestone >= study.run.rounds]:
        yield f"train.milestones: the last of {study.run.rounds} rounds comes before {oxford(late, 'and')}"
    if study.evaluate.test_stats == "model" and not world.personal:
        yield f"evaluate.test_stats is about statistics of each client's own, and {name} has none here"
    if isinstance(method.start, Adaptive) and method.start.top > (there := len(method.start.counted(world.network))):
        yield f"start.top is {method.start.top}, but the model has {there} {method.start.count}: all are mixed"
    weakest = float(world.columns["capacity"].min())
    for network in world.networks if not isinstance(method.cut, Whole) else ():
        if (share := left(network, weakest)) > FAR * weakest:
            yield (
                f"a device of capacity {weakest:g} trains {share:.0%} of the model's parameters, since little of it "
                "can be cut; `fedloom inspect` shows what"
            )
