"""Small federations on generated pictures, run by the ordinary machinery and timed round by round."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch

from fedloom.data.dataset import Dataset
from fedloom.runs.start import run
from fedloom.runs.world import must_be_there

__all__ = ["PICTURES", "device_of", "machine", "pictures", "seconds_of_rounds"]

PICTURES = "fedloom.bench.federation:pictures"  # as a study names them


def pictures(
    count: Annotated[int, "training pictures"] = 1000,
    channels: Annotated[int, "colours"] = 1,
    size: Annotated[int, "pixels a side"] = 28,
) -> Dataset:
    """Random pictures of ten classes, and a tenth more to test on."""
    generator = np.random.default_rng(0)
    number = count + max(10, count // 10)
    x = generator.integers(0, 256, (number, channels, size, size), np.uint8)
    return Dataset("pictures", x, np.arange(number) % 10, count, tuple("0123456789"), natural=True)


def device_of(asked: str | None) -> str:
    """The device that was asked for, else a GPU where there is one."""
    if asked is not None:
        must_be_there("--device", asked)
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def machine(device: str) -> dict[str, object]:
    """What rows were measured on."""
    from fedloom import __version__

    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    found: dict[str, object] = {
        "fedloom": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "processor": names[0] if names else platform.processor(), "cores": os.cpu_count(),
    }  # fmt: skip
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def seconds_of_rounds(
    sections: Mapping[str, Any], rounds: int, device: str, after: Callable[[int], None] | None = None
) -> list[float]:
    """Seconds of so many whole rounds, without evaluation; `after` is told the number of each when it is done.

    A run has two rounds more: the first warms up (and captures, on a GPU), the last one evaluates.
    """
    times: list[float] = []
    last = perf_counter()

    def watch(row: Mapping[str, Any]) -> None:
        nonlocal last
        if 1 < row["round"] <= rounds + 1:
            times.append(perf_counter() - last)
            if after is not None:
                after(len(times))
        last = perf_counter()

    with tempfile.TemporaryDirectory() as out:
        only = {"every": rounds + 2, "clients": 1}
        study = {
            **sections, "evaluate": only, "engine": {**sections.get("engine", {}), "device": device},
            "run": {"rounds": rounds + 2, "checkpoint_every": rounds + 2, "out": out},
        }  # fmt: skip
        run(study=study, watch=watch)
    return times
