"""Every cut on every network: sizes, order, one choice a stream, merges that count right."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from math import ceil

import pytest
import torch
from scipy.stats import chi2, chisquare

from fedloom.errors import InputError
from fedloom.policies.cut import Prefix, Random, Rolling, Scored, Whole
from fedloom.policies.merge import Mean
from fedloom.types import Report, Server
from tests.submodels.nets import CLASSES, LARGE, NETS, NORM_FREE, images, network, tensors_of

CUTS = {
    "prefix": Prefix(),
    "random": Random(),
    "rolling": Rolling(),
    "scored": Scored(),
    "warm": Scored(temperature=1.0),
}
CAPACITIES = (1.0, 0.99, 0.5, 0.3, 0.0625)
every_net = pytest.mark.parametrize("name", NETS)
every_cut = pytest.mark.parametrize("cut", CUTS)


def chosen(name, cut, capacity, round=0, seed=0):
    net = network(name)
    generator = torch.Generator().manual_seed(1000 * seed + round)
    scores = {group: torch.rand(size, generator=generator) for group, size in net.units.sizes.items()}
    return CUTS[cut](net, capacity, round, generator, scores)


@every_cut
@every_net
def test_choices_are_ascending_and_of_the_right_size(name, cut):
    sizes = network(name).units.sizes
    assert sizes
    for capacity in CAPACITIES:
        for round in (0, 1, 7, 1000):
            where = chosen(name, cut, capacity, round)
            assert list(where) == list(sizes), "one choice a group, all groups"
            for group, kept in where.items():
                m = sizes[group]
                k = m if capacity == 1 else min(max(1, m - 1), ceil(capacity * m))
                assert kept.shape == (k,)
                assert kept.tolist() == sorted(set(kept.tolist()))
                assert kept[0] >= 0
                assert kept[-1] < m


@every_cut
@every_net
def test_full_capacity_takes_the_model_as_it_is(name, cut):
    net, tensors = network(name), tensors_of(name)
    taken = net.units.take(tensors, chosen(name, cut, 1.0, round=5))
    assert list(taken) == list(tensors)
    assert all(taken[key] is tensors[key] for key in taken)


@every_cut
@pytest.mark.parametrize("name", NORM_FREE)
def test_sub_model_computes_what_the_model_does_without_the_other_units(name, cut):
    """Networks of the registry; those of tests/units are checked there."""
    if name in LARGE and cut in ("scored", "warm"):
        return  # slow, and no other than random for the network
    net, tensors, x = network(name), tensors_of(name), images()
    zero = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    for capacity, round in ((0.5, 3),) if name in LARGE else ((0.99, 1), (0.5, 3), (0.0625, 2)):
        where = chosen(name, cut, capacity, round)
        small = net.units.take(tensors, where)
        masked = net.units.place(small, where, zero)
        with torch.no_grad():
            part = net.bound(small, training=False)(x).clone()
            full = net.bound(masked, training=False)(x)
        torch.testing.assert_close(part, full, rtol=1e-4, atol=1e-5)


@every_cut
@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_one_choice_a_residual_stream(name, cut):
    net = network(name)
    marked = {key: _marks(shape) for key, shape in net.shapes().items() if key.endswith("weight") and len(shape) > 1}
    taken = net.units.take(marked, chosen(name, cut, 0.5, round=3))
    rows = {key: (tensor.flatten(1)[:, 0] // 1000).tolist() for key, tensor in taken.items()}
    columns = {key: (tensor.flatten(2)[0, :, 0] % 1000).tolist() for key, tensor in taken.items() if tensor.ndim == 4}
    depths = (2, 2, 2, 2) if name == "resnet18" else (3, 4, 6, 3)
    stream = rows["stem.0.weight"]
    for stage, depth in enumerate(depths):
        for block in range(depth):
            path = f"stages.{stage}.{block}"
            assert columns[f"{path}.body.0.weight"] == stream
            assert columns[f"{path}.body.3.weight"] == rows[f"{path}.body.0.weight"]
            if f"{path}.shortcut.0.weight" in rows:
                assert columns[f"{path}.shortcut.0.weight"] == stream
                assert rows[f"{path}.shortcut.0.weight"] == rows[f"{path}.body.3.weight"]
            else:
                assert rows[f"{path}.body.3.weight"] == stream
            stream = rows[f"{path}.body.3.weight"]
    assert (taken["classifier.1.weight"][0] % 1000).tolist() == stream
    assert len(taken["classifier.1.weight"]) == CLASSES


def _marks(shape):
    """Every element says its row (thousands) and its column."""
    rows, columns = torch.arange(shape[0]) * 1000, torch.arange(shape[1])
    return (rows[:, None] + columns).view(*shape[:2], *[1] * (len(shape) - 2)).expand(shape).contiguous()


@every_cut
@pytest.mark.parametrize("name", [name for name in NETS if name not in LARGE])
def test_counts_of_a_merge_are_the_sizes_of_the_sub_models(name, cut):
    net, tensors = network(name), tensors_of(name)
    server = Server(0, tensors, net)
    plain, by_class = Mean(weights="equal").begin(server), Mean(weights="equal", by_class=True).begin(server)
    sizes, shapes = 0, []
    classes = [torch.tensor([0, 3]), torch.tensor([3]), torch.tensor([1, 3, 8])]
    for number, capacity in enumerate((1.0, 0.5, 0.3)):
        where = chosen(name, cut, capacity, 4, seed=number)
        small = {key: torch.full_like(tensor, 7) for key, tensor in net.units.take(tensors, where).items()}
        sizes += sum(tensor.numel() for tensor in small.values())
        plain.add(Report(small, where=where))
        by_class.add(Report(small, where=where, classes=classes[number]))
        shapes.append({key: tensor.shape for key, tensor in small.items()})
    counted = {key: plain.count(key).expand(tensor.shape) for key, tensor in tensors.items()}
    assert sum(int(count.sum()) for count in counted.values()) == sizes
    for key in net.units.output:
        rows = [
            sum(shape[key][1:].numel() for shape, held in zip(shapes, classes, strict=True) if row in held)
            for row in range(CLASSES)
        ]
        assert by_class.count(key).reshape(CLASSES, -1).sum(1).tolist() == rows
    merged, split = plain.result(), by_class.result()
    for key, old in tensors.items():
        touched = counted[key] > 0
        assert torch.equal(merged[key][~touched], old[~touched])
        assert (merged[key][touched] == 7).all()
        if key in net.units.output:
            unheld = [row for row in range(CLASSES) if row not in (0, 1, 3, 8)]
            assert torch.equal(split[key][unheld], old[unheld]), "a class that nobody holds keeps its row"
        else:
            assert torch.equal(split[key], merged[key])


def test_whole_cuts_nothing():
    assert Whole()(network("mlp"), 0.1, 0, torch.Generator()) is None


@pytest.mark.parametrize("capacity", [0.0, -0.5, 1.001, float("nan"), float("inf")])
@every_cut
def test_capacities_outside_zero_to_one_are_refused(cut, capacity):
    with pytest.raises(InputError, match=r"capacity must be in \(0, 1\]; got"):
        chosen("mlp", cut, capacity)


@pytest.mark.parametrize(("m", "k"), [(1, 1), (5, 1), (6, 4), (7, 7), (10, 3)])
def test_rolling_covers_every_unit_equally(m, k):
    windows = [Rolling().choose(m, k, round, torch.Generator()) for round in range(m)]
    assert torch.cat(windows).bincount(minlength=m).tolist() == [k] * m
    assert windows[0].tolist() == Prefix().choose(m, k, 0, torch.Generator()).tolist()
    for round, window in enumerate(windows):
        assert set(window.tolist()) == {(round + step) % m for step in range(k)}, "forward by one a round, wrapping"
    smaller = [Rolling().choose(m, max(1, k - 1), round, torch.Generator()) for round in range(m)]
    assert all(set(few.tolist()) <= set(many.tolist()) for few, many in zip(smaller, windows, strict=True))


def test_rolling_ignores_the_client_and_prefix_the_round():
    for capacity in (0.5, 0.3):
        one, two = (chosen("own net", "rolling", capacity, 3, seed=seed) for seed in (0, 1))
        assert all(torch.equal(one[group], two[group]) for group in one)
        first, later = (chosen("own net", "prefix", capacity, round) for round in (0, 9))
        assert all(torch.equal(first[group], later[group]) for group in first)


def test_random_differs_between_draws_and_is_uniform():
    drawn = [chosen("own net", "random", 0.5, round) for round in range(400)]
    assert any(not torch.equal(drawn[0]["mix"], other["mix"]) for other in drawn[1:5])
    again = chosen("own net", "random", 0.5, 0)
    assert torch.equal(drawn[0]["mix"], again["mix"])
    counts = torch.stack([torch.zeros(16).index_fill_(0, where["mix"], 1) for where in drawn]).sum(0)
    assert counts.sum() == 400 * 8
    # Draws without replacement vary less than independent ones, so this is a safe bound.
    assert ((counts - 200).square() / 100).sum() < chi2.ppf(1 - 1e-6, 16)


def test_cold_scores_take_the_best_and_ties_go_to_the_lower_number():
    cold, generator = Scored(), torch.Generator()
    assert cold.best(torch.tensor([1.0, 5.0, 3.0, 4.0]), 2, generator).tolist() == [1, 3]
    assert cold.best(torch.tensor([2.0, 1.0, 2.0, 2.0]), 2, generator).tolist() == [0, 2]
    assert cold.best(torch.zeros(300), 7, generator).tolist() == list(range(7))
    state = generator.get_state()
    cold.best(torch.rand(5), 2, generator)
    assert torch.equal(state, generator.get_state()), "nothing is drawn"


def test_scores_that_are_zero_but_for_rounding_are_equal():
    """The largest of all groups says what rounding can be: 1e-9 of it is, in float32, and 1e-4 is not."""
    net = network("lenet5")
    one, *others = net.units.sizes
    scores = {group: torch.linspace(1, 2, size) for group, size in net.units.sizes.items()}
    scores[one] = torch.linspace(1e-10, 1e-9, net.units.sizes[one])
    where = Scored()(net, 0.5, 0, torch.Generator(), scores)
    assert where[one].tolist() == list(range(len(where[one])))
    assert where[others[0]].tolist() == list(range(net.units.sizes[others[0]]))[-len(where[others[0]]) :]
    scores[one] = 1e5 * scores[one]
    where = Scored()(net, 0.5, 0, torch.Generator(), scores)
    assert where[one].tolist() == list(range(net.units.sizes[one]))[-len(where[one]) :]


def test_scores_below_zero_keep_their_order():
    """A score of one's own may be a loss turned round: its largest number is the one nearest to zero."""
    net = network("lenet5")
    scores = {group: torch.arange(-float(size), 0) for group, size in net.units.sizes.items()}
    for group, kept in Scored()(net, 0.5, 0, torch.Generator(), scores).items():
        assert kept.tolist() == list(range(net.units.sizes[group]))[-len(kept) :]
    one, *_ = scores
    scores[one] = 1e-9 * scores[one]
    where = Scored()(net, 0.5, 0, torch.Generator(), scores)
    assert where[one].tolist() == list(range(len(where[one]))), "zero but for rounding, beside the others"


def test_hot_scores_are_uniform():
    hot, generator = Scored(temperature=1e9), torch.Generator().manual_seed(3)
    score = torch.tensor([0.0, 1.0, 5.0, 100.0, 2.0])
    drawn = torch.stack([hot.best(score, 2, generator) for _ in range(6000)])
    pairs = Counter(tuple(pair) for pair in drawn.tolist())
    assert len(pairs) == 10
    assert chisquare(list(pairs.values())).pvalue > 1e-4


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gumbel_draws_are_sequential_draws_without_replacement(k):
    score, temperature = torch.tensor([0.1, 0.9, 1.6, -0.4], dtype=torch.float64), 0.7
    chance = (score / temperature).softmax(0).tolist()
    exact: Counter[tuple[int, ...]] = Counter()
    for order in permutations(range(4), k):
        left, probability = 1.0, 1.0
        for unit in order:
            probability *= chance[unit] / left
            left -= chance[unit]
        exact[tuple(sorted(order))] += probability  # type: ignore[assignment]
    assert sum(exact.values()) == pytest.approx(1)
    cut, generator, draws = Scored(temperature=temperature), torch.Generator().manual_seed(k), 10_000
    seen = Counter(tuple(cut.best(score, k, generator).tolist()) for _ in range(draws))
    assert seen.keys() <= exact.keys()
    assert chisquare([seen[choice] for choice in exact], [draws * exact[choice] for choice in exact]).pvalue > 1e-4
