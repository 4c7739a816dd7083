"""Power-of-Choice, Oort, TiFL, by data size, in turn: by hand; and what every rule must do."""

from __future__ import annotations

from time import process_time
from types import SimpleNamespace

import numpy as np
import pytest

from fedloom.bench.select import fleet_of as many
from fedloom.policies.oort import Oort
from fedloom.policies.powd import PowerOfChoice
from fedloom.policies.select import BySize, RoundRobin, drawn
from fedloom.policies.tifl import TiFL
from fedloom.registry import find
from fedloom.types import Server, Train
from tests.selection.fleets import NAN, RULES, anyone, choices, fleet_of, near

every_rule = pytest.mark.parametrize("name", RULES)


def rule_of(name, fraction):
    return find("select", name)(fraction=fraction, **RULES[name])


def some(clients=20, missing=0.3, equal=False, seed=0):
    """Random columns, some of them missing."""
    random = np.random.default_rng(seed)
    columns = {name: np.ones(clients) if equal else random.random(clients) + 0.1 for name in
               ("squared_loss", "loss", "seconds")}  # fmt: skip
    unseen = random.random(clients) < missing
    for values in columns.values():
        values[unseen] = NAN
    return fleet_of(random.integers(1, 100, clients), **columns)


@every_rule
@pytest.mark.parametrize(("fraction", "count"), [(0.05, 1), (0.25, 5), (1.0, 20), (0.001, 1)])
@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("equal", [False, True])
def test_exactly_k_distinct_clients_in_order(name, fraction, count, missing, equal):
    for seed in range(5):
        fleet = some(missing=missing, equal=equal, seed=seed)
        chosen = rule_of(name, fraction)(fleet, anyone(fleet))
        assert len(chosen) == count
        assert (np.diff(chosen) > 0).all()
        assert set(chosen.tolist()) <= set(range(20))


@every_rule
def test_only_those_who_are_there(name):
    fleet = some()
    fleet.available = np.array([2, 3, 5, 7, 11])
    for seed in range(10):
        fleet.seed = seed
        assert set(rule_of(name, 0.2)(fleet, anyone(fleet)).tolist()) < set(fleet.available.tolist())
    assert rule_of(name, 0.5)(fleet, anyone(fleet)).tolist() == fleet.available.tolist(), "fewer than wanted: all"


@every_rule
def test_one_client_alone(name):
    fleet = fleet_of([3])
    assert rule_of(name, 0.5)(fleet, anyone(fleet)).tolist() == [0]


@every_rule
def test_the_same_round_draws_the_same(name):
    one, two = some(), some()
    before = {key: values.copy() for key, values in one.columns.items()}
    assert rule_of(name, 0.25)(one, anyone(one)).tolist() == rule_of(name, 0.25)(two, anyone(two)).tolist()
    assert all(np.array_equal(values, before[key], equal_nan=True) for key, values in one.columns.items())


@every_rule
def test_everybody_is_explored(name):
    """Twenty clients, two a round, each told apart only by what was learned of it: nobody is left out for ever."""
    fleet, server, seen = fleet_of([10] * 20, round=0), anyone(None), set()
    for round in range(120):
        fleet.begin(round, Train())
        for client in rule_of(name, 0.1)(fleet, server).tolist():
            seen.add(client)
            fleet.columns["asked"][client] = fleet.columns["round"][client] = round
            fleet.columns["loss"][client] = 1 / (1 + round)
            fleet.columns["squared_loss"][client], fleet.columns["seconds"][client] = 1 / (1 + round), 1.0 + client
    assert seen == set(range(20))


@every_rule
def test_a_thousand_of_a_million_in_a_fifth_of_a_second(name):
    fleet = many(1_000_000, 0.0 if name == "tifl" else 1 / 3)  # while somebody is unseen, TiFL draws no tiers
    spent = []
    for _ in range(3):
        begin = process_time()  # of this process: others may be busy
        chosen = rule_of(name, 0.001)(fleet, anyone(fleet))
        spent.append(process_time() - begin)
    assert len(np.unique(chosen)) == 1000
    assert min(spent) < 0.2, spent


def test_a_draw_with_an_impossible_client():
    random = np.random.default_rng(0)
    logits = np.array([0.0, -np.inf, 0.0])
    assert all(set(drawn(random, np.arange(3), 2, logits).tolist()) == {0, 2} for _ in range(50))
    assert drawn(random, np.arange(3), 0, logits).tolist() == []


def test_by_size_in_proportion_to_the_samples():
    counts = choices(BySize(0.25), fleet_of([10, 20, 30, 40]), 1500)
    assert all(near(counts[client], (client + 1) / 10, 1500) for client in range(4))


def test_round_robin_goes_round():
    fleet, rule, order = fleet_of([1] * 5, round=0), RoundRobin(0.4), []
    for round in range(5):
        fleet.begin(round, Train())
        chosen = rule(fleet, anyone(fleet))
        fleet.columns["asked"][chosen] = round
        order.append(chosen.tolist())
    assert order == [[0, 1], [2, 3], [0, 4], [1, 2], [0, 3]]


# Power-of-Choice


def test_powd_of_all_candidates_takes_the_largest_losses():
    fleet = fleet_of([5, 50, 5, 50], loss=[3.0, 1.0, 2.0, 4.0])
    for seed in range(20):
        fleet.seed = seed
        assert PowerOfChoice(0.5, candidates=2.0, ask=False)(fleet, anyone(fleet)).tolist() == [0, 3]


def test_powd_of_as_many_candidates_as_clients_goes_by_data_alone():
    fleet = fleet_of([10, 20, 30, 40], loss=[9.0, 1.0, 2.0, 3.0])
    counts = choices(PowerOfChoice(0.25, candidates=1.0, ask=False), fleet, 1500)
    assert all(near(counts[client], (client + 1) / 10, 1500) for client in range(4))


def test_powd_of_two_candidates_by_hand():
    """Of three equal clients two are candidates; the one with the larger loss trains."""
    fleet = fleet_of([1, 1, 1], loss=[1.0, 2.0, 3.0])
    counts = choices(PowerOfChoice(0.34, candidates=2.0, ask=False), fleet, 1500)
    assert counts[0] == 0
    assert near(counts[1], 1 / 3, 1500)
    assert near(counts[2], 2 / 3, 1500)


def test_powd_takes_unknown_losses_for_infinite():
    fleet = fleet_of([1, 1, 1], loss=[1.0, NAN, 3.0])
    assert PowerOfChoice(0.34, candidates=3.0, ask=False)(fleet, anyone(fleet)).tolist() == [1]


def test_powd_asks_its_candidates_and_nobody_else(monkeypatch):
    fleet = fleet_of([1] * 6, loss=[NAN] * 6)
    asked = []

    def ask(question, tasks, form):
        assert form.numbers.keys() == {"loss"}
        for task in tasks:
            asked.append((question, task.client, dict(task.numbers)))
            if task.client != 3:
                yield SimpleNamespace(client=task.client, numbers={"loss": float(task.client)})

    monkeypatch.setattr(fleet, "ask", ask)
    chosen = PowerOfChoice(0.34, candidates=2.0, samples=8)(fleet, Server(0, {}, None)).tolist()
    candidates = [client for _, client, _ in asked]
    assert len(candidates) == 4
    assert candidates == sorted(candidates)
    assert {(question, numbers["samples"]) for question, _, numbers in asked} == {("loss", 8.0)}
    assert chosen == sorted(client for client in candidates if client != 3)[-2:], "who does not answer comes last"


# Oort


def oort_fleet(**more):
    # U = 10, 20, 30, 40, 50; the times' median is 3.
    return fleet_of([10] * 5, squared_loss=[1, 4, 9, 16, 25], seconds=[1.0, 2.0, 3.0, 6.0, 30.0], round=4, **more)


def test_oort_scores_by_hand():
    fleet = oort_fleet(asked=[3, 0, 1, 3, 3])
    allowance = np.sqrt(0.1 * np.log(5) / np.array([4, 1, 2, 4, 4]))
    gain = np.array([0, 0.25, 0.5, 0.75, 1.0])
    slow = np.array([1, 1, 1, (3 / 6) ** 2, (3 / 30) ** 2])
    assert Oort(clip=1.0).score(fleet, 50.0) == pytest.approx((gain + allowance) * slow)
    assert Oort(clip=1.0).score(fleet, 100.0) == pytest.approx(gain + allowance), "any time is fast enough"
    assert Oort(clip=1.0, penalty=0.0).score(fleet, 50.0) == pytest.approx(gain + allowance)
    capped = np.minimum((np.array([10, 20, 30, 40, 50]) - 10) / 20, 1)
    assert Oort(clip=0.5).score(fleet, 100.0) == pytest.approx(capped + allowance), "the median caps"


def test_oort_scores_grow_with_loss_size_and_absence():
    score = Oort(clip=1.0).score(oort_fleet(asked=[3] * 5), 100.0)
    assert (np.diff(score) > 0).all()
    fleet = fleet_of([10, 20, 30], squared_loss=[1.0] * 3, seconds=[1.0] * 3)
    assert (np.diff(Oort(clip=1.0).score(fleet, 100.0)) > 0).all()
    fleet = fleet_of([10] * 3, squared_loss=[1.0] * 3, seconds=[1.0] * 3, asked=[4, 2, 0])
    assert (np.diff(Oort().score(fleet, 100.0)) > 0).all()


def half_tried(round, clients=1000):
    """The first half of the clients are known, all alike."""
    seconds = np.where(np.arange(clients) < clients // 2, 1.0, NAN)
    return fleet_of([10] * clients, round=round, squared_loss=seconds, seconds=seconds)


def test_oort_explores_less_and_less():
    """Of 10, 10 epsilon untried, here whole numbers: 4 in the second round, then 2."""
    rule = Oort(0.01, exploration=0.8, exploration_decay=0.5, exploration_least=0.2)
    found = []
    for round in (1, 2, 4, 20):
        fleet = half_tried(round)
        found.append({sum(client >= 500 for client in rule(fleet, anyone(fleet)).tolist()) for fleet.seed in range(20)})
    assert found == [{4}, {2}, {2}, {2}]


def test_oort_explores_by_chance_what_is_not_whole():
    """Of 4, 0.8 untried: one in four rounds of five. Of 9, 1.8."""
    for size, wanted in ((4, 0.8), (9, 1.8)):
        rule, fleet = Oort(size / 100, exploration=0.2, exploration_least=0.2), half_tried(3, 100)
        found = [sum(client >= 50 for client in rule(fleet, anyone(fleet)).tolist()) for fleet.seed in range(500)]
        assert set(found) == {int(wanted), int(wanted) + 1}
        assert near(sum(found) - 500 * int(wanted), wanted % 1, 500)


def test_oort_rounds_by_a_generator_of_its_own(monkeypatch):
    """Where the number is whole, who trains is what it was without the draw."""
    fleet = half_tried(3, 100)
    rule, drawn = Oort(0.1, exploration=0.2, exploration_least=0.2), fleet.generator
    chosen = rule(fleet, anyone(fleet)).tolist()
    monkeypatch.setattr(fleet, "generator", lambda purpose: drawn(purpose if purpose == "select" else "another"))
    assert rule(fleet, anyone(fleet)).tolist() == chosen


@pytest.mark.parametrize("size", [1, 4])
def test_oort_tries_everybody_in_a_small_cohort(size):
    """A fifth of the cohort is less than one client."""
    fleet, server, rule = fleet_of([10] * 20, round=0), anyone(None), Oort(size / 20, exploration=0.2)
    for round in range(200):
        fleet.begin(round, Train())
        chosen = rule(fleet, server)
        fleet.columns["asked"][chosen] = fleet.columns["round"][chosen] = round
        fleet.columns["squared_loss"][chosen] = fleet.columns["seconds"][chosen] = 1.0
    assert (fleet.columns["asked"] >= 0).all()


def test_oort_draws_by_score_among_those_near_the_last_place():
    """Scores 1, 1, 0.99, 0.5 and one place: the fourth does not reach 95 % of the first."""
    fleet, draws = fleet_of([10] * 4, squared_loss=[1.0] * 4, seconds=[1.0] * 4), 1500

    class Fixed(Oort):
        def score(self, fleet, percentile):
            return np.array([1.0, 1.0, 0.99, 0.5])

    counts = choices(Fixed(0.25, exploration=0.0, exploration_least=0.0), fleet, draws)
    assert counts[3] == 0
    assert all(near(counts[client], score / 2.99, draws) for client, score in enumerate([1.0, 1.0, 0.99]))


def test_oort_pacer_lets_slower_clients_in_when_utility_falls():
    rule, server = Oort(0.5, window=2, preferred=30.0, pace=5.0), anyone(None)
    seen = []
    for round, loss in enumerate([1.0, 4.0, 4.0, 1.0, 1.0, 9.0, 9.0]):
        fleet = fleet_of([10, 10], round=round, squared_loss=[loss] * 2, seconds=[1.0] * 2)
        fleet.columns["round"] = np.full(2, round - 1)
        rule(fleet, server)
        seen.append(server.memory["select"]["percentile"])
    # Sums of rounds 0..5 as known one round later: 40, 40 | 20, 20 | 60, 60.
    assert seen == [30, 30, 30, 30, 35, 35, 35]


def test_oort_knows_of_those_who_were_only_ever_late():
    fleet = fleet_of([10] * 3, squared_loss=[1.0, NAN, 9.0], seconds=[1.0, 8.0, 1.0], asked=[4, 4, 4])
    score = Oort(clip=1.0).score(fleet, 50.0)
    assert score[1] == pytest.approx((0.5 + np.sqrt(0.1 * np.log(6) / 5)) / 64), "mean utility, slow"


# TiFL


def tiered(**more):
    return fleet_of([10] * 10, seconds=np.arange(10, 0, -1.0), loss=np.linspace(0.1, 1.0, 10), **more)


def test_tifl_asks_the_unknown_first():
    fleet = fleet_of([10] * 6, seconds=[1.0, NAN, 2.0, NAN, 3.0, 4.0], loss=[1.0] * 6)
    chosen = TiFL(0.5)(fleet, anyone(fleet)).tolist()
    assert {1, 3} < set(chosen)
    assert len(chosen) == 3


def test_tifl_takes_clients_of_one_speed():
    fleet, tiers = tiered(), [{9, 8}, {7, 6}, {5, 4}, {3, 2}, {1, 0}]
    counts = [0] * 5
    for seed in range(2000):
        fleet.seed = seed
        counts[tiers.index(set(TiFL(0.2)(fleet, anyone(fleet)).tolist()))] += 1
    assert all(near(count, 0.2, 2000) for count in counts)


def test_tifl_chances_by_rank_once_a_tier_does_not_improve():
    """The slowest tier has the lowest losses: it becomes the least likely, the fastest the likeliest."""
    fleet, server = tiered(), anyone(None)
    server.memory["select"] = {"chances": [0.2] * 5, "spent": [10, 0, 0, 0, 0], "tier": 0, "merits": [0.0] * 5}
    TiFL(0.2, interval=10)(fleet, server)
    assert server.memory["select"]["chances"] == pytest.approx(np.array([5, 4, 3, 2, 1]) / 15)
    assert server.memory["select"]["merits"] == pytest.approx([-0.95, -0.75, -0.55, -0.35, -0.15])


def test_tifl_keeps_its_chances_while_the_tier_improves():
    fleet, server = tiered(), anyone(None)
    server.memory["select"] = {"chances": [0.2] * 5, "spent": [10, 0, 0, 0, 0], "tier": 0, "merits": [-2.0] * 5}
    TiFL(0.2, interval=10)(fleet, server)
    assert server.memory["select"]["chances"] == [0.2] * 5


def test_tifl_credits_run_out():
    fleet, server, used = tiered(), anyone(None), []
    for seed in range(10):
        fleet.seed = seed
        TiFL(0.2, credits=2)(fleet, server)
        used.append(server.memory["select"]["tier"])
    assert sorted(used) == sorted(list(range(5)) * 2)
    fleet.seed = 99
    assert len(TiFL(0.2, credits=2)(fleet, server)) == 2, "without credits any tier will do"


def test_tifl_fills_a_small_tier_with_its_neighbours():
    fleet, server = tiered(), anyone(None)
    server.memory["select"] = {"chances": [0, 0, 1.0, 0, 0], "spent": [0] * 5, "tier": 2}
    chosen = set(TiFL(0.4)(fleet, server).tolist())
    assert {5, 4} < chosen
    assert chosen <= {7, 6, 5, 4, 3, 2}
