"""Data sets kept as folders of image files: MNIST-M, PACS, VLCS, CINIC-10 and Tiny ImageNet.

PACS and VLCS (domain/class/image) have no test set of their own: a fixed fifth of each class of each domain is one.
Their images differ in size and are made square. Tiny ImageNet's validation images, the only ones with public labels
besides the training set, are its test set.
"""

from __future__ import annotations

import os
import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from fedloom.data.dataset import HELD_OUT_SEED, Arrays, Dataset, Images, Ints, Limit, Size, build, stratified
from fedloom.data.files import Finder, damaged, gather
from fedloom.errors import InputError
from fedloom.registry import register

__all__ = ["by_class", "cinic10", "mnist_m", "pacs", "tiny_imagenet", "vlcs"]

SQUARE = 64  # pixels a side that PACS and VLCS folders get when no size is asked for
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")


class Listing(NamedTuple):
    """Image files with their labels."""

    paths: list[Path]
    y: Ints


@register("dataset", "mnist_m", paper="Ganin et al., Domain-adversarial training of neural networks, JMLR 2016")
def mnist_m(size: Size = None, limit: Limit = None) -> Dataset:
    """MNIST-M: MNIST digits blended with patches of photographs, 32x32 colour (28x28 in some releases)."""

    def read(finder: Finder) -> Arrays | None:
        names = tuple(string.digits)
        for folder in finder.folders():
            if (folder / "mnist_m_train_labels.txt").is_file():
                parts = [f"mnist_m_{part}" for part in ("train", "test")]
                train, test = (_labelled(folder / part, folder / f"{part}_labels.txt", names) for part in parts)
                return _decoded(folder, _chosen(train, limit), test, names, None)
            for kinds in (("training", "testing"), ("train", "test")):
                if (folder / kinds[0]).is_dir():
                    train, test = (_by_class(folder / kind, names) for kind in kinds)
                    return _decoded(folder, _chosen(train, limit), test, names, None)
        return None

    wanted = "mnist_m_train and mnist_m_test with mnist_m_train_labels.txt and mnist_m_test_labels.txt"
    return build("mnist_m", gather("mnist_m", read, wanted=wanted, flat=False), size=size, limit=limit)


@register("dataset", "pacs", paper="Li et al., Deeper, broader and artier domain generalization, ICCV 2017")
def pacs(size: Size = None, limit: Limit = None) -> Dataset:
    """PACS: photo, art painting, cartoon and sketch, 7 classes, colour; groups are domains."""
    return _domains("pacs", size, limit)


@register("dataset", "vlcs", paper="Fang et al., Unbiased metric learning, ICCV 2013")
def vlcs(size: Size = None, limit: Limit = None) -> Dataset:
    """VLCS: Caltech101, LabelMe, SUN09 and VOC2007, 5 classes, colour; groups are domains."""
    return _domains("vlcs", size, limit)


@register("dataset", "cinic10", paper="Darlow et al., CINIC-10 is not ImageNet or CIFAR-10, arXiv:1810.03505")
def cinic10(
    size: Size = None,
    limit: Limit = None,
    validation: Annotated[bool, "also train on CINIC-10's own validation part"] = False,
) -> Dataset:
    """CINIC-10 natural images from CIFAR and ImageNet, 10 classes, 32x32 colour, 90,000 / 90,000."""

    def read(finder: Finder) -> Arrays | None:
        for folder in finder.folders():
            if (folder / "train").is_dir():
                names = _subfolders(folder / "train")
                train = _joined([_by_class(folder / part, names) for part in ("train", "valid")[: 1 + validation]])
                test = _by_class(folder / "test", names)
                return _decoded(folder, _chosen(train, limit), test, names, size or 32)
        return None

    found = gather("cinic10", read, wanted="its folders train, valid and test", names=("cinic-10",), flat=False)
    return build("cinic10", found, size=size, limit=limit, natural=True)


@register("dataset", "tiny_imagenet", paper="Le & Yang, Tiny ImageNet visual recognition challenge, 2015")
def tiny_imagenet(size: Size = None, limit: Limit = None) -> Dataset:
    """Tiny ImageNet natural images, 200 classes, 64x64 colour, 100,000 / 10,000."""

    def read(finder: Finder) -> Arrays | None:
        for folder in finder.folders():
            for base in (folder, folder / "tiny-imagenet-200"):
                if (base / "train").is_dir():
                    names = _subfolders(base / "train")
                    train, said = _by_class(base / "train", names), base / "val" / "val_annotations.txt"
                    loose = said.is_file()
                    test = _labelled(said.with_name("images"), said, names) if loose else _by_class(base / "val", names)
                    return _decoded(base, _chosen(train, limit), test, _words(base, names), size or 64)
        return None

    found = gather(
        "tiny_imagenet", read, wanted="the folder tiny-imagenet-200", names=("tiny-imagenet-200",), flat=False
    )
    return build("tiny_imagenet", found, size=size, limit=limit, natural=True)


def by_class(folder: Path) -> Arrays:
    """Images of one's own, a folder a class: FOLDER/CLASS, or FOLDER/train/CLASS and FOLDER/test/CLASS.

    A class of which there are no images has an empty folder, so that all who share the classes number them alike.
    """
    train = folder / "train" if (folder / "train").is_dir() else folder
    names = tuple(name for name in _subfolders(train))
    listings = [_by_class(train, names, missing=True)]
    if train != folder and (folder / "test").is_dir():
        listings.append(_by_class(folder / "test", names, missing=True))
    if not listings[0].paths:
        raise InputError(f"{train} holds no folders of images (one a class, {', '.join(SUFFIXES)})")
    return _decoded(
        folder, listings[0], listings[-1] if len(listings) > 1 else Listing([], np.empty(0, np.int64)), names, None
    )


def _domains(name: str, size: int | None, limit: int | None) -> Dataset:
    def read(finder: Finder) -> Arrays | None:
        for folder in finder.folders():
            for base in (folder, *(folder / inner for inner in _subfolders(folder))):
                found = _by_domain(base, size or SQUARE)
                if found is not None:
                    return found
        return None

    found = gather(name, read, wanted="folders DOMAIN/CLASS of images", flat=False)
    return build(name, found, size=size, limit=limit, natural=True)


def _by_domain(base: Path, size: int) -> Arrays | None:
    """All domains below a folder; a domain may keep its classes in a folder `full`, as VLCS's first release does."""
    domains = {name: base / name for name in _subfolders(base)}
    domains = {name: folder / "full" if (folder / "full").is_dir() else folder for name, folder in domains.items()}
    classes = tuple(sorted({name for folder in domains.values() for name in _subfolders(folder)}))
    parts = [_by_class(folder, classes, missing=True) for folder in domains.values()]
    if not any(part.paths for part in parts):
        return None
    joined = _joined(parts)
    groups = np.repeat(np.arange(len(parts)), [len(part.paths) for part in parts])
    pixels = _pixels(joined.paths, size)
    return Arrays(base, pixels, joined.y, g_train=groups, class_names=classes, group_names=tuple(domains))


def _joined(parts: Sequence[Listing]) -> Listing:
    return Listing([path for part in parts for path in part.paths], np.concatenate([part.y for part in parts]))


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()


def _by_class(folder: Path, names: Sequence[str], missing: bool = False) -> Listing:
    """Images in one folder a class, or in its folder `images` as Tiny ImageNet has them."""
    if not folder.is_dir():
        raise InputError(f"{folder.parent} has no folder {folder.name}")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = [*(folder / name).glob("*"), *(folder / name).glob("images/*")]
        inside = sorted(path for path in found if path.suffix.lower() in SUFFIXES)
        if not inside and not missing:
            raise InputError(f"{folder / name} holds no images")
        paths += inside
        labels += [label] * len(inside)
    return Listing(paths, np.array(labels, np.int64))


def _labelled(folder: Path, labels: Path, names: Sequence[str]) -> Listing:
    """Images named in a text file, one a line, followed by their class."""
    number = {name: index for index, name in enumerate(names)}
    try:
        lines = [line.split() for line in labels.read_text().splitlines() if line.strip()]
        return Listing([folder / line[0] for line in lines], np.array([number[line[1]] for line in lines], np.int64))
    except (OSError, UnicodeDecodeError, IndexError, KeyError) as error:
        raise damaged(labels, f"expected lines of a file name and a class ({type(error).__name__}: {error})") from error


def _words(base: Path, ids: Sequence[str]) -> tuple[str, ...]:
    """Readable class names where the release has them."""
    file = base / "words.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    words = {key: text.partition(",")[0] for key, _, text in (line.partition("\t") for line in lines)}
    return tuple(words.get(key, key) for key in ids)


def _chosen(listing: Listing, limit: int | None) -> Listing:
    """At most `limit` files, chosen before decoding: a small part of a large set should not take a minute to load."""
    if limit is None or not 0 < limit < len(listing.paths):
        return listing
    keep = stratified(listing.y, limit, np.random.default_rng(HELD_OUT_SEED))
    return Listing([listing.paths[row] for row in keep], listing.y[keep])


def _decoded(origin: Path, train: Listing, test: Listing, names: tuple[str, ...], size: int | None) -> Arrays:
    return Arrays(origin, _pixels(train.paths, size), train.y, _pixels(test.paths, size), test.y, class_names=names)


def _pixels(paths: Sequence[Path], size: int | None) -> Images:
    """Decode to (N, H, W, 3); without a size all images must have the first one's."""
    from PIL import Image

    def decode(path: Path) -> Images:
        try:
            with Image.open(path) as image:
                colour = image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise damaged(path, error) from error
        if size is not None and colour.size != (size, size):
            colour = colour.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(colour)

    if not paths:
        return np.empty((0, size or 1, size or 1, 3), np.uint8)
    first = decode(paths[0])
    pixels = np.empty((len(paths), *first.shape), np.uint8)

    def place(row: int) -> None:
        image = decode(paths[row])
        if image.shape != first.shape:
            raise damaged(
                paths[row], f"it is {image.shape[1]}x{image.shape[0]}, others {first.shape[1]}x{first.shape[0]}"
            )
        pixels[row] = image

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(place, range(len(paths))):
            pass
    return pixels
