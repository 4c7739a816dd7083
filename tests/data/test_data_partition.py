"""Partitions deal every training image once, keep their promises, and refuse with a sentence what cannot be."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.data import Dataset, Partition, Rows, parse
from fedloom.data.partition import Classes, Dirichlet, DirichletBalanced, Domain, Iid, Quantity, Writer, apportion, deal
from fedloom.errors import InputError

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def dataset(trained: int = 1000, classes: int = 10, groups: int = 0, tested: int = 0, seed: int = 0) -> Dataset:
    """Every class occurs; images are one pixel that nobody looks at."""
    generator = np.random.default_rng(seed)
    total = trained + tested
    y = np.concatenate([np.arange(classes), generator.integers(0, classes, max(0, total - classes))])[:total]
    names = tuple(f"group {number}" for number in range(groups))
    x = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (total, 1, 1, 1))
    of = np.concatenate([np.arange(groups), generator.integers(0, groups, total - groups)]) if groups else None
    return Dataset("made", x, y, trained, tuple(map(str, range(classes))), of, names)


def holds_everything_once(parts: Rows, data: Dataset) -> bool:
    return np.array_equal(np.sort(parts.rows), data.train_rows)


@quick
@given(trained=st.integers(30, 400), clients=st.integers(1, 30), seed=st.integers(0, 99))
def test_iid_is_even_and_complete(trained: int, clients: int, seed: int) -> None:
    data = dataset(trained, 5)
    parts = Iid()(data, clients, np.random.default_rng(seed))
    assert holds_everything_once(parts, data)
    assert np.ptp(parts.sizes) <= 1


@quick
@given(classes=st.integers(2, 12), per_client=st.integers(1, 12), clients=st.integers(1, 40), seed=st.integers(0, 99))
def test_classes_gives_exactly_that_many_distinct_classes(
    classes: int, per_client: int, clients: int, seed: int
) -> None:
    data = dataset(1500, classes)
    partition = Classes(per_client)
    if per_client > classes or clients * per_client < classes:
        with pytest.raises(InputError):
            partition(data, clients, np.random.default_rng(seed))
        return
    parts = partition(data, clients, np.random.default_rng(seed))
    assert holds_everything_once(parts, data)
    assert [len(np.unique(data.y[rows])) for rows in parts] == [per_client] * clients
    for label in range(classes):
        shards = [count for rows in parts if (count := int((data.y[rows] == label).sum()))]
        assert max(shards) - min(shards) <= 1


@quick
@given(classes=st.integers(1, 15), clients=st.integers(1, 50), seed=st.integers(0, 99), data=st.data())
def test_deal_is_even(classes: int, clients: int, seed: int, data: st.DataObject) -> None:
    per_client = data.draw(st.integers(1, classes))
    held = deal(clients, classes, per_client, np.random.default_rng(seed))
    assert (held.sum(axis=1) == per_client).all()
    assert np.ptp(held.sum(axis=0)) <= 1


def test_deal_mixes_classes() -> None:
    pairs = {tuple(np.flatnonzero(hand)) for hand in deal(500, 10, 2, np.random.default_rng(0))}
    assert len(pairs) == 45


@quick
@given(
    kind=st.sampled_from([Dirichlet, DirichletBalanced]),
    alpha=st.sampled_from([0.05, 0.5, 100.0]),
    clients=st.integers(1, 12),
    minimum=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_dirichlet_is_complete_and_keeps_its_minimum(
    kind: type[Dirichlet], alpha: float, clients: int, minimum: int, seed: int
) -> None:
    data = dataset(800, 6)
    try:
        parts = kind(alpha, minimum)(data, clients, np.random.default_rng(seed))
    except InputError:
        assert minimum > 0
        return
    assert holds_everything_once(parts, data)
    assert parts.sizes.min() >= minimum


def test_alpha_means_what_it_says() -> None:
    data = dataset(10_000, 10)
    tops = []
    for alpha in (0.05, 1.0, 1000.0):
        parts = Dirichlet(alpha, 0)(data, 10, np.random.default_rng(3))
        shares = np.stack([np.bincount(data.y[rows], minlength=10) for rows in parts]) / np.bincount(data.y)
        tops.append(shares.max(axis=0).mean())
    assert tops[0] > 0.6 > tops[1] > 0.2 > tops[2]
    assert tops[2] < 0.12


def test_the_balance_clause_stops_clients_that_have_their_share() -> None:
    data = dataset(10_000, 10)
    spread = {Dirichlet: 0.0, DirichletBalanced: 0.0}
    for seed in range(20):
        for kind in spread:
            parts = kind(0.1, 0)(data, 10, np.random.default_rng(seed))
            spread[kind] += parts.sizes.std()
        # What a client holds beyond its even share came with the one class that carried it over.
        for rows in parts:
            counts = np.bincount(data.y[rows], minlength=10)
            last = np.flatnonzero(counts)[-1]
            assert len(rows) - counts[last] < 1000
    assert spread[DirichletBalanced] < 0.9 * spread[Dirichlet]


def test_a_hopeless_dirichlet_names_what_works() -> None:
    data = dataset(600, 10)
    with pytest.raises(InputError, match=r"1000 draws with alpha 0.01") as caught:
        Dirichlet(0.01, 5)(data, 50, np.random.default_rng(0))
    sentence = str(caught.value)
    alpha = float(sentence.partition("work: alpha ")[2].split()[0])
    clients = int(sentence.partition(" or ")[2].split()[0])
    assert Dirichlet(alpha, 5)(data, 50, np.random.default_rng(1)).sizes.min() >= 5
    assert Dirichlet(0.01, 5)(data, clients, np.random.default_rng(1)).sizes.min() >= 5


@quick
@given(
    law=st.sampled_from(["lognormal", "power"]),
    skew=st.floats(0, 3),
    clients=st.integers(1, 40),
    minimum=st.integers(1, 10),
    seed=st.integers(0, 99),
)
def test_quantity_skews_sizes(law: str, skew: float, clients: int, minimum: int, seed: int) -> None:
    data = dataset(500, 5)
    parts = Quantity(skew, law, minimum)(data, clients, np.random.default_rng(seed))  # type: ignore[arg-type]
    assert holds_everything_once(parts, data)
    assert parts.sizes.min() >= minimum
    if skew == 0:
        assert np.ptp(parts.sizes) <= 1


@pytest.mark.parametrize("clients", [4, 12])
def test_domain_gives_each_client_one(clients: int) -> None:
    data = dataset(400, 5, groups=4)
    parts = Domain()(data, clients, np.random.default_rng(0))
    assert holds_everything_once(parts, data)
    assert data.groups is not None
    assert [np.unique(data.groups[rows]).tolist() for rows in parts] == [[client % 4] for client in range(clients)]


def test_writer_takes_the_first() -> None:
    data = dataset(400, 5, groups=7)
    assert data.groups is not None
    assert holds_everything_once(Writer()(data, 7, np.random.default_rng(0)), data)
    parts = Writer()(data, 3, np.random.default_rng(0))
    assert [np.unique(data.groups[rows]).tolist() for rows in parts] == [[0], [1], [2]]
    assert sum(parts.sizes) == (data.groups < 3).sum()


@pytest.mark.parametrize(
    ("partition", "clients", "said"),
    [
        (Iid(), 1001, "at most 1000 clients"),
        (Iid(), 0, "clients must be at least 1; got 0"),
        (Classes(11), 20, "at most the 10 classes"),
        (Classes(2), 4, "cannot cover the 10 classes of 'made'; at least 5 clients"),
        (Classes(10), 500, "that should hold it"),
        (Dirichlet(1.0, 20), 60, "at most 50 clients"),
        (Quantity(1.0, "lognormal", 20), 60, "at most 50 clients"),
        (Domain(), 5, "has no domains"),
        (Writer(), 5, "has no writers"),
    ],
)
def test_what_cannot_be_dealt_is_refused(partition: Partition, clients: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        partition(dataset(1000, 10), clients, np.random.default_rng(0))


def test_group_partitions_check_the_count() -> None:
    data = dataset(400, 5, groups=4)
    with pytest.raises(InputError, match="clients must be 4"):
        Domain()(data, 6, np.random.default_rng(0))
    with pytest.raises(InputError, match="between 1 and the 4 writers"):
        Writer()(data, 5, np.random.default_rng(0))


def test_parse() -> None:
    assert parse("iid") == Iid()
    assert parse("classes:3") == Classes(3)
    assert parse("dirichlet:0.1") == Dirichlet(0.1)
    assert parse("dirichlet_balanced:1") == DirichletBalanced(1.0)
    assert parse("domain") == Domain()
    assert parse("fedloom.data.partition:Classes:4") == Classes(4)
    assert parse("fedloom.data.partition:Iid") == Iid()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dirichelt:0.1", "Did you mean 'dirichlet'"),
        ("classes:two", "per_client must be a whole number; got 'two'"),
        ("classes:2.5", "whole number"),
        ("classes:0", "per_client of a Classes partition must be at least 1; got 0"),
        ("dirichlet:x", "alpha must be a number"),
        ("dirichlet:0", "must be above 0"),
        ("dirichlet:nan", "must be above 0; got nan"),
        ("dirichlet:-1", "must be above 0"),
        ("dirichlet:", "needs a value"),
        ("iid:3", "takes no value"),
        ("", "unknown partition"),
        ("no.such.module:Thing", "cannot be imported"),
    ],
)
def test_parse_refuses(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse(text)


def test_rows() -> None:
    rows = Rows.of([[3, 1], [], [2]])
    assert [part.tolist() for part in rows] == [[3, 1], [], [2]]
    assert rows.sizes.tolist() == [2, 0, 1]
    assert rows.owners.tolist() == [0, 0, 2]
    assert rows[-1].tolist() == [2]
    assert Rows.owned(np.array([1, -1, 0, 1]), 3).rows.tolist() == [2, 0, 3]
    assert Rows.owned(np.array([1, -1, 0, 1]), 3).offsets.tolist() == [0, 1, 3, 3]
    with pytest.raises(IndexError):
        rows[3]


@quick
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any), st.integers(0, 500))
def test_apportion(weights: list[int], total: int) -> None:
    shares = apportion(np.array(weights, float), total, np.random.default_rng(0))
    assert shares.sum() == total
    assert (np.abs(shares - np.array(weights) * total / sum(weights)) < 1 + 1e-6).all()


@pytest.mark.parametrize(
    "partition", [Iid(), Classes(2), Dirichlet(50.0, 1), Quantity()], ids=lambda p: type(p).__name__
)
def test_a_hundred_thousand_clients_are_quick(partition: Partition) -> None:
    data = dataset(1_000_000, 10)
    began = time.perf_counter()
    parts = partition(data, 100_000, np.random.default_rng(0))
    assert time.perf_counter() - began < 3  # about 0.2 s; the margin is for loaded machines
    assert len(parts) == 100_000
    assert len(parts.rows) == 1_000_000
