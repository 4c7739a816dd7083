"""What a study cannot mean, though each of its settings is fine: refused before the first round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedloom.errors import InputError, Unfit
from fedloom.method import Method
from fedloom.methods.fedavg import FedAvg
from fedloom.models.resolve import check_logits
from fedloom.policies.robust import Krum
from fedloom.policies.share import Body
from fedloom.policies.topology import Graph
from fedloom.runs.schedule import settings

if TYPE_CHECKING:
    from fedloom.runs.world import World

__all__ = ["CONTRIBUTED", "refuse"]

SHOWN = 5  # clients that a sentence names
CONTRIBUTED = "clients"  # who gives the public images


def refuse(world: World) -> None:
    """Raise InputError for the first thing that could only fail or mislead later."""
    _weak(world)
    _models(world)
    _data(world)
    _evaluation(world)
    _engine(world)
    _nobody(world)


def _weak(world: World) -> None:
    weak, fleet = int((world.columns["capacity"] < 1).sum()), world.study.fleet
    if weak and not world.adapts and fleet.weak == "refuse":
        raise Unfit(
            f"{world.study.method.name} trains whole models, but {weak} of {fleet.clients} devices of fleet "
            f"'{fleet.name}' cannot train them; set fleet.weak to exclude (leave them out) or ignore (pretend they "
            "can), or use a method that cuts"
        )


def _models(world: World) -> None:
    method, clients = world.method, world.study.fleet.clients
    if len(world.networks) > clients:
        raise InputError(
            f"[model] names {len(world.networks)} models, more than there are clients: fleet.clients is {clients}"
        )
    if isinstance(method.topology, Graph):
        method.topology.fits(clients)
    method.takes(settings(world.study.train, 0, world.study.run.rounds))
    for network in world.networks:
        if type(method).adapt is Method.adapt:  # who adapts a model may make it answer more than logits
            check_logits(network.module, network.shape, network.classes)
        method.suits(network)
        if isinstance(method.share, Body):
            method.share.fits(network)


def _data(world: World) -> None:
    data, name = world.study.data, world.study.method.name
    if data.public_from and not data.public:
        raise InputError("data.public_from says where public images come from, but data.public is 0; say how many")
    if data.public_from == CONTRIBUTED and data.public > (most := len(world.split.train.rows) // 100):
        raise InputError(
            f"clients give at most 1 % of their images: data.public is {data.public}, allowed: up to {most}"
        )
    if world.method.public and not len(world.public):
        raise InputError(
            f"{name} needs public data at the server, but data.public is 0; hold some training images out with "
            "--set data.public=1000"
        )
    # Who never trains has nothing to decide.
    lacking = np.flatnonzero((world.split.validation.sizes == 0) & ~world.columns["excluded"])
    if world.method.validates and len(lacking):
        named = ", ".join([*map(str, lacking[:SHOWN]), *(["..."] if len(lacking) > SHOWN else [])])
        aside = "keep some of each client's images aside with --set data.validation=0.1"
        raise InputError(
            f"{name} needs validation data at every client that trains, but data.validation is {data.validation:g} and "
            f"{len(lacking)} of {world.study.fleet.clients} clients have none (numbers {named}); "
            f"{'they hold too few images' if data.validation else aside}"
        )


def _evaluation(world: World) -> None:
    evaluate, method, name = world.study.evaluate, world.method, world.study.method.name
    if evaluate.on != "own" and not world.tested(world.images):
        raise InputError(f"evaluate.on is '{evaluate.on}', but data set '{world.dataset.name}' has no such test images")
    if evaluate.model == "trained" and not method.one_model:
        raise InputError(
            f"evaluate.model is 'trained', but a client of {name} trains one model after another and would be "
            "judged by the last; leave it out"
        )
    if not evaluate.gap:
        return
    if not (isinstance(method, FedAvg) and method.adapts):
        raise InputError(f"evaluate.gap compares sub-models with the whole one, but {name} trains whole models")
    if own := method.share.private(world.network) | method.start.keeps(world.network):
        raise InputError(
            "evaluate.gap repeats a round's fits from what the server sent, but here clients keep "
            f"{len(own)} tensors of their own, which have changed by then; leave it out"
        )
    if not method.by_capacity:
        raise InputError(f"evaluate.gap has clients train the whole model too, which under {name} nobody does")


def _engine(world: World) -> None:
    engine, trainer = world.study.engine, world.settled.engine.trainer
    if engine.deadline is not None and trainer in ("stacked", "graphs"):
        raise InputError(
            f"engine.deadline is checked between steps, and trainer '{trainer}' does not stop between them; leave "
            "engine.trainer out"
        )
    if (engine.name, engine.trainer) == ("processes", "stacked"):
        raise InputError(
            "engine.trainer 'stacked' trains clients together, and engine 'processes' has each trained alone; "
            "leave engine.name out, or engine.trainer"
        )


def _nobody(world: World) -> None:
    """Whether somebody trains, and enough for the merge."""
    fleet, merge = world.study.fleet, world.method.merge
    if world.columns.get("onlooker", np.False_).all():
        raise InputError(
            f"fleet.onlookers is {fleet.onlookers:g}: of {fleet.clients} clients that leaves nobody to train"
        )
    if world.columns["excluded"].all():
        name = world.study.method.name
        raise Unfit(f"fleet '{fleet.name}' has no device that can train the whole model under {name}")
    if isinstance(merge, Krum) and (lacking := merge.lacking(world.cohort)):
        raise InputError(f"{lacking} a round at most")
