"""Statistics against SciPy and against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fedloom.report.statistics import against, compare, estimate, holm, verdict
from fedloom.report.tables import interval

CLEAR = {
    "good": [0.90, 0.91, 0.92, 0.93, 0.91], "fair": [0.80, 0.82, 0.82, 0.83, 0.80], "bad": [0.5, 0.53, 0.5, 0.54, 0.52],
}  # fmt: skip
numbers = st.lists(st.floats(0, 1, width=32), min_size=3, max_size=12)


def seeds(values):
    return dict(enumerate(values))


def table(methods):
    return {name: seeds(values) for name, values in methods.items()}


def test_an_interval_by_hand():
    """1, 2, 3: deviation 1, and the 97.5 % point of t with two degrees of freedom is 4.302653."""
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.interval == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-6)
    assert estimate([5.0]).interval is None
    assert estimate([0.9, 0.5]).interval is None, "two seeds say nothing: it would be 0.7 -+ 2.5"


@given(numbers)
def test_what_is_shown_of_an_interval_is_possible(values):
    low, high = map(float, interval(estimate(values)).removesuffix(" (cut)").split(" to "))
    assert 0 <= low <= high <= 100


@given(numbers)
def test_intervals_are_scipys(values):
    ours = estimate(values)
    error = scipy.stats.sem(values)
    if error > 1e-9:
        theirs = scipy.stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert ours.interval == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_a_paired_test_by_hand():
    """Differences 1, 2, 3: t = 2 / (1 / sqrt 3) = 3.4641; with two degrees of freedom p = 1 - t / sqrt(2 + t^2)."""
    (found,) = against({"a": seeds([2.0, 4.0, 6.0]), "b": seeds([1.0, 2.0, 3.0])}, "b")
    t = 2 * 3**0.5
    assert found.p == pytest.approx(1 - t / (2 + t**2) ** 0.5, abs=1e-12)
    assert found.estimate.mean == 2
    assert found.corrected == found.p, "one test needs no correction"


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)), min_size=3, max_size=10))
def test_paired_tests_are_scipys(pairs):
    one, other = (list(values) for values in zip(*pairs, strict=True))
    differences = np.subtract(one, other)
    if differences.std() > 1e-6:
        (found,) = against({"one": seeds(one), "other": seeds(other)}, "other")
        assert found.p == pytest.approx(scipy.stats.ttest_rel(one, other).pvalue, rel=1e-6, abs=1e-12)


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04 -> never below the one before."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_step_by_step(ps):
    assert all(p <= corrected for p, corrected in zip(ps, holm(ps), strict=True))
    assert min(holm(ps)) == min(1.0, len(ps) * min(ps)), "Bonferroni for the smallest"
    order = np.argsort(ps, kind="stable")
    assert (np.diff(np.array(holm(ps))[order]) >= 0).all()
    # Holm rejects step by step: the smallest p at level / n, the next at level / (n - 1), until the first that fails.
    rejected, going = [], True
    for rank, index in enumerate(order):
        going = going and ps[index] * (len(ps) - rank) < 0.05
        rejected += [index] if going else []
    assert {int(index) for index in rejected} == {i for i, p in enumerate(holm(ps)) if p < 0.05}


def test_a_winner_that_the_statistics_carry():
    winner, sentence = verdict(table(CLEAR))
    assert winner == "good"
    assert "5 seeds" in sentence
    assert "3 pairs" in sentence
    worst = max(each.corrected for each in compare(table(CLEAR)) if "good" in (each.one, each.other))
    assert worst < 0.05
    for other in ("fair", "bad"):
        assert scipy.stats.ttest_rel(CLEAR["good"], CLEAR[other]).pvalue <= worst


def test_one_equal_rival_is_enough_for_no_winner():
    winner, sentence = verdict(table(CLEAR | {"as good": [0.91, 0.90, 0.93, 0.92, 0.90]}))
    assert winner is None
    assert "as good" in sentence
    assert "fair" not in sentence


def test_the_best_is_the_best_over_the_seeds_that_all_have():
    """Three kind seeds of its own lift a's mean to 0.75; over the three in common b is above it, by 0.1 on average."""
    a, b = {0: 0.50, 1: 0.51, 2: 0.52, 3: 0.99, 4: 0.99, 5: 0.99}, {0: 0.60, 1: 0.62, 2: 0.61}
    winner, sentence = verdict({"a": a, "b": b})
    assert winner == "b"
    assert sentence.startswith("b has the best accuracy")
    assert "over 3 seeds in common)" in sentence, "one pair needs no correction"
    p = scipy.stats.ttest_rel([0.60, 0.62, 0.61], [0.50, 0.51, 0.52]).pvalue
    assert f"p <= {p:.2g} (" in sentence


def test_every_pair_is_tested_over_the_same_seeds():
    """The third method has seeds 3 to 5: what the others have besides counts for nothing."""
    longer = {name: seeds([0.0, 1.0, 0.5, *values]) for name, values in CLEAR.items() if name != "bad"}
    late = {"bad": {seed + 3: value for seed, value in enumerate(CLEAR["bad"])}}
    assert verdict(longer | late) == verdict(table(CLEAR))


@pytest.mark.parametrize("apart", [1, 2, 3])
def test_too_few_seeds_in_common_are_not_tested(apart):
    winner, sentence = verdict({"a": {0: 0.9, 1: 0.91, 2: 0.92}, "b": {apart + n: 0.1 for n in range(3)}})
    assert winner is None
    assert f"{3 - apart} seed(s) in common" in sentence


@pytest.mark.parametrize("seed", range(20))
def test_methods_that_differ_by_luck_have_no_winner(seed):
    """Twenty fair coins: at level 0.05 over all pairs a winner by luck is rare, and it is the same every time."""
    drawn = np.random.default_rng(seed).normal(0.9, 0.02, (4, 3))
    assert verdict(table({str(row): list(values) for row, values in enumerate(drawn)}))[0] is None


@pytest.mark.parametrize("count", [1, 2])
def test_few_seeds_carry_nothing(count):
    winner, sentence = verdict(table({"a": [0.9, 0.91][:count], "b": [0.1, 0.1][:count]}))
    assert winner is None
    assert f"{count} seed(s)" in sentence
    assert all(each.p is None for each in compare(table({"a": [0.9, 0.91][:count], "b": [0.1, 0.1][:count]})))


def test_equal_differences_are_not_infinite_evidence():
    """Three times exactly 0.125: SciPy says p = 0, which three coarse numbers cannot be worth."""
    (found,) = against({"a": seeds([0.625, 0.75, 0.875]), "b": seeds([0.5, 0.625, 0.75])}, "b")
    assert found.p is None
    assert not found.carried
    (same,) = against({"a": seeds([0.5, 0.6, 0.7]), "b": seeds([0.5, 0.6, 0.7])}, "b")
    assert same.p == 1.0


def test_only_common_seeds_are_paired():
    (found,) = against({"a": {0: 2.0, 1: 4.0, 2: 6.0, 7: 99.0}, "b": {2: 3.0, 1: 2.0, 0: 1.0, 5: -9.0}}, "b")
    assert found.estimate.seeds == 3
    assert found.estimate.mean == 2
    assert against({"a": {0: 1.0}, "b": {1: 1.0}}, "b") == []
