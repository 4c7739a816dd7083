"""The fourteen operations of RandAugment on batches of images.

Cubuk et al., RandAugment: practical automated data augmentation with a reduced search space, 2020. An operation takes
images on the scale 0..1 (N, C, H, W) and one number an image between -1 and 1: the strength as a share of the
operation's maximum, with a random sign that matters where an operation has two directions. At 0 an operation of
variable strength leaves an image as it is. Libraries scale differently; the maxima here are

rotate 30 degrees; shear 0.3, about the upper left corner as in Pillow; translate 0.3 of the side; colour, contrast,
brightness and sharpness by factors 1 - 0.9 and 1 + 0.9; posterise to 4 bits; solarise everything (an inverted image).
Whatever comes in from outside is black. Auto-contrast and equalise know no strength. Colour on a grey image, be it of
one channel or of three equal ones, is the identity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kornia.enhance import (
    adjust_brightness_accumulative,
    adjust_contrast_with_mean_subtraction,
    adjust_saturation_with_gray_subtraction,
    equalize,
    posterize,
    sharpness,
    solarize,
)
from kornia.geometry.transform import rotate, shear, translate
from torch import Tensor

__all__ = ["OPERATIONS", "Operation"]

Operation = Callable[[Tensor, Tensor], Tensor]
DEGREES, SHEAR, SHIFT, FACTOR, BITS = 30.0, 0.3, 0.3, 0.9, 4


def _identity(x: Tensor, strength: Tensor) -> Tensor:
    return x


def _auto_contrast(x: Tensor, strength: Tensor) -> Tensor:
    """Every channel stretched to 0..1; a constant one stays."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp(min=1e-6), x)


def _equalise(x: Tensor, strength: Tensor) -> Tensor:
    return equalize(x)


def _rotate(x: Tensor, strength: Tensor) -> Tensor:
    return rotate(x, DEGREES * strength)


def _solarise(x: Tensor, strength: Tensor) -> Tensor:
    # Strictly above 1 at strength 0, so that white stays white there.
    return solarize(x, 1 + 1e-3 - strength.abs() * (1 + 1e-3))


def _colour(x: Tensor, strength: Tensor) -> Tensor:
    return x if x.shape[1] == 1 else adjust_saturation_with_gray_subtraction(x, 1 + FACTOR * strength)


def _posterise(x: Tensor, strength: Tensor) -> Tensor:
    return posterize(x, 8 - (BITS * strength.abs()).round().int())


def _contrast(x: Tensor, strength: Tensor) -> Tensor:
    return adjust_contrast_with_mean_subtraction(x, 1 + FACTOR * strength)


def _brightness(x: Tensor, strength: Tensor) -> Tensor:
    return adjust_brightness_accumulative(x, 1 + FACTOR * strength)


def _sharpness(x: Tensor, strength: Tensor) -> Tensor:
    return sharpness(x, 1 + FACTOR * strength)


def _shear_x(x: Tensor, strength: Tensor) -> Tensor:
    return shear(x, torch.stack([SHEAR * strength, torch.zeros_like(strength)], 1))


def _shear_y(x: Tensor, strength: Tensor) -> Tensor:
    return shear(x, torch.stack([torch.zeros_like(strength), SHEAR * strength], 1))


def _translate_x(x: Tensor, strength: Tensor) -> Tensor:
    return translate(x, torch.stack([SHIFT * x.shape[3] * strength, torch.zeros_like(strength)], 1))


def _translate_y(x: Tensor, strength: Tensor) -> Tensor:
    return translate(x, torch.stack([torch.zeros_like(strength), SHIFT * x.shape[2] * strength], 1))


OPERATIONS: dict[str, Operation] = {
    "identity": _identity,
    "auto-contrast": _auto_contrast,
    "equalise": _equalise,
    "rotate": _rotate,
    "solarise": _solarise,
    "colour": _colour,
    "posterise": _posterise,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
    "shear x": _shear_x,
    "shear y": _shear_y,
    "translate x": _translate_x,
    "translate y": _translate_y,
}
