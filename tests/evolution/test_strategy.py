"""The evolution strategy by hand, its safety, and beside the `cma` package on a quadratic."""

from __future__ import annotations

from math import exp, pi, sqrt

import cma
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.policies.strategy import THINNEST, Strategy, expected_length, power, safe

PLAIN = Strategy(first=0.5)
FADE = sqrt(1 - 0.7**2)  # weight of a new move on the path at rate 0.3
LENGTH = sqrt(pi / 2)  # E|N(0, I)| in two dimensions


def grown(sigma, path):
    return sigma * exp(0.3 * (np.linalg.norm(path) / LENGTH - 1))


def step(population, move, *, won=True, strategy=PLAIN, client=0):
    """One client tries its parent moved by `move` times its step size."""
    offspring = population["genes"][client] + population["sigma"][client] * np.asarray(move, float)
    return strategy.next(population, {client: (offspring, won)})


@pytest.mark.parametrize("told", [1e300, -5.0])
def test_genes_that_were_told_are_within_their_bounds(told):
    """A client may tell anything."""
    after = PLAIN.next(PLAIN.begin(np.ones((1, 2))), {0: (np.full(2, told), True)})
    assert after["genes"][0].tolist() == [min(max(told, PLAIN.least), 1.0)] * 2
    assert all(np.isfinite(column).all() for column in after.values())


def test_two_winning_steps_by_hand():
    one = step(PLAIN.begin(np.ones((1, 2))), [1, 0])
    assert one["genes"][0] == pytest.approx([0.6, 0.5])
    assert one["path"][0] == pytest.approx([FADE, 0])
    assert one["sigma"][0] == pytest.approx(grown(0.1, FADE)) == pytest.approx(0.08789, abs=1e-5)
    # 0.8 I + 0.2 e1 e1', scaled to trace 2
    assert one["covariance"] == pytest.approx(np.diag([1 / 0.9, 0.8 / 0.9]))
    two = step(one, [1, 2])
    path = 0.7 * one["path"][0] + FADE * np.array([sqrt(0.9), 2 * sqrt(0.9 / 0.8)])  # C^(-1/2) of round one
    assert two["path"][0] == pytest.approx(path)
    assert two["sigma"][0] == pytest.approx(grown(one["sigma"][0], path))
    mixed = 0.8 * one["covariance"] + 0.2 * np.array([[1, 2], [2, 4]])
    assert two["covariance"] == pytest.approx(mixed * 2 / np.trace(mixed))


def test_a_losing_step_by_hand():
    before = step(PLAIN.begin(np.ones((1, 2))), [1, 0])
    after = step(before, [3, -1], won=False)
    assert np.array_equal(after["genes"], before["genes"])
    assert np.array_equal(after["covariance"], before["covariance"])
    assert after["path"][0] == pytest.approx(0.7 * before["path"][0])
    assert after["sigma"][0] == pytest.approx(grown(before["sigma"][0], after["path"][0]))


def test_covariance_is_the_mean_over_those_who_won():
    start = PLAIN.begin(np.ones((4, 2)))
    moves = {0: ([1, 0], True), 1: ([0, 2], True), 2: ([5, 5], False)}
    tried = {k: (start["genes"][k] + 0.1 * np.array(move), won) for k, (move, won) in moves.items()}
    mixed = 0.8 * np.eye(2) + 0.2 * np.diag([1, 4]) / 2
    assert PLAIN.next(start, tried)["covariance"] == pytest.approx(mixed * 2 / np.trace(mixed))


def test_equation_7_remembers_how_survivors_arose():
    literal = Strategy(first=0.5, covariance="survivors")
    start = literal.begin(np.ones((3, 2)))
    one = literal.next(start, {0: (start["genes"][0] + [0.1, 0], True), 1: (start["genes"][1] + [0, 0.3], True)})
    assert one["covariance"] == pytest.approx(np.diag([1, 9]) / 5)
    # Client 0 loses now: it is still there by its old move; client 2 has never moved.
    two = literal.next(one, {0: (one["genes"][0] + 0.01, False), 2: (one["genes"][2], False)})
    assert two["covariance"] == pytest.approx(one["covariance"])


def test_identity_never_learns():
    fixed = Strategy(first=0.5, covariance="identity")
    assert np.array_equal(step(fixed.begin(np.ones((1, 3))), [1, 2, 3], strategy=fixed)["covariance"], np.eye(3))


def test_sigma_grows_on_success_in_one_direction_and_shrinks_on_failure():
    strategy = Strategy(first=0.1, sigma=0.01, bounds=(1e-6, 10.0), covariance="identity")
    population = strategy.begin(np.full((1, 2), 1e6))
    sizes = []
    for _ in range(6):
        population = step(population, np.full(2, LENGTH / sqrt(2)), strategy=strategy)  # of expected length
        sizes.append(float(population["sigma"][0]))
    assert sizes[1:] == sorted(sizes[1:])
    assert sizes[-1] > 1.5 * sizes[0]
    for _ in range(6):
        population = step(population, [1, 1], won=False, strategy=strategy)
    assert population["sigma"][0] < sizes[-1] / 1.5
    to_and_fro = strategy.begin(np.full((1, 2), 1e6))
    for number in range(6):
        to_and_fro = step(to_and_fro, [(-1) ** number, 0], strategy=strategy)
    assert to_and_fro["sigma"][0] < sizes[-1] / 2


def test_only_those_who_tried_change():
    start = PLAIN.begin(np.ones((3, 2)))
    after = step(start, [1, 1], client=1)
    for name in ("genes", "sigma", "path"):
        assert np.array_equal(after[name][[0, 2]], start[name][[0, 2]])
    assert start["genes"][1] == pytest.approx([0.5, 0.5])  # the old population is as it was


def test_sigma_zero_is_no_evolution():
    still = Strategy(first=1.0, sigma=0.0)
    start = still.begin(np.ones((2, 3)))
    offspring = still.offspring(start, 0, np.random.default_rng(0))
    assert np.array_equal(offspring, np.ones(3))
    after = still.next(start, {0: (offspring, True), 1: (offspring, False)})
    for name in start.keys() - {"tried"}:
        assert np.array_equal(after[name], start[name]), name
    assert after["tried"].tolist() == [1, 1]


def test_offspring_are_drawn_from_the_covariance_and_clipped():
    wide = Strategy(first=0.5, least=-1e9)
    population = {**wide.begin(np.full((1, 2), 1e9)), "covariance": np.array([[1.5, 0.7], [0.7, 0.5]])}
    generator = np.random.default_rng(5)
    drawn = np.array([wide.offspring(population, 0, generator) for _ in range(20_000)])
    assert np.cov(drawn.T) / 0.1**2 == pytest.approx(population["covariance"], abs=0.04)
    tight = PLAIN.begin(np.array([[0.55, 1.0]]))
    drawn = np.array([PLAIN.offspring({**tight, "sigma": np.array([3.0])}, 0, generator) for _ in range(50)])
    assert drawn.min() == PLAIN.least
    assert drawn[:, 0].max() == 0.55
    assert drawn[:, 1].max() == 1.0


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_covariance_stays_positive_definite(moves):
    population = PLAIN.begin(np.full((1, 3), 0.9))
    for move in moves * 4:
        population = step(population, move)
        values = np.linalg.eigvalsh(population["covariance"])
        assert values.min() > THINNEST / 2
        assert np.trace(population["covariance"]) == pytest.approx(3)
        assert PLAIN.bounds[0] <= population["sigma"][0] <= PLAIN.bounds[1]
        assert np.isfinite(population["path"]).all()


def test_safe_of_nothing_is_the_identity():
    assert np.array_equal(safe(np.zeros((3, 3))), np.eye(3))
    line = safe(np.outer([1.0, 1.0], [1.0, 1.0]))
    assert power(line, -0.5) @ line @ power(line, -0.5) == pytest.approx(np.eye(2))


HESSIAN = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0]
HESSIAN = HESSIAN @ np.diag(100 ** np.linspace(0, 1, 6)) @ HESSIAN.T


def quadratic(x):
    return float((x - 0.5) @ HESSIAN @ (x - 0.5))


def likeness(one, two):
    return float((one * two).sum() / np.linalg.norm(one) / np.linalg.norm(two))


def evolved(covariance, seed, rounds=200, clients=20):
    """The strategy on a quadratic that all clients share; gives the median value and the covariance."""
    strategy = Strategy(first=0.6, covariance=covariance)
    population = strategy.begin(np.ones((clients, 6)))
    for number in range(rounds):
        tried = {}
        for client in range(clients):
            x = strategy.offspring(population, client, np.random.default_rng([seed, number, client]))
            tried[client] = x, quadratic(x) < quadratic(population["genes"][client])
        population = strategy.next(population, tried)
    return np.median([quadratic(x) for x in population["genes"]]), population["covariance"]


def test_beside_cma_on_a_quadratic():
    """Both descend, and both learn a covariance that looks like the inverse Hessian; the identity does not.

    CMA-ES goes on to 1e-14; here the step size ends at its floor of 0.01, and with it the descent.
    """
    first, inverse = quadratic(np.full(6, 0.6)), np.linalg.inv(HESSIAN)
    assert likeness(np.eye(6), inverse) < 0.65
    for seed in range(2):
        theirs = cma.CMAEvolutionStrategy(
            np.full(6, 0.6), 0.1, {"seed": seed + 1, "verbose": -9, "popsize": 20, "bounds": [0.05, 1], "maxiter": 60}
        )
        theirs.optimize(quadratic)
        value, covariance = evolved("winners", seed)
        assert expected_length(6) == pytest.approx(theirs.const.chiN, rel=1e-3)
        assert theirs.result.fbest < first / 100
        assert value < first / 20
        assert likeness(theirs.C, inverse) > 0.85
        assert likeness(covariance, inverse) > 0.85
