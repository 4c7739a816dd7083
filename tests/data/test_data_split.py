"""A split is disjoint, complete, the same for every method, matched by labels, and survives saving."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedloom.data import Dataset, Split, draw, export, load, parse, split
from fedloom.errors import InputError

PARTITIONS = ["iid", "classes:2", "dirichlet:0.5", "dirichlet_balanced:0.5", "quantity:1"]


def made(trained: int = 600, tested: int = 200, classes: int = 6, groups: int = 0) -> Dataset:
    generator = np.random.default_rng(5)
    total = trained + tested
    names = tuple(f"group {number}" for number in range(groups))
    return Dataset(
        "made",
        generator.integers(0, 256, (total, 3, 4, 4), np.uint8),
        np.arange(total) % classes,
        trained,
        tuple(f"class {label}" for label in range(classes)),
        generator.integers(0, groups, total) if groups else None,
        names,
    )


DATA = made()


def same(one: Split, other: Split) -> bool:
    return all(
        np.array_equal(getattr(getattr(one, part), key), getattr(getattr(other, part), key))
        for part in ("train", "validation", "test")
        for key in ("rows", "offsets")
    ) and np.array_equal(one.public, other.public)


@settings(max_examples=60, deadline=None)
@given(
    partition=st.sampled_from(PARTITIONS),
    clients=st.integers(3, 20),
    validation=st.sampled_from([0.0, 0.1, 0.5]),
    public=st.integers(0, 60),
    test=st.sampled_from([None, 0.2]),
    seed=st.integers(0, 50),
)
def test_parts_are_disjoint_and_complete(
    *, partition: str, clients: int, validation: float, public: int, test: float | None, seed: int
) -> None:
    dealt = split(DATA, partition, clients, validation=validation, public=public, seed=seed, test=test)
    used = [dealt.train.rows, dealt.validation.rows, dealt.public, *([dealt.test.rows] if test else [])]
    assert np.array_equal(np.sort(np.concatenate(used)), DATA.train_rows)
    assert dealt.train.sizes.min() >= 1
    assert len(dealt.public) == public
    assert len(dealt.train) == len(dealt.validation) == len(dealt.test) == clients
    if test is None:
        assert (dealt.test.rows >= DATA.trained).all()
        assert dealt.test.sizes.min() >= 1
    assert same(
        dealt, split(DATA, parse(partition), clients, validation=validation, public=public, seed=seed, test=test)
    )


def test_test_parts_match_label_shares() -> None:
    dealt = split(DATA, "dirichlet:0.5", 8, seed=2, validation=0)
    for label in range(DATA.classes):
        trained = np.array([(DATA.y[rows] == label).sum() for rows in dealt.train])
        tested = np.array([(DATA.y[rows] == label).sum() for rows in dealt.test])
        expected = trained / trained.sum() * tested.sum()
        assert np.abs(tested - expected).max() <= 1 + 1e-9
    assert np.array_equal(np.sort(dealt.test.rows), DATA.test_rows)


def test_more_clients_than_test_images_share_one_of_their_class() -> None:
    data = made(600, 12)
    dealt = split(data, "classes:1", 60, seed=0, validation=0)
    assert dealt.test.sizes.min() == 1
    for trained, tested in zip(dealt.train, dealt.test, strict=True):
        assert data.y[tested[0]] == data.y[trained[0]]


@pytest.mark.parametrize(("partition", "clients"), [("domain", 4), ("domain", 8), ("writer", 4), ("writer", 2)])
def test_groups_are_tested_on_their_own_images(partition: str, clients: int) -> None:
    data = made(groups=4)
    assert data.groups is not None
    dealt = split(data, partition, clients, seed=1)
    for trained, tested in zip(dealt.train, dealt.test, strict=True):
        assert np.unique(data.groups[tested]).tolist() == np.unique(data.groups[trained]).tolist()
    held = np.isin(data.groups[data.test_rows], np.unique(data.groups[dealt.train.rows])).sum()
    assert len(dealt.test.rows) == held


def test_without_a_test_set_a_fifth_of_the_own_data() -> None:
    data = made(600, 0)
    dealt = split(data, "iid", 6, validation=0.2)
    assert dealt.train.sizes.tolist() == [60] * 6
    assert dealt.validation.sizes.tolist() == [20] * 6
    assert dealt.test.sizes.tolist() == [20] * 6


def test_shares_do_not_disturb_each_other() -> None:
    plain = split(DATA, "dirichlet:0.5", 5, seed=3)
    other = split(DATA, "dirichlet:0.5", 5, seed=3, validation=0.4)
    assert np.array_equal(plain.test.rows, other.test.rows)
    for client in range(5):
        whole = np.union1d(plain.train[client], plain.validation[client])
        assert np.array_equal(whole, np.union1d(other.train[client], other.validation[client]))
    assert not same(plain, split(DATA, "dirichlet:0.5", 5, seed=4))


def test_public_images_are_stratified() -> None:
    dealt = split(DATA, "iid", 5, public=60)
    assert np.bincount(DATA.y[dealt.public]).tolist() == [10] * 6


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"validation": 1.0}, "validation and test"),
        ({"validation": -0.1}, "validation and test"),
        ({"validation": 0.6, "test": 0.5}, "validation and test"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"public": 600}, "public must be between 0 and 599"),
    ],
)
def test_wrong_shares_are_refused(changed: dict[str, float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        split(DATA, "iid", 5, **changed)  # type: ignore[arg-type]


def test_a_split_survives_saving(tmp_path: Path) -> None:
    dealt = split(DATA, "dirichlet:0.5", 5, public=10, seed=3)
    dealt.save(tmp_path / "split.npz")
    assert same(dealt, Split.load(tmp_path / "split.npz"))
    whole = (tmp_path / "split.npz").read_bytes()
    for content in (whole[:200], b""):
        (tmp_path / "split.npz").write_bytes(content)
        with pytest.raises(InputError, match=r"split.npz is damaged"):
            Split.load(tmp_path / "split.npz")
    with pytest.raises(InputError, match="does not exist"):
        Split.load(tmp_path / "none.npz")


def test_export_can_be_read_as_data_sets(tmp_path: Path) -> None:
    dealt = split(DATA, "classes:2", 12, public=20)
    written = export(DATA, dealt, tmp_path / "out")
    assert [path.name for path in written][:2] == ["client_00.npz", "client_01.npz"]
    assert [path.name for path in written[12:]] == ["public.npz", "test.npz"]
    assert np.array_equal(load(str(written[-1])).y, DATA.y[DATA.test_rows])
    with np.load(written[3]) as file:
        assert np.array_equal(file["x_validation"], DATA.x[dealt.validation[3]].transpose(0, 2, 3, 1))
        assert np.array_equal(file["y_validation"], DATA.y[dealt.validation[3]])
    client = load(str(written[3]))
    assert np.array_equal(client.x, DATA.x[np.concatenate([dealt.train[3], dealt.test[3]])])
    assert client.class_names == DATA.class_names


@pytest.mark.parametrize(("clients", "groups"), [(3, 3), (40, 0), (250, 0)])
def test_pictures_are_drawn(tmp_path: Path, clients: int, groups: int) -> None:
    data = made(groups=groups)
    dealt = split(data, "writer" if groups else "iid", clients)
    draw(dealt, data, tmp_path / "split.png", title="a split")
    with Image.open(tmp_path / "split.png") as image:
        assert image.width > 900
        assert len(np.unique(np.asarray(image.convert("L")))) > 20
