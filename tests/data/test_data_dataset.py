"""The data set itself, what is embedded or rendered, and the real files where $FEDLOOM_DATA has them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedloom.data import Dataset, load
from fedloom.data import render as rendering
from fedloom.data.dataset import padded, resize, stratified
from fedloom.data.levels import group_levels
from fedloom.errors import InputError

real = pytest.mark.skipif("FEDLOOM_DATA" not in os.environ, reason="needs real files in $FEDLOOM_DATA")


def test_digits_are_embedded_and_keep_their_test_set() -> None:
    dataset = load("digits")
    assert (dataset.x.shape, dataset.trained, dataset.channels, dataset.size) == ((1797, 1, 8, 8), 1438, 1, 8)
    assert (dataset.x.min(), dataset.x.max()) == (0, 255)
    assert np.ptp(np.bincount(dataset.y[dataset.test_rows])) <= 3
    assert np.array_equal(dataset.x, load("digits").x)
    small = load("digits", limit=100, size=16)
    assert (small.x.shape, small.trained) == ((459, 1, 16, 16), 100)
    assert np.array_equal(small.y[small.test_rows], dataset.y[dataset.test_rows])


def test_padding_puts_a_black_border_around_images() -> None:
    dataset = load("digits", limit=20)
    wide = padded(dataset, 11)
    assert wide.x.shape == (len(dataset.x), 1, 11, 11)
    assert np.array_equal(wide.x[:, :, 1:9, 1:9], dataset.x)
    assert wide.x.sum() == dataset.x.sum()
    assert np.array_equal(padded(dataset, 8).x, dataset.x)
    with pytest.raises(InputError, match=r"data\.pad is 7, but images of 'digits' are 8 x 8; use data\.size"):
        padded(dataset, 7)
    with pytest.raises(InputError, match="do not fit into memory"):
        padded(dataset, 10**9)


def test_padding_counts_where_only_levels_are_known() -> None:
    x = np.random.default_rng(0).integers(256, size=(6, 3, 4, 5), dtype=np.uint8)
    whole = Dataset("mine", x, np.zeros(6, np.int64), 6, ("a",), np.array([0, 0, 1, 1, 1, 0]), ("here", "there"))
    known = padded(replace(whole, group_levels=group_levels(whole)), 7)
    assert np.array_equal(group_levels(known), group_levels(padded(whole, 7)))


def test_importing_data_imports_neither_torch_nor_anything_slow() -> None:
    slow = ("torch", "sklearn", "scipy", "matplotlib", "PIL", "pooch")
    code = f"import sys, fedloom.data; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": np.zeros((4, 2, 2), np.uint8)}, "shape"),
        ({"x": np.zeros((4, 1, 2, 2), np.float32)}, "uint8"),
        ({"y": np.zeros(3, np.int64)}, "4 images but 3 labels"),
        ({"y": np.array([0, 1, 2, 0])}, "label 2 is outside"),
        ({"trained": 5}, "trained"),
        ({"groups": np.zeros(3, np.int64)}, "3 groups"),
    ],
)
def test_a_data_set_made_by_hand_is_checked(changed: dict[str, object], said: str) -> None:
    whole = {
        "name": "mine",
        "x": np.zeros((4, 1, 2, 2), np.uint8),
        "y": np.zeros(4, np.int64),
        "trained": 3,
        "class_names": ("a", "b"),
    }
    assert Dataset(**whole).classes == 2  # type: ignore[arg-type]
    with pytest.raises(InputError, match=said):
        Dataset(**whole | changed)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.data())
def test_stratified(strata: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(strata)))
    labels = np.array(strata)
    chosen = stratified(labels, count, np.random.default_rng(0))
    assert len(np.unique(chosen)) == count
    expected = np.bincount(labels) * count / len(labels)
    assert (np.abs(np.bincount(labels[chosen], minlength=len(expected)) - expected) <= 1 + 1e-9).all()


@pytest.mark.parametrize("size", [8, 16, 28, 45])
def test_resize_agrees_with_pillow(size: int) -> None:
    x = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), np.uint8)
    ours = resize(x, size)
    for image, expected in zip(ours, x, strict=True):
        pillow = Image.fromarray(expected.transpose(1, 2, 0)).resize((size, size), Image.Resampling.BILINEAR)
        assert np.abs(image.transpose(1, 2, 0).astype(int) - np.asarray(pillow)).max() <= 1


def test_rendered_digits_repeat_and_are_cached(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "TRAIN", 40)
    monkeypatch.setattr(rendering, "TEST", 20)
    first = load("synth_digits")
    assert (first.x.shape, first.trained) == ((60, 3, 32, 32), 40)
    (cached,) = (home.parent / "cache").rglob("rendered-*.npz")
    assert np.array_equal(load("synth_digits").x, first.x)
    cached.write_bytes(b"damaged")
    assert np.array_equal(load("synth_digits").x, first.x)
    assert not np.array_equal(load("synth_digits", seed=1).x, first.x)
    # Ink and paper can be told apart in every image.
    assert first.x.reshape(60, -1).std(axis=1).min() > 8


def test_digits_five_from_five_files(home: Path) -> None:
    generator = np.random.default_rng(0)
    shapes = {
        "mnist": (60, 28, 28),
        "mnist_m": (40, 32, 32, 3),
        "svhn": (50, 32, 32, 3),
        "synth_digits": (70, 32, 32, 3),
        "usps": (80, 16, 16),
    }
    for name, shape in shapes.items():
        x, y = generator.integers(0, 256, shape, np.uint8), np.arange(shape[0]) % 10
        np.savez(home / f"{name}.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    dataset = load("digits_five")
    assert dataset.groups is not None
    assert dataset.x.shape == (300, 3, 28, 28)
    assert np.bincount(dataset.groups[: dataset.trained]).tolist() == [40] * 5
    assert np.bincount(dataset.groups[dataset.test_rows]).tolist() == [20] * 5
    assert np.array_equal(dataset.x[0, 0], dataset.x[0, 2])
    unequal = load("digits_five", equal=False, per_domain=65)
    assert unequal.groups is not None
    assert np.bincount(unequal.groups[: unequal.trained]).tolist() == [60, 40, 50, 65, 65]
    three = load("digits_five", unseen="mnist_m,usps")
    assert three.groups is not None
    assert np.bincount(three.groups[: three.trained], minlength=5).tolist() == [50, 0, 50, 50, 0]
    with pytest.raises(InputError, match="Did you mean 'usps'"):
        load("digits_five", unseen="uspss")


REAL = {
    "mnist": ((70000, 1, 28, 28), 60000, 10),
    "cifar10": ((60000, 3, 32, 32), 50000, 10),
    "usps": ((9298, 1, 16, 16), 7291, 10),
    "svhn": ((6083, 3, 32, 32), 5083, 10),
    "mnist_m": ((4800, 3, 32, 32), 3900, 10),
    "emnist_letters": ((41600, 1, 28, 28), 31200, 26),
    "femnist": ((5997, 1, 28, 28), 4804, 10),
    "pacs": ((5720, 3, 32, 32), 4400, 7),
    "vlcs": ((187, 3, 64, 64), 147, 5),
}


@real
@pytest.mark.parametrize("name", REAL)
def test_real_files(name: str) -> None:
    dataset = load(name)
    assert (dataset.x.shape, dataset.trained, dataset.classes) == REAL[name]
    assert len(np.unique(dataset.y[: dataset.trained])) == dataset.classes


@real
def test_real_mnist_and_cifar_are_the_real_ones() -> None:
    mnist = load("mnist")
    assert mnist.y[:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(mnist.y[mnist.test_rows]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    cifar = load("cifar10")
    assert cifar.class_names[cifar.y[0]] == "frog"
    assert cifar.x[0, :, 0, 0].tolist() == [59, 62, 63]
