"""The reference trainer against a minimal hand-written PyTorch loop: same model, batches, optimiser and threads."""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F

from fedloom.engine.reference import Reference
from fedloom.models.resolve import build, initialise
from fedloom.network import Network
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD
from fedloom.steps import Descent
from fedloom.types import Fit, Images, Plan

__all__ = ["reference"]

SAMPLES, BATCH, EPOCHS, PAIRS = 1920, 32, 2, 5


def reference() -> list[dict[str, object]]:
    """LeNet-5, 28 x 28, batch 32, momentum 0.9, one thread; five interleaved pairs, the median ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        make = partial(build, "lenet5", channels=1, classes=10, size=28)
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(256, (SAMPLES, 1, 28, 28), dtype=torch.uint8, generator=generator)
        y = torch.randint(10, (SAMPLES,), generator=generator)
        order = [torch.randperm(SAMPLES, generator=generator) for _ in range(EPOCHS)]
        rows = [batch for shuffled in order for batch in shuffled.split(BATCH)]  # type: ignore[no-untyped-call]
        pairs = []
        for number in range(PAIRS + 1):
            pair = _by_hand(make, x, y, rows), _by_fedloom(make, x, y, rows)
            if number:  # the first pair warms caches and is not counted
                pairs.append(pair)
    finally:
        torch.set_num_threads(threads)
    ratio = median(ours / theirs for theirs, ours in pairs)
    ms = 1000 / len(rows)
    return [
        {"loop": "hand-written", "ms / step": f"{ms * median(pair[0] for pair in pairs):.3f}", "ratio": "1"},
        {
            "loop": "fedloom reference",
            "ms / step": f"{ms * median(pair[1] for pair in pairs):.3f}",
            "ratio": f"{ratio:.3f}",
        },
    ]


def _by_hand(make: partial[torch.nn.Module], x: torch.Tensor, y: torch.Tensor, rows: list[torch.Tensor]) -> float:
    model = initialise(make, 0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pictures = x.float().div_(255).sub_(0.5).div_(0.5)
    start = perf_counter()
    for batch in rows:
        optimizer.zero_grad()
        F.cross_entropy(model(pictures[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return perf_counter() - start


def _by_fedloom(make: partial[torch.nn.Module], x: torch.Tensor, y: torch.Tensor, rows: list[torch.Tensor]) -> float:
    network = Network(make, (1, 28, 28), 10)
    images = Images(x, y, torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), 0.5))
    tensors = network.initial(0)
    network.macs(tensors)  # counted once a shape, not once a fit
    plan = Plan(images, [(batch,) for batch in rows], [0] * len(rows), len(rows), 0)
    fit = Fit(tensors, Descent(CrossEntropy(), SGD(momentum=0.9)), plan, {"lr": torch.tensor(0.05)})
    start = perf_counter()
    (answer,) = Reference(network).solve([fit])
    if isinstance(answer, Exception):
        raise answer
    return perf_counter() - start
