"""One copy of a data set's images for all processes of a machine.

The first process to come loads the data set and writes its images to a file; the others wait and map the file. What a
process never looks at never takes up memory of its own, and pages that several look at are there once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np

from fedloom import wire
from fedloom.data.dataset import Dataset

__all__ = ["forget", "mapped"]


def _folder(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"fedloom-data-{os.getuid() if hasattr(os, 'getuid') else 0}-{name}"


def mapped(load: Callable[[], Dataset], name: str) -> Dataset:
    """The data set that `load` gives, its images as pages of a file that all who say the same name share."""
    folder = _folder(name)
    folder.mkdir(mode=0o700, exist_ok=True)
    images, rest = folder / "x.npy", folder / "rest.safetensors"
    with _locked(folder / "lock"):
        if not rest.exists():
            dataset = load()
            np.save(images, dataset.x)
            wire.save(
                {field.name: getattr(dataset, field.name) for field in fields(Dataset) if field.name != "x"}, rest
            )
            del dataset
        # Pages are private once written to, so that nobody can spoil them for the others.
        return Dataset(x=np.load(images, mmap_mode="c"), **wire.load(rest))


def forget(name: str) -> None:
    """Take the files away; who has mapped them keeps what it sees, and their space is free when the last one ends."""
    shutil.rmtree(_folder(name), ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone on this machine, where the system has such locks."""
    with path.open("a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, or its process dies
        except ImportError:
            pass
        yield
