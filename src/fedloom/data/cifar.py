"""CIFAR-10 and CIFAR-100 from their python batches (Krizhevsky 2009), in a folder or still in the .tar.gz.

These files are pickles, and a pickle may run code. They are read with an unpickler that knows byte strings and numpy
arrays and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Arrays, Dataset, Limit, Size, build
from fedloom.data.files import Download, Finder, damaged, gather
from fedloom.errors import InputError, kind_of
from fedloom.registry import register

__all__ = ["cifar10", "cifar100", "unpickle"]

PAPER = "Krizhevsky, Learning multiple layers of features from tiny images, 2009"
URL = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True)
class _Layout:
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    label: str
    md5: str

    @property
    def archive(self) -> Download:
        return Download(
            f"{URL}{self.folder.removesuffix('-batches-py').removesuffix('-python')}-python.tar.gz", self.md5
        )


TEN = _Layout(
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    label="label",
    md5="c58f30108f718f92721af3b95e74349a",
)
HUNDRED = _Layout(
    folder="cifar-100-python",
    train=("train",),
    test="test",
    meta="meta",
    label="fine_label",
    md5="eb9058c3a382ffc7106e4002c42a8d85",
)


@register("dataset", "cifar10", paper=PAPER)
def cifar10(size: Size = None, limit: Limit = None) -> Dataset:
    """CIFAR-10 natural images, 10 classes, 32x32 colour, 50,000 / 10,000."""
    return build("cifar10", _gather("cifar10", TEN), size=size, limit=limit, natural=True)


@register("dataset", "cifar100", paper=PAPER)
def cifar100(size: Size = None, limit: Limit = None) -> Dataset:
    """CIFAR-100 natural images, 100 classes, 32x32 colour, 50,000 / 10,000."""
    return build("cifar100", _gather("cifar100", HUNDRED), size=size, limit=limit, natural=True)


def _gather(name: str, layout: _Layout) -> Arrays:
    def read(finder: Finder) -> Arrays | None:
        first, archive = finder.find(layout.train[0]), finder.find(layout.archive.file)
        if first is not None:
            files = (*layout.train, layout.test, layout.meta)
            present = [first.parent / file for file in files if (first.parent / file).is_file()]
            return _read(first.parent, {path.name: path.read_bytes() for path in present}, layout)
        return None if archive is None else _read(archive, _unpack(archive, layout.folder), layout)

    return gather(
        name,
        read,
        wanted=f"the folder {layout.folder} or {layout.archive.file}",
        names=(layout.folder,),
        # The batches of CIFAR-100 are called 'train' and 'test': too common to be looked for in the root itself.
        flat=name == "cifar10",
        downloads=[layout.archive],
    )


def _read(origin: Path, files: dict[str, bytes], layout: _Layout) -> Arrays:
    def batch(file: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if file not in files:
            raise InputError(f"{origin} has no file {file}")
        entries = unpickle(files[file], origin / file)
        pixels, labels = entries.get("data"), entries.get(f"{layout.label}s")
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3072 or labels is None:
            expected = f"expected 'data' of 3072 bytes a row and '{layout.label}s'"
            raise damaged(origin / file, f"{expected}; it has {', '.join(entries) or 'nothing'}")
        return pixels, np.asarray(labels)

    parts = [batch(file) for file in layout.train]
    x_test, y_test = batch(layout.test)
    names = unpickle(files[layout.meta], origin / layout.meta) if layout.meta in files else {}
    return Arrays(
        origin,
        _upright(np.concatenate([x for x, _ in parts])),
        np.concatenate([y for _, y in parts]),
        _upright(x_test),
        y_test,
        class_names=tuple(_text(name) for name in names.get(f"{layout.label}_names", [])),
    )


def _upright(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _text(name: object) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _unpack(archive: Path, folder: str) -> dict[str, bytes]:
    """The files of the archive's folder, in memory: nothing an archive names is ever written to disk."""
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None and member.name.startswith(f"{folder}/"):
                    members[member.name.removeprefix(f"{folder}/")] = file.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise damaged(archive, error) from error
    return members


def unpickle(data: bytes, origin: Path) -> dict[str, Any]:
    """Read a dictionary of byte strings, numbers, lists and numpy arrays; anything else in the pickle is refused."""
    try:
        entries = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except InputError as refused:
        raise InputError(f"{origin} {refused}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged(origin, f"not a readable pickle ({type(error).__name__}: {error})") from error
    if not isinstance(entries, dict):
        raise damaged(origin, f"it holds {kind_of(entries)}, expected a dictionary")
    return {_text(key): value for key, value in entries.items()}


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """What Python 3 writes for a byte string in protocol 2; the codec is not left to the file."""
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    reconstruct = np.empty(0).__reduce__()[0]  # private in numpy, and it has moved between versions
    ALLOWED = {
        ("_codecs", "encode"): _encode,
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self.ALLOWED[module_name, global_name]
        except KeyError:
            raise InputError(
                f"asks for {module_name}.{global_name}, which no CIFAR file needs: refused, not run"
            ) from None
