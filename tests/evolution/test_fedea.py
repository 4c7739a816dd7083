"""FedEA: NSGA-II against brute force, every individual a federation of its own, what is found as a model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import fedloom
from fedloom.encoding import dense
from fedloom.errors import InputError, RunError
from fedloom.methods.fedea import FedEA
from fedloom.models.resolve import build, initialise
from fedloom.policies import front
from fedloom.policies.front import children, nondominated, spread, survivors
from fedloom.runs.export import export
from fedloom.runs.study import resolve
from tests.methods.tiny import run, sections_of
from tests.submodels.federation import Federation

LENET = {
    "model": {"name": "lenet5_bn", "hidden": None},
    "engine": {"precision": "float32"},
    "data": {"validation": 0.2},
}


def dominates(one, two):
    return bool((one <= two).all() and (one < two).any())


def test_fronts_by_brute_force():
    goals = np.random.default_rng(0).integers(0, 6, (14, 2)).astype(float)
    first = [i for i in range(14) if not any(dominates(goals[j], goals[i]) for j in range(14))]
    assert nondominated(goals) == first
    kept = survivors(goals, len(first))
    assert sorted(map(tuple, goals[kept])) == sorted(map(tuple, goals[first]))
    # Nobody who stays is beaten by somebody who goes.
    for count in range(1, 14):
        kept = survivors(goals, count)
        assert len(kept) == count
        gone = set(range(14)) - set(kept)
        assert not any(dominates(goals[out], goals[stays]) for out in gone for stays in kept)


def test_crowding_keeps_the_ends_and_the_lonely():
    goals = np.array([[0.0, 10.0], [0.1, 9.9], [0.2, 9.8], [5.0, 5.0], [10.0, 0.0]])  # one front
    assert survivors(goals, 3) == [0, 3, 4]


def test_children_are_new_bounded_and_repeatable():
    generator = np.random.default_rng(3)
    parents, goals = generator.random((8, 5)), generator.random((8, 2))
    one, two = (children(parents, goals, 8, np.random.default_rng(1)) for _ in range(2))
    assert np.array_equal(one, two)
    assert one.shape == (8, 5)
    assert (one >= 0).all()
    assert (one <= 1).all()
    assert not any(np.array_equal(child, parent) for child in one for parent in parents)
    same = np.full((4, 3), 0.5)
    assert children(same, np.ones((4, 2)), 4, generator).shape == (4, 3)


def test_children_in_bits_by_hand():
    """Two parents, zeros and ones: but for flipped bits a child changes over from one to the other at one point."""
    zeros, ones = np.zeros(5), np.append(np.ones(4), 0.0)  # the last variable is real and the same in both
    parents = np.tile(np.stack([zeros, ones]), (10, 1))
    born = children(parents, np.ones((20, 2)), 400, np.random.default_rng(0), coded=4)
    assert (born[:, 4] >= 0).all()
    assert ((born[:, 4] > 0).mean()) == pytest.approx(front.CHANGED / 2, abs=0.04)  # half of the moves are down, to 0
    codes = 255 * born[:, :4]
    assert np.allclose(codes, codes.round(), rtol=0, atol=1e-9)
    bits = np.unpackbits(codes.round().astype(np.uint8), axis=1).astype(int)
    # The string that is nearest to 0..01..1 or 1..10..0, at any point, differs by the flipped bits alone.
    strings = np.array([[number >= point for number in range(32)] for point in range(33)]).astype(int)
    strings = np.concatenate([strings, 1 - strings])
    flips = np.abs(bits[:, None] - strings[None]).sum(2).min(1)
    assert 0.05 < flips.mean() / 32 < front.CHANGED + 0.01
    assert len({tuple(child) for child in born}) == 400


def test_no_child_is_a_copy_where_there_is_another():
    generator = np.random.default_rng(5)
    parents = generator.random((4, 2))
    for _ in range(20):
        born = children(parents, generator.random((4, 2)), 6, generator, coded=1)
        known = np.concatenate([np.stack([np.rint(255 * parents[:, 0]) / 255, parents[:, 1]], axis=1), born])
        assert len({tuple(each) for each in known}) == 10


def test_the_first_generation_leaves_nothing_untried():
    drawn = spread(8, 3, np.random.default_rng(0))
    assert drawn.shape == (8, 3)
    assert all(sorted((8 * column).astype(int)) == list(range(8)) for column in drawn.T)


def test_evolution_finds_the_front_of_a_simple_problem():
    """Goals x0 and 1 - x0, both worsened by what the other variables are away from 0.3."""

    def goals(x):
        away = np.abs(x[:, 1:] - 0.3).sum(axis=1)
        return np.stack([x[:, 0] + away, 1 - x[:, 0] + away], axis=1)

    found = {}
    for search in ("nsga2", "random"):
        generator = np.random.default_rng(0)
        x = generator.random((12, 4))
        for _ in range(25):
            new = children(x, goals(x), 12, generator) if search == "nsga2" else generator.random((12, 4))
            everyone = np.concatenate([x, new])
            x = everyone[survivors(goals(everyone), 12)]
        found[search] = float((goals(x).sum(axis=1) - 1).mean())
    assert found["nsga2"] < found["random"] / 3


def test_every_individual_is_fedavg_of_its_own_width():
    """The same as FedAvg on the narrow model, from the weights that the seed gives to that, at its own rate."""
    federation = Federation("fedea", **LENET, method={"population": 2, "rounds_each": 2})
    federation.round()
    method, seed = federation.method, federation.study.run.seed
    for number, individual in enumerate(federation.server.memory["offspring"]):
        where = method.where_of(federation.network, individual)
        outcomes = [o for o in federation.engine.outcomes if o.report.numbers["individual"] == number]
        tasks = [t for t in federation.engine.tasks if t.numbers["individual"] == number]
        assert len(outcomes) == len(tasks) == 3
        for task in tasks:
            assert task.train.lr == pytest.approx(0.1 * method.rate(individual))
            assert {n: t.shape for n, t in task.tensors["model"].items()} == federation.network.shapes(where)
            rates = tuple(method.rates(federation.network, individual).values())
            narrow = partial(build, "narrowed", channels=1, classes=10, size=8, of="lenet5_bn", rates=rates)
            for name, tensor in initialise(narrow, seed).state_dict().items():
                assert torch.equal(dense(task.tensors["model"][name]), tensor.to(federation.network.dtype)), name
        weight = sum(outcome.report.weight for outcome in outcomes)
        for name, tensor in individual["tensors"].items():
            mean = sum(o.report.weight * dense(o.report.tensors[name]).double() for o in outcomes) / weight
            assert torch.allclose(tensor.double(), mean if tensor.is_floating_point() else mean.round(), atol=1e-6), (
                name
            )


def test_a_servers_optimiser_remembers_each_individual_for_itself():
    """Two individuals end alike whichever of them comes first."""
    ends = []
    for order in (1, -1):
        federation = Federation(
            "fedea", **LENET, method={"population": 2, "rounds_each": 9}, merge={"name": "momentum"}
        )
        genes = np.random.default_rng(0).random((2, len(federation.network.units.sizes) + 1))[::order]
        fresh = federation.method._fresh(genes, federation.server, federation.fleet)
        federation.server.memory["offspring"] = fresh
        for _ in range(2):
            federation.round()
        ends.append([each["tensors"] for each in federation.server.memory["offspring"]][::order])
    for one, other in zip(*ends, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_generations():
    federation = Federation("fedea", **LENET, method={"population": 3, "rounds_each": 2})
    federation.round()
    assert federation.server.memory["judged"] == []
    federation.round()
    judged = federation.server.memory["judged"]
    assert len(judged) == 3
    units = federation.network.units
    for each in judged:
        kept = units.kept(federation.method.rates(federation.network, each))
        assert (
            each["parameters"]
            == units.num_parameters(kept)
            == sum(each["tensors"][name].numel() for name in units.parameters)
        )
        assert 0 <= each["error"] <= 1
    fresh = federation.server.memory["offspring"]
    assert not any(np.array_equal(one["genes"], two["genes"]) for one in fresh for two in judged)
    federation.round()
    federation.round()
    both = np.array([[each["error"], each["parameters"]] for each in federation.server.memory["judged"]])
    old = np.array([[each["error"], each["parameters"]] for each in judged])
    assert len(both) == 3
    assert not any(dominates(before, after) and not any((before == each).all() for each in both)
                   for before in old for after in both)  # fmt: skip
    best = federation.method.best(federation.server)
    assert best["error"] == both[:, 0].min()


def test_the_front_is_of_all_that_were_judged(monkeypatch):
    """Also of those for whom the population has no room."""
    judge, seen = FedEA._judged, []

    def recorded(*known):
        judged = judge(*known)
        seen.extend((each["error"], each["parameters"]) for each in judged)
        return judged

    monkeypatch.setattr(FedEA, "_judged", recorded)
    federation = Federation("fedea", **LENET, method={"population": 2, "rounds_each": 1})
    for _ in range(6):
        federation.round()
    front = federation.method.found(federation.server)["front"]
    assert len(seen) == 12
    assert len(front) > 2
    assert {(each["error"], each["parameters"]) for each in front} == {
        seen[number] for number in nondominated(np.array(seen))
    }


def test_what_is_found_is_a_model(tmp_path):
    method = {"population": 2, "rounds_each": 1}
    result = run("fedea", tmp_path, **LENET, method=method, run={"rounds": 2})
    found = result.summary["found"]
    assert found["front"] == sorted(found["front"], key=lambda each: each["parameters"])
    made = build("narrowed", channels=1, classes=10, size=8, of="lenet5_bn", rates=found["rates"])
    line = export(result.folder, tmp_path / "found.pt")
    again = eval(line, {"fedloom": fedloom})
    state = torch.load(tmp_path / "found.pt")
    for module in (made, again):
        module.load_state_dict(state)
    changes = {**LENET, "model": {"name": "narrowed", "hidden": None, "of": "lenet5_bn", "rates": found["rates"]}}
    followed = run("fedes", tmp_path, **changes, train={"lr": 0.1 * found["lr_factor"]})
    assert followed.summary["failures"] == 0


def test_narrowed_is_initialised_at_its_width():
    small = initialise(lambda: build("narrowed", channels=1, classes=10, size=8, of="cnn4", rates=[0.25]), 0)
    for name, tensor in small.named_parameters():
        if tensor.ndim > 1:
            bound = tensor[0].numel() ** -0.5  # PyTorch's uniform bound for this many inputs
            assert 0.5 * bound < tensor.abs().max() <= bound * 1.0001, name
    with pytest.raises(InputError, match=r"model.rates needs one share, or one for each of"):
        build("narrowed", channels=1, classes=10, size=8, of="lenet5", rates=[0.5, 0.5])


def test_a_rate_too_high_costs_an_individual_and_not_the_run():
    method = {"population": 4, "rounds_each": 2, "slowest": 1.0, "fastest": 1e8}
    federation = Federation("fedea", **LENET, method=method)
    federation.round()
    out = ["out" in each for each in federation.server.memory["offspring"]]
    assert any(out)
    assert not all(out)
    federation.round()
    worst = federation.network.units.num_parameters()
    for each in federation.server.memory["judged"]:
        assert (each["error"] == 1.0 and each["parameters"] == worst) == ("out" in each)
    assert "out" not in federation.method.best(federation.server)
    front = federation.method.found(federation.server)["front"]
    assert all(each["parameters"] < worst for each in front)


def test_where_all_rates_are_too_high_the_run_ends_with_a_sentence():
    method = {"population": 2, "rounds_each": 2, "slowest": 1e12, "fastest": 1e12}
    federation = Federation("fedea", **LENET, method=method)
    with pytest.raises(RunError, match=r"reported, the quorum is .*not finite"):
        federation.round()


def test_random_search_draws_anew():
    federation = Federation("fedea", **LENET, method={"population": 2, "rounds_each": 1, "search": "random"})
    federation.round()
    genes = [each["genes"] for each in federation.server.memory["offspring"]]
    expected = federation.fleet.generator("offspring").random((2, len(genes[0])))
    assert np.array_equal(np.stack(genes), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cut": {"name": "prefix"}}, "fedea chooses units by its own search"),
        ({"share": {"name": "fedbn"}}, "fedea judges whole models at the server"),
        ({"method": {"slowest": 2.0, "fastest": 1.0}}, "method.slowest of fedea must be at most method.fastest"),
        (
            {"start": {"name": "adaptive"}},
            "fedea trains every individual from its own first weights; leave [start] out",
        ),
    ],
)
def test_nonsense_is_refused(changes, said):
    with pytest.raises(InputError) as error:
        resolve(sections_of("fedea", **changes))
    assert said in str(error.value)


def test_without_pymoo_a_sentence_names_the_extra(monkeypatch):
    monkeypatch.setattr(front, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'fedloom\[search\]'"):
        resolve(sections_of("fedea"))


def test_all_individuals_of_a_round_are_judged_by_one_cohort(tmp_path):
    """A selection that remembers is asked once a round."""
    method = {"population": 3, "rounds_each": 1}
    select = {"name": "oort", "fraction": 0.5}
    result = run("fedea", tmp_path, **LENET, method=method, select=select, run={"rounds": 2}, fleet={"clients": 6})
    for number in range(2):
        asked = [each for each in result.rows("clients") if each["round"] == number]
        for job in ("work", "validate"):
            clients = [each["client"] for each in asked if each["job"] == job]
            assert clients == 3 * clients[:3]
