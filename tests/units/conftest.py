"""Unit tables of all small networks, found once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from unit_nets import NETS

from fedloom.units import Units, find_units


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def _table(name: str) -> Units:
    build, example = NETS[name]
    return find_units(build(), example)


class Net:
    """A network with random parameters and statistics, its table, and a random input."""

    def __init__(self, name: str, seed: int = 0) -> None:
        build, example = NETS[name]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.module: nn.Module = build().double().eval()
            for tensor in self.module.parameters():
                nn.init.normal_(tensor, std=0.5)
            for buffer in self.module.buffers():
                if buffer.is_floating_point():
                    nn.init.uniform_(buffer, 0.5, 1.5)
            integer = not example.is_floating_point()
            self.x: Tensor = torch.randint(0, 11, example.shape) if integer else torch.randn(example.shape).double()
        self.units = _table(name)
        self.tensors: dict[str, Tensor] = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.tensors = {key: tensor.detach() for key, tensor in self.tensors.items()}

    def choice(self, seed: int) -> dict[str, Tensor]:
        """A random number of random units of each group; some groups stay whole."""
        generator = torch.Generator().manual_seed(seed)
        where = {}
        for group, size in self.units.sizes.items():
            kept = int(torch.randint(1, size + 1, (), generator=generator))
            if int(torch.randint(0, 4, (), generator=generator)):
                where[group] = torch.randperm(size, generator=generator)[:kept].sort().values
        return where


@pytest.fixture
def net() -> type[Net]:
    return Net
