"""RandAugment: its operations against Pillow's, its draws, and what it does to unusual images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from fedloom.augment import RandAugment, augmentation_of
from fedloom.augment.operations import OPERATIONS
from fedloom.augment.randaugment import applied
from fedloom.errors import InputError
from fedloom.runs.study import resolve
from fedloom.types import Task, Train
from tests.methods.tiny import run, same, server_of, world

SIDE = 28
BILINEAR = Image.Resampling.BILINEAR


def affine(*numbers):
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, numbers, BILINEAR)


def enhance(kind, factor):
    return lambda image: kind(image).enhance(factor)


POINTS = {
    ("auto-contrast", 1): ImageOps.autocontrast,
    ("equalise", 1): ImageOps.equalize,
    ("solarise", 1): lambda image: ImageOps.solarize(image, 0),
    ("posterise", -1): lambda image: ImageOps.posterize(image, 4),
    ("colour", 1): enhance(ImageEnhance.Color, 1.9),
    ("colour", -1): enhance(ImageEnhance.Color, 0.1),
    ("contrast", 1): enhance(ImageEnhance.Contrast, 1.9),
    ("contrast", -1): enhance(ImageEnhance.Contrast, 0.1),
    ("brightness", 1): enhance(ImageEnhance.Brightness, 1.9),
    ("brightness", -0.5): enhance(ImageEnhance.Brightness, 0.55),
    ("sharpness", 1): enhance(ImageEnhance.Sharpness, 1.9),
    ("sharpness", -1): enhance(ImageEnhance.Sharpness, 0.1),
}
MOVES = {
    ("rotate", 1): lambda image: image.rotate(30, BILINEAR),
    ("rotate", -0.5): lambda image: image.rotate(-15, BILINEAR),
    ("shear x", 1): affine(1, -0.3, 0, 0, 1, 0),
    ("shear y", 1): affine(1, 0, 0, -0.3, 1, 0),
    ("translate x", 1): affine(1, 0, -0.3 * SIDE, 0, 1, 0),
    ("translate y", -1): affine(1, 0, 0, 0, 1, 0.3 * SIDE),
}


def noise(count=4, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 180, (count, channels, SIDE, SIDE), generator=generator).to(torch.uint8)


def smooth():
    u = torch.linspace(0, 3, SIDE)
    waves = [torch.sin(u[:, None] + shift) * torch.cos(1.3 * u[None] - shift) * 100 + 128 for shift in (0.2, 0.5, 1.0)]
    return torch.stack(waves)[None].to(torch.uint8)


def in_pillow(x, change):
    changed = [np.asarray(change(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in x]
    return torch.from_numpy(np.stack(changed)).permute(0, 3, 1, 2)


def by(name, x, strength):
    return applied(OPERATIONS[name], x, torch.full((len(x),), float(strength)))


@pytest.mark.parametrize(("case", "change"), POINTS.items(), ids=[f"{name} {by}" for name, by in POINTS])
def test_levels_are_those_of_pillow(case, change):
    x = noise()
    assert (by(case[0], x, case[1]).int() - in_pillow(x, change).int()).abs().max() <= 1


@pytest.mark.parametrize(("case", "change"), MOVES.items(), ids=[f"{name} {by}" for name, by in MOVES])
def test_places_are_those_of_pillow(case, change):
    x = smooth()
    apart = (by(case[0], x, case[1]).int() - in_pillow(x, change).int()).abs()
    # Only the rim, where black comes in, may differ: Pillow does not interpolate there.
    assert (apart > 6).float().mean() < 0.06
    assert apart.median() <= 1


def test_there_are_fourteen():
    assert len(OPERATIONS) == 14


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("auto-contrast", "equalise")])
@pytest.mark.parametrize("channels", [1, 3])
def test_strength_zero_changes_nothing(name, channels):
    x = noise(channels=channels)
    x[0, 0, 0] = torch.tensor([0, 255] * (SIDE // 2), dtype=torch.uint8)
    assert torch.equal(by(name, x, 0), x)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("level", [0, 90, 255])
def test_images_of_one_level_stay_images(name, channels, level):
    x = torch.full((2, channels, 8, 8), level, dtype=torch.uint8)
    for strength in (-1, 1):
        made = by(name, x, strength)
        assert (made.shape, made.dtype) == (x.shape, x.dtype)
        if name in ("auto-contrast", "equalise", "identity", "colour", "sharpness", "contrast"):
            assert torch.equal(made, x)


def test_colour_on_grey_is_the_identity():
    grey = noise(channels=1)
    assert torch.equal(by("colour", grey, 1), grey)
    repeated = grey.expand(-1, 3, -1, -1)
    assert torch.equal(by("colour", repeated, 1), repeated)
    assert not torch.equal(by("colour", noise(), 1), noise())


@pytest.mark.parametrize("channels", [1, 3])
def test_grouped_equals_one_by_one(channels):
    x, augment = noise(24, channels), RandAugment(3, 7)
    made = augment(x, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    which = torch.randint(14, (3, 24), generator=generator)
    signs = 2.0 * torch.randint(2, (3, 24), generator=generator) - 1
    names = list(OPERATIONS)
    for row, image in enumerate(x):
        for number, sign in zip(which[:, row], signs[:, row], strict=True):
            image = by(names[number], image[None], 0.7 * sign)[0]
        # A batch may be summed in another order than one image: a level may round the other way.
        assert (made[row].int() - image.int()).abs().max() <= 1
    assert torch.equal(made, augment(x, torch.Generator().manual_seed(5)))
    assert torch.equal(x, noise(24, channels))
    assert not torch.equal(made, augment(x, torch.Generator().manual_seed(6)))


def test_draws_are_uniform(monkeypatch):
    counts = dict.fromkeys(OPERATIONS, 0)

    def counting(name):
        def operation(x, strength):
            assert set(strength.tolist()) <= {-0.5, 0.5}
            counts[name] += len(x)
            return x

        return operation

    monkeypatch.setattr("fedloom.augment.operations.OPERATIONS", {name: counting(name) for name in OPERATIONS})
    RandAugment(2, 5)(torch.zeros(7000, 1, 1, 1, dtype=torch.uint8), torch.Generator().manual_seed(0))
    assert sum(counts.values()) == 14000
    assert max(abs(count - 1000) for count in counts.values()) < 150  # five standard deviations


def test_every_epoch_has_images_of_its_own():
    place = world("fedavg", data={"augment": "randaugment"}, train={"epochs": 2})
    client = place.client(Task(0, 0, train=Train(epochs=2)), {})
    images = client.plan().images
    count = client.samples
    assert images.own
    assert len(images.x) == 2 * count
    assert not torch.equal(images.x[:count], images.x[count:])
    assert torch.equal(images.y[:count], images.y[count:])
    chosen = client.some(5, "sample")  # a part of the training images is augmented like all of them
    assert client.plan((chosen,)).images.own
    assert not client.plan((client.test,)).images.own


def test_trainers_see_the_same_images(tmp_path):
    changes = {"data": {"augment": "randaugment:1:4"}, "run": {"rounds": 1}}
    same(
        server_of(run("fedavg", tmp_path / "a", **changes)),
        server_of(run("fedavg", tmp_path / "b", **changes, engine={"trainer": "stacked"})),
    )


@pytest.mark.parametrize("name", ["randaugment:0:5", "randaugment:2:11", "randaugment:2", "randaugment:a:b"])
def test_numbers_out_of_bounds_are_refused(name):
    with pytest.raises(InputError, match="E >= 1 transformations of strength F between 0 and 10"):
        resolve({"data": {"augment": name}})


def test_unknown_augmentations_are_refused():
    with pytest.raises(InputError, match="Did you mean 'randaugment'"):
        resolve({"data": {"augment": "randaugmnt"}})
    assert augmentation_of("none") is None
