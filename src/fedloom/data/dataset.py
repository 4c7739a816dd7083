"""A data set in memory, and how one is found by name.

Images stay unsigned bytes in one array (training images first, then test images), so that a split is row numbers and
a device holds each image once. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedloom.errors import InputError, choose
from fedloom.registry import find
from fedloom.settings import built

__all__ = ["Arrays", "Dataset", "Images", "Ints", "Limit", "Size", "build", "load", "padded", "resize", "stratified"]

log = logging.getLogger("fedloom.data")
Images: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]
Size: TypeAlias = Annotated[int | None, "resize images to this many pixels a side"]
Limit: TypeAlias = Annotated[int | None, "keep at most this many training images, stratified by class and group"]

# Data sets that come without a test set give a fixed fifth of each class (and group) to one, the same in every run.
HELD_OUT = 0.2
HELD_OUT_SEED = 20240229


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with labels and, where the data have them, groups (domain or writer of each image)."""

    name: str
    x: Images
    """(N, C, H, W); the first `trained` are training images, the rest are the test set (there may be none)."""
    y: Ints
    trained: int
    class_names: tuple[str, ...]
    groups: Ints | None = None
    group_names: tuple[str, ...] = ()
    natural: bool = False
    """Natural images: a horizontal flip keeps the label."""
    group_levels: Ints | None = None
    """(groups, C, 256) pixels per grey level, where a group's training images are known but not kept."""

    def __post_init__(self) -> None:
        said = f"data set '{self.name}'"
        if self.x.ndim != 4 or self.x.dtype != np.uint8:
            raise InputError(
                f"{said}: x must be uint8 of shape (N, C, H, W); got {self.x.dtype} of shape {self.x.shape}"
            )
        if len(self.x) != len(self.y):
            raise InputError(f"{said}: {len(self.x)} images but {len(self.y)} labels")
        if not 1 <= self.trained <= len(self.y):
            raise InputError(f"{said}: trained must be between 1 and {len(self.y)} images; got {self.trained}")
        if self.y.min() < 0 or self.y.max() >= len(self.class_names):
            wrong = self.y.min() if self.y.min() < 0 else self.y.max()
            raise InputError(f"{said}: label {wrong} is outside 0 .. {len(self.class_names) - 1}")
        if self.groups is not None and len(self.groups) != len(self.y):
            raise InputError(f"{said}: {len(self.y)} images but {len(self.groups)} groups")

    @property
    def channels(self) -> int:
        """Colour channels: 1 or 3."""
        return int(self.x.shape[1])

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def size(self) -> int:
        """Height of an image in pixels."""
        return int(self.x.shape[2])

    @property
    def train_rows(self) -> Ints:
        """Row numbers of the training images."""
        return np.arange(self.trained)

    @property
    def test_rows(self) -> Ints:
        """Row numbers of the test images; empty when the data set has none."""
        return np.arange(self.trained, len(self.y))


@dataclass(frozen=True, eq=False)
class Arrays:
    """What a reader found in files, in the layout of an `.npz` (N, H, W[, C]) and not yet checked."""

    origin: Path
    x_train: npt.NDArray[Any]
    y_train: npt.NDArray[Any]
    x_test: npt.NDArray[Any] | None = None
    y_test: npt.NDArray[Any] | None = None
    g_train: npt.NDArray[Any] | None = None
    g_test: npt.NDArray[Any] | None = None
    class_names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()


def load(name: str, **options: Any) -> Dataset:
    """Load a data set by registered name, by import path `package.module:name`, or from a file `some/where.npz`."""
    if name.endswith(".npz"):
        name, options = "npz", {"path": name, **options}
    make = find("dataset", name)
    try:
        allowed = inspect.signature(make).parameters
    except ValueError:
        raise InputError(f"data set '{name}' does not say what options it takes; expected a function") from None
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in allowed.values()):
        for option in options:
            if option not in allowed:
                raise choose(f"option of data set '{name}'", option, allowed)
    for parameter in allowed.values():
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if named and parameter.default is parameter.empty and parameter.name not in options:
            raise InputError(f"data set '{name}' needs the option '{parameter.name}'")
    dataset = built(f"data set '{name}'", make, options)
    if not isinstance(dataset, Dataset):
        raise InputError(f"data set '{name}' returned {type(dataset).__name__}; expected a fedloom.data.Dataset")
    return dataset


def build(
    name: str,
    found: Arrays,
    *,
    size: int | None = None,
    limit: int | None = None,
    natural: bool = False,
    hold_out: bool = True,
) -> Dataset:
    """Check what a reader found and make a data set of it; without a test set a fixed fifth becomes one."""
    for option, value in (("size", size), ("limit", limit)):
        if value is not None and value < 1:
            raise InputError(f"{option} of data set '{name}' must be at least 1; got {value}")
    x, y = _images(found, "x_train"), _integers(found, "y_train", len(found.x_train))
    g = None if found.g_train is None else _integers(found, "g_train", len(x))
    if len(x) == 0:
        raise InputError(f"{found.origin} holds no training images")
    has_test = found.x_test is not None and len(found.x_test) > 0
    if has_test:
        x_test, y_test = _images(found, "x_test"), _integers(found, "y_test", len(found.x_test))  # type: ignore[arg-type]
        g_test = None if g is None else _integers(found, "g_test", len(x_test))
        if x.shape[1:] != x_test.shape[1:]:
            raise InputError(f"{found.origin}: training images are {x.shape[1:]} but test images {x_test.shape[1:]}")
    else:
        held = np.zeros(len(x), bool)
        if hold_out:
            generator = np.random.default_rng(HELD_OUT_SEED)
            held[stratified(_strata(y, g), round(HELD_OUT * len(x)), generator)] = True
        x_test, y_test, g_test = x[held], y[held], None if g is None else g[held]
        x, y, g = x[~held], y[~held], None if g is None else g[~held]
    names = found.class_names or tuple(str(label) for label in range(int(max(y.max(), y_test.max(initial=0))) + 1))
    if not found.class_names and len(y_test) and (last := y_test.max()) > y.max():
        log.warning("%s: no training image has the label %d of y_test; it counts: %d classes", name, last, len(names))
    for key, labels in (("y_train", y), ("y_test", y_test)):
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
            wrong = labels.min() if labels.min() < 0 else labels.max()
            raise InputError(f"{found.origin}: {key} holds the label {wrong}, outside 0 .. {len(names) - 1}")
    if limit is not None and limit < len(x):
        keep = stratified(_strata(y, g), limit, np.random.default_rng(HELD_OUT_SEED))
        x, y, g = x[keep], y[keep], None if g is None else g[keep]
    both = np.concatenate([x, x_test])
    groups = None if g is None or g_test is None else np.concatenate([g, g_test])
    group_names = found.group_names
    if groups is not None:
        group_names = group_names or tuple(str(group) for group in range(int(groups.max()) + 1))
        if not 0 <= groups.min() <= groups.max() < len(group_names):
            raise InputError(
                f"{found.origin}: groups must be 0 .. {len(group_names) - 1}; got {groups.min()} .. {groups.max()}"
            )
    return Dataset(
        name=name,
        x=both if size is None else resize(both, size),
        y=np.concatenate([y, y_test]),
        trained=len(y),
        class_names=names,
        groups=groups,
        group_names=group_names,
        natural=natural,
    )


def _strata(y: Ints, groups: Ints | None) -> Ints:
    return y if groups is None else groups * (int(y.max()) + 1) + y


def _images(found: Arrays, key: str) -> Images:
    """Images as (N, C, H, W); a view, so that no copy is made before the parts are joined."""
    x: npt.NDArray[Any] = getattr(found, key)
    if x.dtype != np.uint8:
        raise InputError(f"{found.origin}: {key} is {x.dtype}; expected uint8 (0 .. 255)")
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3):
        return x.transpose(0, 3, 1, 2)
    raise InputError(f"{found.origin}: {key} has shape {x.shape}; expected (N, H, W), (N, H, W, 1) or (N, H, W, 3)")


def _integers(found: Arrays, key: str, count: int) -> Ints:
    values: npt.NDArray[Any] | None = getattr(found, key)
    if values is None:
        raise InputError(f"{found.origin}: {key} is missing")
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise InputError(f"{found.origin}: {key} is {values.dtype} of shape {values.shape}; expected a row of integers")
    if len(values) != count:
        raise InputError(f"{found.origin}: {count} images but {len(values)} entries in {key}")
    if len(values) and values.max() > np.iinfo(np.int64).max:
        raise InputError(f"{found.origin}: {key} holds {values.max()}, which is no number of a class or group")
    return values.astype(np.int64)


def stratified(strata: Ints, count: int, generator: np.random.Generator) -> Ints:
    """Draw `count` positions, sorted, so that every stratum gives its share to within one.

    >>> stratified(np.array([0, 0, 0, 0, 1, 1]), 3, np.random.default_rng(0)).size
    3
    """
    _, strata, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    quota = count * sizes / max(1, len(strata))
    given = np.floor(quota).astype(np.int64)
    # Largest remainders take what is left, ties by lot.
    left = np.lexsort((generator.random(len(sizes)), -(quota - given)))[: count - int(given.sum())]
    given[left] += 1
    order = np.lexsort((generator.random(len(strata)), strata))
    rank = np.arange(len(strata)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(order[rank < given[strata[order]]])


def resize(x: Images, size: int) -> Images:
    """Resize (N, C, H, W) to a square by the bilinear filter that Pillow uses (antialiased when it shrinks)."""
    if x.shape[2:] == (size, size):
        return x
    with _room(x, size):
        rows, columns = _bilinear(x.shape[2], size), _bilinear(x.shape[3], size)
        out = np.empty((*x.shape[:2], size, size), np.uint8)
    step = max(1, 2**24 // max(1, x[0].size))  # bounds the float copies to some 100 MB
    for start in range(0, len(x), step):
        part = rows @ x[start : start + step].astype(np.float32) @ columns.T
        out[start : start + step] = np.clip(np.rint(part), 0, 255)
    return out


def padded(dataset: Dataset, size: int) -> Dataset:
    """The images in the middle of black squares of this many pixels a side."""
    height, width = dataset.x.shape[2:]
    if size < max(height, width):
        raise InputError(f"data.pad is {size}, but images of '{dataset.name}' are {height} x {width}; use data.size")
    above, left = (size - height) // 2, (size - width) // 2
    with _room(dataset.x, size):
        x = np.pad(dataset.x, ((0, 0), (0, 0), (above, size - height - above), (left, size - width - left)))
    levels = dataset.group_levels
    if levels is not None:
        black = np.arange(levels.shape[2]) == 0
        levels = levels + black * (levels.sum(2, keepdims=True) // (height * width) * (size**2 - height * width))
    return replace(dataset, x=x, group_levels=levels)


@contextmanager
def _room(x: Images, size: int) -> Iterator[None]:
    """Say it where images of this size are more than there is, or more than can be counted."""
    try:
        yield
    except (MemoryError, ValueError) as error:
        raise InputError(f"{len(x)} images of size {size} do not fit into memory: {error}") from error


def _bilinear(old: int, new: int) -> npt.NDArray[np.float32]:
    """(new, old) weights of a triangle filter, widened by the scale when shrinking."""
    scale = old / new
    centres = (np.arange(new) + 0.5) * scale
    distance = np.abs(np.arange(old) + 0.5 - centres[:, None]) / max(scale, 1.0)
    weights = np.maximum(0.0, 1.0 - distance)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)
