"""Named fleets: what the devices of a federation are like, as columns.

Every device has a capacity (share of the model's units it can train), a compute speed (multiply-accumulates a second),
a bandwidth down and up (bytes a second), a chance to be available in a round and a chance to drop out of one; some
fleets add jitter, by which a device is slower or faster from task to task. The figures of `uniform` stand for a
mid-range phone on a good line: 10 GMAC/s, 100 Mbit/s down, 20 Mbit/s up. `measured` is made of published figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator

from fedloom.errors import InputError, choose
from fedloom.registry import register

__all__ = ["DEVICES", "LINES", "high", "low", "measured", "mixed", "uniform"]

Floats = npt.NDArray[np.float64]
Columns = dict[str, Floats]
Speed = Annotated[float, Gt(0), "multiply-accumulates a second"]
Bandwidth = Annotated[float, Gt(0), "bytes a second"]
Chance = Annotated[float, Gt(0), Le(1), "chance that a device is available in a round"]
Dropout = Annotated[float, Ge(0), Lt(1), "chance that a device that was asked never reports"]
Jitter = Annotated[float, Ge(0), Le(10), "deviation of the logarithm of a task's time, from task to task"]
Capacities = Annotated[tuple[float, ...], "capacities, an equal share of the clients each"]
GMAC, DOWN, UP = 1e10, 1.25e7, 2.5e6
MBIT = 1.25e5
FIFTHS = (0.5, 0.25, 0.125, 0.0625)


def _columns(clients: int, capacity: npt.ArrayLike, **columns: npt.ArrayLike) -> Columns:
    return {name: np.broadcast_to(np.asarray(column, np.float64), clients).copy() for name, column in
            {"capacity": capacity, **columns}.items()}  # fmt: skip


def _shared(capacities: tuple[float, ...], clients: int) -> Floats:
    """Equal blocks of clients, one a capacity."""
    if not capacities:
        raise InputError("fleet.capacities needs at least one capacity in (0, 1]; got none")
    for capacity in capacities:
        if not 0 < capacity <= 1:
            raise InputError(f"fleet.capacities must be in (0, 1]; got {capacity}")
    return np.asarray(capacities)[np.arange(clients) * len(capacities) // clients]


@register("fleet", "uniform")
def uniform(
    clients: int,
    generator: np.random.Generator,
    speed: Speed = GMAC,
    down: Bandwidth = DOWN,
    up: Bandwidth = UP,
    availability: Chance = 1.0,
    dropout: Dropout = 0.0,
) -> Columns:
    """Every device can train the whole model; all are equally fast."""
    return _columns(clients, 1.0, speed=speed, down=down, up=up, availability=availability, dropout=dropout)


@register("fleet", "low")
def low(clients: int, generator: np.random.Generator, availability: Chance = 1.0, dropout: Dropout = 0.0) -> Columns:
    """A fifth each of capacity 0.99, 1/2, 1/4, 1/8 and 1/16, slower in proportion: nobody holds the whole model."""
    capacity = _shared((0.99, *FIFTHS), clients)
    return _columns(
        clients, capacity, speed=GMAC * capacity, down=DOWN, up=UP, availability=availability, dropout=dropout
    )


@register("fleet", "high")
def high(clients: int, generator: np.random.Generator, availability: Chance = 1.0, dropout: Dropout = 0.0) -> Columns:
    """A fifth each of capacity 1, 1/2, 1/4, 1/8 and 1/16, slower in proportion."""
    capacity = _shared((1.0, *FIFTHS), clients)
    return _columns(
        clients, capacity, speed=GMAC * capacity, down=DOWN, up=UP, availability=availability, dropout=dropout
    )


# How much slower than the fastest, by the spread: where a device stands between 1 and 1 / spread.
SLOWNESS: Mapping[str, Callable[[np.random.Generator, int, float], Floats]] = {
    "log_uniform": lambda generator, clients, spread: spread ** -generator.random(clients),
    "log_normal": lambda generator, clients, spread: spread ** -(0.5 + generator.normal(0, 0.25, clients)).clip(0, 1),
    "uniform": lambda generator, clients, spread: 1 - (1 - 1 / spread) * generator.random(clients),
    "two": lambda generator, clients, spread: spread ** -(generator.random(clients) < 0.5).astype(np.float64),
}


@register("fleet", "mixed")
def mixed(
    clients: int,
    generator: np.random.Generator,
    capacities: Capacities = (1.0,),
    speed: Speed = GMAC,
    down: Bandwidth = DOWN,
    up: Bandwidth = UP,
    spread: Annotated[float, Ge(1), "fastest over slowest device, for speed and for bandwidth"] = 10.0,
    distribution: Annotated[
        Literal["log_uniform", "log_normal", "uniform", "two"],
        "how devices lie between fastest and slowest; log_normal: two deviations either side; two: half and half",
    ] = "log_uniform",
    stragglers: Annotated[float, Ge(0), Le(1), "share of the devices that are slower still in everything"] = 0.0,
    slowdown: Annotated[float, Ge(1), "how many times slower a straggler is"] = 10.0,
    jitter: Jitter = 0.0,
    availability: Chance = 1.0,
    dropout: Dropout = 0.0,
) -> Columns:
    """Speeds and bandwidths drawn over a factor, independent of each other and of the capacity."""
    drawn = {name: top * SLOWNESS[distribution](generator, clients, spread) for name, top in
             (("speed", speed), ("down", down), ("up", up))}  # fmt: skip
    if stragglers:
        slow = np.where(generator.random(clients) < stragglers, slowdown, 1.0)
        drawn = {name: values / slow for name, values in drawn.items()}
    return _columns(
        clients, _shared(capacities, clients), **drawn, jitter=jitter, availability=availability, dropout=dropout
    )


class Device(NamedTuple):
    """A measured device: what it is, its sustained multiply-accumulates a second, its line, and where that is from."""

    what: str
    speed: float
    line: str
    source: str


# Speeds are MACs of a published model over its published time for one image in float32 (the GPU: float16). Training is
# counted as three forward passes at the same speed, which flatters devices whose memory is small. All are approximate.
V3 = "MobileNetV2 1.0, 300 M MACs, one big core: Howard et al., Searching for MobileNetV3, ICCV 2019, table 3"
NANO = "ResNet-50, 4.1 G MACs: NVIDIA, Jetson Nano: deep learning inference benchmarks, 2019"
DEVICES: Mapping[str, Device] = {
    "pixel1": Device("Google Pixel, 64 ms", 0.300e9 / 0.064, "mobile", V3),
    "pixel2": Device("Google Pixel 2, 76 ms", 0.300e9 / 0.076, "mobile", V3),
    "pixel3": Device("Google Pixel 3, 56 ms", 0.300e9 / 0.056, "mobile", V3),
    "pi3": Device("Raspberry Pi 3, 1.4 images a second", 1.4 * 4.1e9, "home", NANO),
    "pi4": Device(
        "Raspberry Pi 4, 87 ms", 0.569e9 / 0.087, "home",
        "MobileNetV1 1.0, 569 M MACs, TFLite: TildAlice, MobileNet vs EfficientNet-Lite (a blog, 2026)",
    ),
    "jetson_nano": Device("NVIDIA Jetson Nano, GPU, float16, 36 images a second", 36 * 4.1e9, "home", NANO),
}  # fmt: skip
# Median down and up in Mbit/s, and the deviation of the logarithm between households and places (our choice).
# Medians: Ookla, Speedtest Global Index, world, 2023, rounded.
LINES = {"mobile": (42.0, 10.0, 0.7), "home": (80.0, 37.0, 0.7)}
KINDS = {"phones": ("pixel1", "pixel2", "pixel3"), "boards": ("pi3", "pi4", "jetson_nano"), "all": tuple(DEVICES)}

Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]


@register("fleet", "measured")
def measured(
    clients: int,
    generator: np.random.Generator,
    devices: Annotated[Names, "phones, boards, all, or names of devices; drawn in equal shares"] = ("all",),
    capacities: Capacities = (1.0,),
    jitter: Jitter = 0.2,
    availability: Chance = 1.0,
    dropout: Dropout = 0.0,
) -> Columns:
    """Phones and single-board computers with published speeds, on lines with published medians (approximate)."""
    names = [name for each in devices for name in KINDS.get(each, (each,))]
    for name in names:
        if name not in DEVICES:
            raise choose("device of fleet 'measured'", name, (*KINDS, *DEVICES))
    if not names:
        raise InputError("fleet.devices needs at least one device; got none")
    kinds = np.arange(clients) % len(names)
    generator.shuffle(kinds)
    speed = np.array([DEVICES[name].speed for name in names])[kinds]
    down, up, spread = np.array([LINES[DEVICES[name].line] for name in names])[kinds].T
    place = np.exp(spread * generator.standard_normal(clients))  # a bad line is bad both ways
    return _columns(
        clients, _shared(capacities, clients), speed=speed, down=down * MBIT * place, up=up * MBIT * place,
        jitter=jitter, availability=availability, dropout=dropout,
    )  # fmt: skip
