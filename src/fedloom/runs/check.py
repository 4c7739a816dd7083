"""What a study will cost before it is run: parameters, MACs, bytes, memory and time, measured on a few steps."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from fedloom import wire
from fedloom.engine import memory
from fedloom.errors import ClientError
from fedloom.runs.schedule import settings
from fedloom.runs.world import World
from fedloom.steps import Descent
from fedloom.types import Fit, Task

__all__ = ["estimate"]

STEPS = 4


def estimate(world: World) -> dict[str, Any]:
    """Costs of whole models; methods that cut send and train less, those that ask send more.

    Of several models each counts for its share of the clients.
    """
    study = world.study
    cohort = world.cohort
    sizes = world.split.train.sizes.sum(keepdims=True) if world.method.pooled else world.split.train.sizes
    train = study.train
    done = 1 - train.uneven / 2 * (1 - train.least / (train.steps or train.epochs))  # of all work, on average
    samples = done * (train.steps * train.batch_size if train.steps else sizes.mean() * train.epochs)
    steps = np.ceil(samples / study.train.batch_size) * cohort
    kinds = world.columns.get("kind", np.zeros(study.fleet.clients, np.int64))
    dealt = np.bincount(kinds, minlength=len(world.networks))
    tried = [_tried(world, kind) for kind in range(len(world.networks))]
    macs, sent, seconds = (
        float(np.average([getattr(model, name) for model in tried], weights=dealt))
        for name in ("macs", "bytes", "seconds")
    )
    workers = 1 if study.engine.name == "local" else min(study.engine.workers or os.cpu_count() or 1, cohort)
    names = [model.name for model in study.model.each]
    return {
        **({"clients with each model": _each(names, dealt)} if len(names) > 1 else {}),
        "parameters": _each(names, [model.parameters for model in tried]),
        "MACs a sample (forward)": _each(names, [model.macs for model in tried]),
        "clients a round": cohort,
        "samples a client": f"{sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}",
        "training MACs a round": int(3 * macs * samples * cohort),
        "bytes a round, each way": int(sent * cohort),
        "memory of a worker (measured)": max((model.memory for model in tried if model.memory), default=None),
        "time of a round (estimated), s": float(seconds * steps / workers),
        "time of the run (estimated), s": float(seconds * steps / workers * study.run.rounds),
    }


def _each(names: list[str], values: Iterable[int]) -> Any:
    """A number, or with several models the name and number of each."""
    numbers = [int(value) for value in values]
    return numbers[0] if len(names) == 1 else list(zip(names, numbers, strict=True))


class _Tried(NamedTuple):
    """What a few steps of a model showed."""

    parameters: int
    macs: int
    bytes: int
    seconds: float  # a step
    memory: int | None


def _tried(world: World, kind: int) -> _Tried:
    """A few steps of one of the models at the client with most samples."""
    network = world.networks[kind]
    tensors = network.initial(world.study.run.seed)
    train = replace(settings(world.study.train, 0, world.study.run.rounds), steps=STEPS)
    client = world.client(Task(int(world.split.train.sizes.argmax()), 0, train=train, kind=kind), {})
    # What a method adds to its objective needs what only its own work knows, and costs little.
    step, fixed = Descent.of(world.method.objective, train), world.method.fixed(client, tensors)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = float("inf")
        for _ in range(2):  # the first warms up
            memory.reset(world.network.device)
            begin = perf_counter()
            (answer,) = world.trainer.solve([Fit(tensors, step, client.plan(), fixed, kind=kind)])
            if isinstance(answer, Exception):
                raise ClientError(f"the model does not train on this data: {answer}") from answer
            best = min(best, perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    trained = sum(tensor.numel() for name, tensor in tensors.items() if name not in network.buffers)
    return _Tried(
        trained, network.macs(tensors), wire.size({"model": tensors}), best / STEPS, memory.peak(world.network.device)
    )
