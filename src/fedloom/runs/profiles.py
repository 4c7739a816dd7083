"""Which units do a client's data excite? Mean activations under a run's model: the FedDSE paper's figures 3.2 and 3.3.

A measure of the simulation, made from a run's folder after its last checkpoint; it is never part of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.errors import InputError
from fedloom.fleet.fleet import Engine
from fedloom.policies.score import Activation
from fedloom.registry import find
from fedloom.runs.engine import arithmetic
from fedloom.runs.experiment import Experiment
from fedloom.runs.start import looked_into
from fedloom.runs.world import world_of
from fedloom.types import Measure, Task

__all__ = ["Profiles", "profiles"]

Profiles = dict[int, dict[str, np.ndarray]]  # client -> group of units -> mean magnitude of each unit


def profiles(folder: Path, clients: Sequence[int]) -> Profiles:
    """The mean activation of every unit over each client's training data."""
    store = looked_into(folder)
    study = store.study()
    for client in clients:
        if not 0 <= client < study.fleet.clients:
            raise InputError(f"client {client} is not in {folder}; allowed: 0 to {study.fleet.clients - 1}")
    world = world_of(study.model_dump_json(), store.split_file)
    with arithmetic(study.engine.device, study.engine.precision):
        engine: Engine = find("engine", "local")(lambda: world)
        server = Experiment(store, world, engine).server
        parts = [world.client(Task(client, server.round), {}).train for client in clients]
        sums = engine.solve([Measure(server.tensors, Activation(), part) for part in parts])
    return {
        client: {group: (total / len(part)).cpu().numpy() for group, total in read.items()}
        for client, part, read in zip(clients, parts, sums, strict=True)
    }
