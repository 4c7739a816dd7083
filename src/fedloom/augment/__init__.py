"""Augmentation of a client's training images: an epoch in one pass, drawn from the client's own generator.

Draws happen on the CPU, pixels move on the device. What comes out are images of the same kind (uint8, not normalised).
"""

from __future__ import annotations

import re

from fedloom.augment.crop import crop, crop_flip
from fedloom.augment.randaugment import STRONGEST, RandAugment
from fedloom.errors import InputError, choose
from fedloom.types import Augmentation

__all__ = ["RandAugment", "augmentation_of", "crop", "crop_flip"]

AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None, "crop": crop, "crop_flip": crop_flip, "randaugment": RandAugment(),
}  # fmt: skip


def augmentation_of(name: str) -> Augmentation | None:
    """The augmentation that a study names; `randaugment:E:F` says how many transformations, and how strong.

    >>> augmentation_of("randaugment:3:5")
    RandAugment(transforms=3, strength=5)
    """
    if name in AUGMENTATIONS:
        return AUGMENTATIONS[name]
    kind, _, numbers = name.partition(":")
    if kind != "randaugment":
        raise choose("data.augment", name, [*AUGMENTATIONS, "randaugment:E:F"])
    found = re.fullmatch(r"(\d+):(\d+)", numbers)
    if found is None or int(found[1]) < 1 or int(found[2]) > STRONGEST:
        raise InputError(
            f"data.augment = '{name}' is wrong: randaugment:E:F takes E >= 1 transformations of strength F between 0 "
            f"and {STRONGEST}"
        )
    return RandAugment(int(found[1]), int(found[2]))
