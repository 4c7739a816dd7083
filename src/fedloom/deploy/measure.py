"""What this device is able to: its memory and speed, measured once, as a capacity.

A capacity is the share of a model's units that a device can train. It is the smaller of two shares: of the memory that
training the whole model takes, and of the speed at which a round would be done in time. Both shrink faster than the
share of units, so the largest capacity is searched for at which a sub-model's training fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from fedloom.errors import InputError
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.cut import Prefix
from fedloom.runs.engine import arithmetic

__all__ = ["Measured", "available_memory", "measure"]

CAPACITIES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
WARM, LONG, FEWEST = 0.2, 1.0, 3  # seconds of steps that do not count, and that do; steps of each at least
COPIES = 4  # of the parameters while training: values, gradients, momentum, and what is to be sent


@dataclass(frozen=True)
class Measured:
    """A device and what it can train."""

    memory_bytes: int
    macs_per_second: float
    model: str
    capacity: float
    training_bytes: int
    seconds_per_epoch: float

    def write(self, path: Path) -> None:
        """Put the capacity into a client's settings."""
        lines = [line for line in path.read_text().splitlines() if not line.startswith("capacity")]
        path.write_text("\n".join([*lines, f"capacity = {self.capacity}"]) + "\n")

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def available_memory() -> int:
    """Bytes that a new process may use on this machine."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        raise InputError("the memory of this device cannot be read here; give --memory") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def measure(
    model: str,
    shape: tuple[int, int, int],
    classes: int,
    *,
    samples: int,
    batch_size: int = 32,
    memory: int | None = None,
    seconds: float | None = None,
) -> Measured:
    """The largest capacity at which an epoch over `samples` fits into the memory and, if given, into `seconds`."""
    channels, size = shape[0], shape[1]
    network = Network(partial(build, model, channels=channels, classes=classes, size=size), shape, classes)
    speed, room = _speed(network, batch_size), available_memory() if memory is None else memory
    for capacity in CAPACITIES:
        tensors = network.initial(0)
        if capacity < 1:
            where = Prefix()(network, capacity, 0, torch.Generator())
            tensors = network.units.take(tensors, where) if where else tensors
        needed = COPIES * sum(each.nbytes for each in tensors.values()) + network.saved_bytes(tensors, batch_size)
        epoch = 3 * network.macs(tensors) * samples / speed
        if needed <= room and (seconds is None or epoch <= seconds):
            return Measured(room, speed, model, capacity, needed, epoch)
    raise InputError(
        f"this device cannot train even {CAPACITIES[-1]:g} of {model}: that takes {needed / 2**20:.3g} MiB of "
        f"{room / 2**20:.3g} MiB and {epoch:.3g} s an epoch"
    )


def _speed(network: Network, batch_size: int) -> float:
    """Multiply-accumulates a second while training the whole model as a client does, by the median of many steps."""
    module = network.build().train()
    x, y = torch.randn(batch_size, *network.shape), torch.zeros(batch_size, dtype=torch.int64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step() -> float:
        begin = perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(module(x), y))
        optimizer.step()
        return perf_counter() - begin

    with arithmetic("cpu", "float32"):
        _repeated(step, WARM)
        typical = median(_repeated(step, LONG))
    return 3 * network.macs(network.initial(0)) * batch_size / typical


def _repeated(step: Callable[[], float], seconds: float) -> list[float]:
    """How long each step took; so many that they took so long together, and never fewer than a few."""
    taken: list[float] = []
    while len(taken) < FEWEST or sum(taken) < seconds:
        taken.append(step())
    return taken
