"""What a study will cost before it is run: parameters, MACs, bytes, memory and time, measured on a few steps."""

from __future__ import annotations

import os
from dataclasses import replace
from time import perf_counter
from typing import Any

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
    """Costs of the whole model, or the first; methods that cut send and train less, those that ask send more."""
    study, network = world.study, world.network
    tensors = network.initial(study.run.seed)
    trained = sum(tensor.numel() for name, tensor in tensors.items() if name not in network.buffers)
    fraction = float(getattr(world.method.select, "fraction", 1.0))
    cohort = 1 if world.method.pooled else max(1, round(fraction * study.fleet.clients))
    sizes = world.split.train.sizes.sum(keepdims=True) if world.method.pooled else world.split.train.sizes
    per_client = (
        sizes.mean() * study.train.epochs if study.train.steps is None else study.train.steps * study.train.batch_size
    )
    seconds, peak = _tried(world, tensors)
    workers = 1 if study.engine.name == "local" else min(study.engine.workers or os.cpu_count() or 1, cohort)
    steps = np.ceil(per_client / study.train.batch_size) * cohort
    names, kinds = [model.name for model in study.model.each], world.columns.get("kind", np.zeros(0, np.int64))
    dealt = ", ".join(
        f"{name}: {count}" for name, count in zip(names, np.bincount(kinds, minlength=len(names)), strict=True)
    )
    return {
        **({"clients with each model": dealt} if len(names) > 1 else {}),
        "parameters": trained,
        "MACs a sample (forward)": network.macs(tensors),
        "clients a round": cohort,
        "samples a client": f"{sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}",
        "training MACs a round": int(3 * network.macs(tensors) * per_client * cohort),
        "bytes a round, each way": wire.size({"model": tensors}) * cohort,
        "memory of a worker (measured)": peak,
        "time of a round (estimated), s": float(seconds * steps / workers),
        "time of the run (estimated), s": float(seconds * steps / workers * study.run.rounds),
    }


def _tried(world: World, tensors: dict[str, torch.Tensor]) -> tuple[float, int | None]:
    """Seconds a step and peak memory, from a few steps of the client with most samples."""
    train = replace(settings(world.study.train, 0, world.study.run.rounds), steps=STEPS)
    client = world.client(Task(int(world.split.train.sizes.argmax()), 0, train=train), {})
    step, fixed = Descent.of(world.method.loss(), train), world.method.fixed(client, tensors)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = float("inf")
        for _ in range(2):  # the first warms up
            memory.reset(world.network.device)
            begin = perf_counter()
            (answer,) = world.trainer.solve([Fit(tensors, step, client.plan(), fixed)])
            if isinstance(answer, Exception):
                raise ClientError(f"the model does not train on this data: {answer}") from answer
            best = min(best, perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return best / STEPS, memory.peak(world.network.device)
