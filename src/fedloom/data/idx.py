"""Data sets in idx files, plain or gzipped: MNIST and its relatives.

LeCun et al. 1998 (MNIST), Xiao et al. 2017 (Fashion-MNIST), Cohen et al. 2017 (EMNIST). EMNIST's files hold images
on their side; here they stand upright. The labels of its letters start at 1 in the files and at 0 here.
"""

from __future__ import annotations

import gzip
import io
import string
import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Arrays, Dataset, Limit, Size, build
from fedloom.data.files import Download, Finder, damaged, gather
from fedloom.errors import InputError, choose
from fedloom.registry import register

__all__ = ["EmnistSplit", "emnist", "emnist_letters", "fashion_mnist", "mnist", "parse_idx"]

EmnistSplit = Literal["balanced", "digits", "letters", "mnist", "byclass", "bymerge"]

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST = [
    Download(f"{MNIST_URL}train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    Download(f"{MNIST_URL}train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    Download(f"{MNIST_URL}t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    Download(f"{MNIST_URL}t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
]
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION = [
    Download(f"{FASHION_URL}train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    Download(f"{FASHION_URL}train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
    Download(f"{FASHION_URL}t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
    Download(f"{FASHION_URL}t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
]
EMNIST = Download("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e")
EMNIST_PAPER = "Cohen et al., EMNIST: an extension of MNIST to handwritten letters, arXiv:1702.05373"

MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
EMNIST_CLASSES = {
    "balanced": MERGED,
    "bymerge": MERGED,
    "byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
    "letters": string.ascii_lowercase,
    "digits": string.digits,
    "mnist": string.digits,
}
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@register("dataset", "mnist", paper="LeCun et al., Gradient-based learning applied to document recognition, 1998")
def mnist(size: Size = None, limit: Limit = None) -> Dataset:
    """MNIST handwritten digits, 28x28 grey, 60,000 / 10,000."""
    return build("mnist", _like_mnist("mnist", MNIST, tuple(string.digits)), size=size, limit=limit)


@register("dataset", "fashion_mnist", paper="Xiao et al., Fashion-MNIST, arXiv:1708.07747")
def fashion_mnist(size: Size = None, limit: Limit = None) -> Dataset:
    """Fashion-MNIST pieces of clothing, 28x28 grey, 60,000 / 10,000."""
    return build("fashion_mnist", _like_mnist("fashion_mnist", FASHION, CLOTHES), size=size, limit=limit)


@register("dataset", "emnist", paper=EMNIST_PAPER)
def emnist(
    split: Annotated[EmnistSplit, "which of EMNIST's own selections"] = "balanced",
    size: Size = None,
    limit: Limit = None,
) -> Dataset:
    """EMNIST handwritten letters and digits, 28x28 grey; balanced: 47 classes, 112,800 / 18,800."""
    if split not in get_args(EmnistSplit):
        raise choose("split of emnist", split, get_args(EmnistSplit))
    return _emnist("emnist" if split == "balanced" else f"emnist_{split}", split, size, limit)


@register("dataset", "emnist_letters", paper=EMNIST_PAPER)
def emnist_letters(size: Size = None, limit: Limit = None) -> Dataset:
    """EMNIST handwritten letters, 26 classes, 28x28 grey, 124,800 / 20,800."""
    return _emnist("emnist_letters", "letters", size, limit)


def _like_mnist(name: str, downloads: list[Download], classes: tuple[str, ...]) -> Arrays:
    files = [download.file.removesuffix(".gz") for download in downloads]

    def read(finder: Finder) -> Arrays | None:
        paths = [finder.find(file, f"{file}.gz", file.replace("-idx", ".idx")) for file in files]
        if paths[0] is None:
            return None
        parts = [_read_idx(path, file, finder.root) for path, file in zip(paths, files, strict=True)]
        return _arrays(paths[0].parent, parts, classes)

    return gather(
        name,
        read,
        wanted="train- and t10k-images-idx3-ubyte and -labels-idx1-ubyte (plain or .gz)",
        # Fashion-MNIST's files bear the names of MNIST's: in the root itself they are taken for MNIST's.
        flat=name == "mnist",
        downloads=downloads,
    )


def _emnist(name: str, split: str, size: int | None, limit: int | None) -> Dataset:
    kinds = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
    files = [f"emnist-{split}-{kind}-ubyte" for kind in kinds]

    def read(finder: Finder) -> Arrays | None:
        paths = [finder.find(file, f"{file}.gz") for file in files]
        archive = finder.find("gzip.zip", "emnist-gzip.zip")
        if paths[0] is not None:
            origin = paths[0].parent
            parts = [_read_idx(path, file, finder.root) for path, file in zip(paths, files, strict=True)]
        elif archive is not None:
            origin, parts = archive, [_read_member(archive, file) for file in files]
        else:
            return None
        first = 1 if split == "letters" else 0
        upright = [part.transpose(0, 2, 1) if part.ndim == 3 else part.astype(np.int64) - first for part in parts]
        return _arrays(origin, upright, tuple(EMNIST_CLASSES[split]))

    wanted = f"emnist-{split}-train- and -test-images-idx3-ubyte and -labels-idx1-ubyte (plain or .gz)"
    return build(name, gather(name, read, wanted=wanted, names=("emnist",), downloads=[EMNIST]), size=size, limit=limit)


def _arrays(origin: Path, parts: list[npt.NDArray[Any]], classes: tuple[str, ...]) -> Arrays:
    x_train, y_train, x_test, y_test = parts
    return Arrays(origin, x_train, y_train, x_test, y_test, class_names=classes)


def _read_idx(path: Path | None, file: str, root: Path) -> npt.NDArray[Any]:
    if path is None:
        raise InputError(f"{root} has a part of the data set but not {file}")
    try:
        content = path.read_bytes()
        return parse_idx(gzip.decompress(content) if path.suffix == ".gz" else content, _dimensions(file))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise damaged(path, error) from error


def _read_member(archive: Path, file: str) -> npt.NDArray[Any]:
    try:
        with zipfile.ZipFile(archive) as zipped:
            return parse_idx(gzip.decompress(zipped.read(f"gzip/{file}.gz")), _dimensions(file))
    except (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile) as error:
        raise damaged(archive, error) from error


def _dimensions(file: str) -> int:
    return 3 if "idx3" in file else 1


def parse_idx(data: bytes, dimensions: int) -> npt.NDArray[Any]:
    """Unsigned bytes of an idx file with that many dimensions; a ValueError says what is wrong.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), 1).tolist()
    [7, 9]
    """
    stream = io.BytesIO(data)
    magic = stream.read(4)
    if magic != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"it starts with {magic.hex()}, expected {bytes([0, 0, 8, dimensions]).hex()}")
    shape = tuple(int.from_bytes(stream.read(4), "big") for _ in range(dimensions))
    expected = 4 + 4 * dimensions + int(np.prod(shape))
    if len(data) != expected:
        raise ValueError(f"it says {'x'.join(map(str, shape))}, {expected} bytes in all, but has {len(data)}")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
