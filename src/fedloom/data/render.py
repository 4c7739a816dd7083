"""SynthDigits, rendered here.

The original (Ganin & Lempitsky, ICML 2015: some 500,000 digits in Windows fonts) can no longer be fetched with a known
checksum. Where its files are in `$FEDLOOM_DATA` they are used; otherwise images of the same kind are rendered with
Pillow: a digit in one of the fonts that Pillow and matplotlib bring, often with neighbours, on a coloured background
with a gradient, turned, shifted, blurred and noisy. The same seed gives the same images with the same fonts and
Pillow; the result is kept in the user's cache.
"""

from __future__ import annotations

import os
import string
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Arrays, Dataset, Images, Ints, Limit, Size, build
from fedloom.data.files import cache_folder, search
from fedloom.data.mat import read_mat
from fedloom.data.npz import read_npz
from fedloom.errors import InputError
from fedloom.registry import register

__all__ = ["render", "synth_digits"]

VERSION = 1  # of the drawing below: another one must not find the old one's images in the cache
SIDE = 32
CANVAS = 64  # drawn at twice the size, so that edges are smooth
TRAIN, TEST = 10_000, 2_000
FONTS = ("DejaVuSans*.ttf", "DejaVuSerif*.ttf", "STIXGeneral*.ttf", "cmr10.ttf", "cmss10.ttf", "cmtt10.ttf")


@register("dataset", "synth_digits", paper="after Ganin & Lempitsky, ICML 2015; rendered here")
def synth_digits(size: Size = None, limit: Limit = None, seed: Annotated[int, "of the rendering"] = 0) -> Dataset:
    """SynthDigits: coloured digits in many fonts, rendered here, 32x32 colour, 10,000 / 2,000."""
    found = search("synth_digits", lambda finder: read_mat(finder, "synth_train_32x32.mat", "synth_test_32x32.mat"))
    return build("synth_digits", found or _rendered(seed), size=size, limit=limit)


def _rendered(seed: int) -> Arrays:
    file = cache_folder() / "synth_digits" / f"rendered-{VERSION}-{seed}.npz"
    if file.is_file():
        with suppress(InputError):  # a damaged cache is rendered again
            return read_npz(file)
    x, y = render(TRAIN + TEST, seed)
    found = Arrays(file, x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:], class_names=tuple(string.digits))
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        with open(unfinished, "wb") as out:
            np.savez(out, x_train=x[:TRAIN], y_train=y[:TRAIN], x_test=x[TRAIN:], y_test=y[TRAIN:])
        os.replace(unfinished, file)
    return found


def render(count: int, seed: int) -> tuple[Images, Ints]:
    """Draw that many digits; the i-th image shows the digit i modulo 10."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    fonts = _fonts()
    y = np.arange(count) % 10
    x = np.empty((count, SIDE, SIDE, 3), np.uint8)
    for row, label in enumerate(y):
        x[row] = np.asarray(_draw(int(label), fonts, generator).resize((SIDE, SIDE), Image.Resampling.BOX))
    noise = generator.normal(0, 1, x.shape) * generator.uniform(0, 12, (count, 1, 1, 1))
    return np.clip(np.rint(x + noise), 0, 255).astype(np.uint8), y


def _draw(label: int, fonts: list[Any], generator: np.random.Generator) -> Any:
    from PIL import Image, ImageDraw, ImageFilter

    font = fonts[generator.integers(len(fonts))]
    ink = Image.new("L", (CANVAS, CANVAS))
    pen = ImageDraw.Draw(ink)
    left, top, right, bottom = pen.textbbox((0, 0), str(label), font=font)
    x, y = (CANVAS - left - right) / 2, (CANVAS - top - bottom) / 2
    pen.text((x, y), str(label), fill=255, font=font)
    gap = (right - left) * generator.uniform(1.05, 1.4)
    for side in (-1, 1):
        if generator.random() < 0.4:
            pen.text((x + side * gap, y), str(generator.integers(10)), fill=255, font=font)
    ink = ink.rotate(
        generator.uniform(-25, 25), Image.Resampling.BILINEAR, translate=tuple(generator.integers(-5, 6, 2).tolist())
    )
    paper, colour = _colours(generator)
    drawn = Image.composite(Image.new("RGB", ink.size, colour), _background(paper, generator), ink)
    return drawn.filter(ImageFilter.GaussianBlur(generator.uniform(0, 2)))


def _colours(generator: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Paper and ink that can be told apart."""
    while True:
        pair = generator.integers(0, 256, (2, 3))
        if np.abs(pair[0] - pair[1]).sum() > 180:
            return tuple(pair[0].tolist()), tuple(pair[1].tolist())


def _background(paper: tuple[int, ...], generator: np.random.Generator) -> Any:
    from PIL import Image

    angle, strength = generator.uniform(0, 2 * np.pi), generator.uniform(0, 60)
    ramp = np.linspace(-0.5, 0.5, CANVAS)
    slope: npt.NDArray[np.float64] = strength * (np.cos(angle) * ramp + np.sin(angle) * ramp[:, None])
    return Image.fromarray(np.clip(np.array(paper) + slope[:, :, None], 0, 255).astype(np.uint8))


def _fonts() -> list[Any]:
    from PIL import ImageFont

    package = find_spec("matplotlib")
    folders = [
        Path(place) / "mpl-data" / "fonts" / "ttf" for place in (package and package.submodule_search_locations) or ()
    ]
    files = sorted(
        path for folder in folders for pattern in FONTS for path in folder.glob(pattern) if "Display" not in path.name
    )
    sizes = (40, 48, 56)
    return [ImageFont.load_default(size) for size in sizes] + [
        ImageFont.truetype(file, size) for file in files for size in sizes
    ]
