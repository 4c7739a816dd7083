"""A run's final model as a file that plain torch loads."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from fedloom.errors import InputError, choose
from fedloom.method import Method
from fedloom.runs.start import DEPLOYMENT, goes_on
from fedloom.runs.store import Store
from fedloom.runs.study import method_of
from fedloom.runs.world import world_of

__all__ = ["export"]

SUFFIXES = (".pt", ".pth", ".safetensors")


def export(folder: Path, file: Path) -> str:
    """Write the global model's state dict; gives the line of Python that builds the model it belongs to."""
    if file.suffix not in SUFFIXES:
        raise choose("kind of file", file.suffix or file.name, SUFFIXES)
    store = Store.open(folder)
    summary = store.read("summary.json")
    if summary is None:
        raise InputError(f"{folder} is not finished; go on with: {goes_on(store)}")
    study = store.study()
    if not store.model_file.exists():
        raise InputError(f"{study.method.name} has no global model: every client has its own; nothing to export")
    plain = store.model()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as written:  # so that a place that cannot be written is an OSError in both formats
        if file.suffix == ".safetensors":
            written.write(safetensors.torch.save(plain))
        else:
            torch.save(plain, written)
    shape, classes = _kind(store)
    fields = "".join(f", {key}={value!r}" for key, value in study.model.fields.items())
    sizes = f"channels={shape[0]}, classes={classes}, size={shape[1]}"
    line = f"fedloom.models.resolve.build({study.model.name!r}, {sizes}{fields})"
    method: Method = method_of(study)
    return method.recipe(line, shape, classes, summary.get("found", {}))


def _kind(store: Store) -> tuple[tuple[int, ...], int]:
    """Shape of an image and number of classes: as real clients agreed on, or of the data set."""
    agreed = store.read(DEPLOYMENT)
    if agreed is not None:
        return tuple(agreed["shape"]), len(agreed["class_names"])
    data = world_of(store.study().model_dump_json(), store.split_file).dataset
    return tuple(data.x.shape[1:]), data.classes
