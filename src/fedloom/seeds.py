"""Random generators that depend on what they are for, never on who ran before.

Every draw belongs to (seed, round, stage, client, purpose) and happens on the CPU, so engines, resumed runs and any
order of clients see the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import torch

__all__ = ["SERVER", "numpy_generator", "seed_of", "seeded", "torch_generator"]

SERVER = -1  # the client number of draws that belong to no client


def seed_of(seed: int, round: int, stage: int, client: int, purpose: str) -> int:
    """A 63-bit seed, well mixed, different for every purpose."""
    sequence = np.random.SeedSequence([seed, round + 1, stage, client + 1, crc32(purpose.encode())])
    high, low = sequence.generate_state(2, np.uint32)
    return (int(high) << 32 | int(low)) >> 1


def numpy_generator(seed: int, round: int, stage: int, client: int, purpose: str) -> np.random.Generator:
    """A NumPy generator of its own for this purpose."""
    return np.random.default_rng(seed_of(seed, round, stage, client, purpose))


def torch_generator(seed: int, round: int, stage: int, client: int, purpose: str) -> torch.Generator:
    """A torch generator of its own for this purpose, on the CPU."""
    return torch.Generator().manual_seed(seed_of(seed, round, stage, client, purpose))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """What a network draws itself (dropout) starts from a seed; the CPU's own numbers go on as if nothing had happened.

    `torch.manual_seed` would also remember the call, with its stack, for every kind of device that is not in use yet.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
