"""Contiguous against channels last on the CPU: the measurements behind the rule of `engine.layout = "auto"`."""

from __future__ import annotations

from statistics import median
from time import process_time

import torch

from fedloom.bench.engine import Workload, fits_of
from fedloom.engine.reference import Reference

__all__ = ["layout"]

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
CASES = (
    ("lenet5", GREY, 10), ("lenet5", GREY, 32), ("lenet5", COLOUR, 10), ("lenet5", COLOUR, 32), ("lenet5_bn", GREY, 10),
    ("cnn", GREY, 10), ("cnn", GREY, 32), ("cnn", COLOUR, 10), ("cnn", COLOUR, 32), ("cnn4", COLOUR, 10),
    ("resnet18", COLOUR, 10),
)  # fmt: skip
STEPS = {"resnet18": 2, "cnn4": 4, "cnn": 6}


def layout(repeats: int = 5) -> list[dict[str, object]]:
    """Processor time of a step by the reference trainer, one thread, both ways in turn; the median of the ratios."""
    threads, rows = torch.get_num_threads(), list[dict[str, object]]()
    torch.set_num_threads(1)
    try:
        for model, shape, batch in CASES:
            steps = STEPS.get(model, 20)
            network, fits = fits_of(Workload("", model, shape, (1.0,), batch, steps), "cpu")
            found: dict[bool, list[float]] = {False: [], True: []}
            for number in range(repeats + 1):
                for turned, times in found.items():
                    network.channels_last = turned
                    trainer, begin = Reference(network), process_time()
                    trainer.solve(fits)
                    if number:  # the first pair warms up
                        times.append(1000 * (process_time() - begin) / steps)
            plain, last = found[False], found[True]
            rows.append(
                {"model": model, "shape": "x".join(map(str, shape)), "batch": batch,
                 "contiguous ms": median(plain), "channels last ms": median(last),
                 "ratio": median(one / two for one, two in zip(plain, last, strict=True))}
            )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    return rows
