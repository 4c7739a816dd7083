"""What does the rounds of a study, and in what arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import parent_process

import torch

from fedloom.fleet.fleet import Engine
from fedloom.registry import find
from fedloom.runs.store import Store
from fedloom.runs.world import World, world_of
from fedloom.settings import must_have

__all__ = ["arithmetic", "engine_of"]


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
def engine_of(store: Store, world: World) -> Iterator[Engine]:
    """The engine that the study asks for, or that suits the machine, until the run is over."""
    chosen = world.study.engine
    # A second process pays off only where there is a second core, a second client and no faster device; a run that is
    # itself one of several leaves the other cores to its neighbours. Clients that are stacked are in one process.
    alone = chosen.device == "cpu" and parent_process() is None and chosen.trainer != "stacked"
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
