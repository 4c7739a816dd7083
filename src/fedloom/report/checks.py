"""What is shown before anything is run: a checked study, a model's units, a split."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedloom.data import draw, load, parse, split
from fedloom.data import export as export_split
from fedloom.errors import InputError
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.report.tables import quantity
from fedloom.runs.check import estimate
from fedloom.runs.study import read, resolve
from fedloom.runs.world import world_of
from fedloom.units import Units

__all__ = ["shape_of", "show_check", "show_model", "show_split"]


BATCH = 32  # for which the memory of activations is computed


def show_check(file: Path) -> None:
    """All errors at once, or what the study would cost; the split is drawn beside the study file."""
    study = resolve(read(file), str(file))
    world = world_of(study.model_dump_json())
    world.check()
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in estimate(world).items():
        unit = "B" if "byte" in name or "memory" in name else ""
        if isinstance(value, list):
            shown = ", ".join(f"{model}: {quantity(each, unit)}" for model, each in value)
        else:
            shown = value if isinstance(value, str) else quantity(value, unit)
        table.add_row(name, shown)
    Console().print(table)
    picture = file.with_suffix(".split.png")
    draw(world.split, world.dataset, picture, f"{study.data.name}, {study.partition.name}")
    sys.stdout.write(f"{file} is sound; its split: {picture}\n")


def shape_of(text: str) -> tuple[int, int, int]:
    """Channels, height and width of an image from a word.

    >>> shape_of("3x32x32")
    (3, 32, 32)
    """
    try:
        channels, height, width = (int(part) for part in text.split("x"))
    except ValueError:
        channels = height = width = 0
    if min(channels, height, width) < 1:
        raise InputError(f"--shape is channels x height x width, such as 3x32x32; got '{text}'")
    return channels, height, width


def show_model(model: str, capacities: list[float], shape: str, classes: int, *, as_json: bool) -> None:
    """Groups, sizes, parameters and MACs of the sub-models of some capacities."""
    channels, height, width = shape_of(shape)
    make = partial(build, model, channels=channels, classes=classes, size=height)
    network = Network(make, (channels, height, width), classes)
    tensors, units = network.initial(0), _units(network)
    costs: list[dict[str, Any]] = []
    for capacity in capacities:
        kept = units.kept(capacity)
        small = units.take(tensors, {group: torch.arange(number) for group, number in kept.items()})
        costs.append(
            {
                "capacity": capacity,
                "parameters": units.num_parameters(kept),
                "macs": network.macs(small),
                "activation_bytes": network.saved_bytes(small, BATCH),
                "kept": kept,
            }
        )
    if as_json:
        groups: dict[str, Any] = {"model": model, "groups": units.sizes, "whole": units.whole, "capacities": costs}
        sys.stdout.write(json.dumps(groups) + "\n")
        return
    table = Table("group", "units", *(f"r = {capacity:g}" for capacity in capacities), box=None, header_style="bold")
    for group, size in units.sizes.items():
        table.add_row(group, str(size), *(str(cost["kept"][group]) for cost in costs))
    table.add_row("parameters", "", *(quantity(cost["parameters"]) for cost in costs), style="bold")
    table.add_row("MACs, forward", "", *(quantity(cost["macs"]) for cost in costs), style="bold")
    table.add_row(
        f"activations, batch {BATCH}", "", *(quantity(cost["activation_bytes"], "B") for cost in costs), style="bold"
    )
    Console().print(table)
    for group, reason in units.whole.items():
        sys.stdout.write(f"kept whole: {group}: {reason}\n")


def _units(network: Network) -> Units:
    """The units of a network, without a word about what is kept whole: the table says it."""
    log = logging.getLogger("fedloom.units")
    log.disabled = True
    try:
        return network.units
    finally:
        log.disabled = False


def show_split(
    name: str, partition: str, clients: int, seed: int, validation: float, folder: Path | None, picture: Path
) -> None:
    """Deal, draw, and write one file a client if asked."""
    if picture.suffix not in (".png", ".svg", ".pdf"):
        kind = "a folder" if picture.is_dir() else f"'{picture}'"
        raise InputError(f"--picture is a .png, .svg or .pdf file; got {kind}")
    dataset = load(name)
    dealt = split(dataset, parse(partition), clients, validation=validation, seed=seed)
    sizes = dealt.train.sizes
    sys.stdout.write(
        f"{dataset.name}: {dataset.trained} training images, {dataset.classes} classes, dealt to {clients} clients "
        f"({sizes.min()} to {sizes.max()} images to train on)\n"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(dealt, dataset, picture, f"{name}, {partition}")
    sys.stdout.write(f"picture: {picture}\n")
    if folder is not None:
        written = export_split(dataset, dealt, folder)
        sys.stdout.write(f"{len(written)} files in {folder}\n")
