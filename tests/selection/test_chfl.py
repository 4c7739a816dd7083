"""ChFL by hand: indicators, quality, chances and the mixture."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from fedloom.policies.chfl import ChFL, quality, scaled
from fedloom.policies.select import Uniform
from tests.selection.fleets import NAN, anyone, choices, fleet_of, near

# U = |B| sqrt(mean squared loss) = 10 * 2, 20 * 1.5, 40 * 0.25, 10 * 4 = 20, 30, 10, 40.
SIZES, SQUARED, SECONDS = [10, 20, 40, 10], [4.0, 2.25, 0.0625, 16.0], [2.0, 5.0, 3.0, 10.0]
LOSS = np.array([1 / 3, 2 / 3, 0.0, 1.0])
TIME = np.array([0.0, 3 / 8, 1 / 8, 1.0])


def known(**more):
    return fleet_of(SIZES, squared_loss=SQUARED, seconds=SECONDS, **more)


def test_scores_by_hand():
    assert ChFL(indicators=("loss",)).score(known()) == pytest.approx(LOSS)
    assert ChFL(indicators=("time",)).score(known()) == pytest.approx(1 - TIME)
    assert ChFL().score(known()) == pytest.approx(LOSS + LOSS * (1 - TIME))
    assert ChFL(time_sense="as_printed").score(known()) == pytest.approx(LOSS + LOSS * TIME)
    assert ChFL(indicators=("time", "loss")).score(known()) == pytest.approx((1 - TIME) * (1 + LOSS))


def test_more_indicators_weigh_less_and_less():
    one, two, three = np.array([0.5]), np.array([0.4]), np.array([0.8])
    assert quality([one, two, three]) == pytest.approx(0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.8)
    assert quality([np.zeros(1), np.ones(1), np.ones(1)]) == 0, "what the first indicator denies no other gives back"
    sizes = np.array([0, 1 / 3, 1, 0])
    found = ChFL(indicators=("loss", "time", "samples")).score(known())
    assert found == pytest.approx(LOSS * (1 + (1 - TIME) * (1 + sizes)))


def test_missing_and_equal_indicators():
    assert scaled(np.array([3.0, 3.0, NAN])).tolist() == [0.0, 0.0, 1.0]
    assert scaled(np.full(3, NAN)).tolist() == [1.0, 1.0, 1.0]
    assert scaled(-np.array([1.0, NAN, 3.0])).tolist() == [1.0, 1.0, 0.0]
    fleet = fleet_of([10, 10, 10], squared_loss=[4.0, NAN, 1.0], seconds=[1.0, 3.0, 2.0])
    assert ChFL().score(fleet).tolist() == [2.0, 1.0, 0.0], "late and never heard: high loss assumed, slow known"


def test_waiting_counts_the_rounds_since_a_client_was_asked():
    fleet = fleet_of([10, 10, 10], round=8, asked=[7, 3, -1])
    assert ChFL(indicators=("waiting",)).score(fleet) == pytest.approx([0, 0.5, 1])


def test_chances_of_one_are_a_softmax():
    """exp(F) = exp(7/12 ... ) / sum, for the only client of a round."""
    fleet, draws = known(), 1500
    score = ChFL().score(fleet)
    for eta in (1.0, 3.0):
        chances = np.exp(eta * score) / np.exp(eta * score).sum()
        counts = choices(ChFL(fraction=0.25, scored_share=1.0, eta=eta), fleet, draws)
        assert sum(counts.values()) == draws
        assert all(near(counts[client], chances[client], draws) for client in range(4)), (counts, chances)


def test_chances_of_two_are_drawn_one_after_the_other():
    fleet, draws = known(), 1500
    weights = np.exp(2 * ChFL().score(fleet))
    chances = np.zeros(4)
    for one, two in permutations(range(4), 2):
        chance = weights[one] / weights.sum() * weights[two] / (weights.sum() - weights[one])
        chances[[one, two]] += chance
    counts = choices(ChFL(fraction=0.5, scored_share=1.0, eta=2.0), fleet, draws)
    assert all(near(counts[client], chances[client], draws) for client in range(4)), (counts, chances)


def test_mixture_by_hand():
    """Of two, one by quality and one of the other three by chance."""
    fleet, draws = known(), 1500
    weights = np.exp(2 * ChFL().score(fleet))
    first = weights / weights.sum()
    chances = first + (1 - first) / 3
    counts = choices(ChFL(fraction=0.5, scored_share=0.5, eta=2.0), fleet, draws)
    assert all(near(counts[client], chances[client], draws) for client in range(4)), (counts, chances)


def test_a_share_that_is_not_whole_is_right_on_average():
    """k = 1 and a share of 0.4: two rounds of five by quality."""
    fleet, draws = known(), 2000
    best = 0.4 * np.array([0, 0, 0, 1.0]) + 0.6 / 4
    counts = choices(ChFL(fraction=0.25, scored_share=0.4, eta=1e6, indicators=("loss",)), fleet, draws)
    assert all(near(counts[client], best[client], draws) for client in range(4)), (counts, best)


def test_a_share_of_zero_is_uniform_selection():
    for seed in range(50):
        fleet = known(seed=seed)
        chosen = ChFL(fraction=0.5, scored_share=0.0)(fleet, anyone(fleet))
        assert chosen.tolist() == Uniform(0.5)(fleet, anyone(fleet)).tolist()


def test_eta_of_zero_is_uniform_in_distribution():
    counts = choices(ChFL(fraction=0.5, scored_share=1.0, eta=0.0), known(), 1500)
    assert all(near(count, 0.5, 1500) for count in counts.values())


def test_the_never_seen_are_explored():
    """They count as the best there is; with a sharp eta all of them come before anybody else."""
    fleet = fleet_of([10] * 6, squared_loss=[1.0, NAN, 4.0, NAN, 9.0, NAN], seconds=[1.0, NAN, 2.0, NAN, 3.0, NAN])
    chosen = ChFL(fraction=0.5, scored_share=1.0, eta=1e6)(fleet, anyone(fleet))
    assert chosen.tolist() == [1, 3, 5]
