"""RandAugment against a forward and backward pass of `digit_cnn` over as many images, on the device at hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F

from fedloom.augment import RandAugment
from fedloom.models.resolve import build, initialise

__all__ = ["augment"]

BATCH, EPOCH, REPEATS = 32, 3900, 7


def _seconds(work: Callable[[], object], device: str) -> float:
    times = []
    for number in range(REPEATS + 2):
        begin = perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if number > 1:  # the first ones warm up
            times.append(perf_counter() - begin)
    return median(times)


def augment() -> list[dict[str, object]]:
    """28 x 28 in colour, E = 2, F = 10: a batch alone, and as part of an epoch, which is how clients do it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (EPOCH, 3, 28, 28), dtype=torch.uint8, generator=generator).to(device)
    model = initialise(partial(build, "digit_cnn", channels=3, classes=10, size=28), 0).to(device).train()
    pictures, labels = x[:BATCH].float() / 255, torch.arange(BATCH, device=device) % 10
    random = RandAugment()

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(pictures), labels).backward()  # type: ignore[no-untyped-call]

    passes = _seconds(step, device)
    alone = _seconds(lambda: random(x[:BATCH], generator), device)
    whole = _seconds(lambda: random(x, generator), device) * BATCH / EPOCH
    found = {"digit_cnn, forward and backward": passes, "augmentation, a batch alone": alone,
             f"augmentation, in an epoch of {EPOCH:,}": whole}  # fmt: skip
    return [
        {f"{BATCH} images on {device}": name, "ms": f"{1000 * seconds:.2f}", "ratio": f"{seconds / passes:.2f}"}
        for name, seconds in found.items()
    ]
