"""FedGSE: the server keeps the units with the largest gradients on public data that resemble a client's."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from fedloom.policies.score import Gradient, Predictions
from fedloom.types import Measure, Report
from tests.submodels.federation import HERE, Federation

FLEET = {"name": "mixed", "clients": 5, "capacities": [0.5, 0.3, 1.0, 0.25, 0.6]}
WEAK = (0, 1, 3, 4)
MLP = {"model": {"name": "mlp", "hidden": [7, 6]}}
PAIR = {"model": {"name": f"{HERE}:Pair", "hidden": None}}


def federation(labels="spl", samples=128, public=30, **changes):
    return Federation(
        "fedgse", method={"labels": labels, "samples": samples}, fleet=FLEET, data={"public": public},
        partition={"name": "classes:2"}, **changes,
    )  # fmt: skip


def scored(made, client):
    """The choice for a client, and the request that it was scored by."""
    made.engine.requests.clear()
    made.fleet.begin(made.server.round, made.train)
    where = made.method.where(made.server, made.fleet, client)
    (gradient,) = [each for each in made.engine.requests if isinstance(each.what, Gradient)]
    predictions = [each for each in made.engine.requests if isinstance(each.what, Predictions)]
    return where, gradient, predictions


def inner(tensors, x, model):
    """The activations that units are read at, and the logits, with nothing of fedloom."""
    if model is MLP:
        one = F.relu(F.linear(x.flatten(1), tensors["classifier.1.weight"], tensors["classifier.1.bias"]))
        two = F.relu(F.linear(one, tensors["classifier.3.weight"], tensors["classifier.3.bias"]))
        return (one, two), F.linear(two, tensors["classifier.5.weight"], tensors["classifier.5.bias"])
    one = F.relu(F.conv2d(x, tensors["first.weight"], tensors["first.bias"], padding=1))
    two = F.relu(F.conv2d(one, tensors["second.weight"], tensors["second.bias"], padding=1))
    return (one, two), F.linear(two.mean((2, 3)), tensors["head.weight"], tensors["head.bias"])


@pytest.mark.parametrize("model", [MLP, PAIR], ids=["mlp", "pair"])
def test_the_choice_loses_the_least_gradient(model):
    made = federation(**model)
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in made.server.tensors.items()}
    for client in WEAK:
        where, request, _ = scored(made, client)
        batch = request.samples.images.batch(request.samples.rows)
        points, logits = inner(tensors, batch.x, model)
        # Seen from the last point: the gradient of the network's own loss by its activations.
        slopes = torch.autograd.grad(F.cross_entropy(logits, batch.y), points)
        for (group, kept), slope in zip(where.items(), slopes, strict=True):
            g = slope.sum(0).abs().flatten(1).sum(1) if slope.ndim > 2 else slope.sum(0).abs()
            assert len(g) == made.network.units.sizes[group]

            def lost(choice, g=g):
                return float((g - g * torch.zeros_like(g).index_fill_(0, torch.tensor(choice), 1)).abs().sum())

            least = min(lost(choice) for choice in combinations(range(len(g)), len(kept)))
            assert lost(kept.tolist()) == pytest.approx(least, abs=1e-12)


@pytest.mark.parametrize("labels", ["spl", "csl"])
def test_an_unseen_client_is_scored_on_all_of_p(labels):
    made = federation(labels, **MLP)
    home = made.fleet.home.train
    _, request, predicted = scored(made, 1)
    assert sorted(request.samples.rows.tolist()) == sorted(home.rows.tolist())
    batch = home.images.batch(request.samples.rows)
    if labels == "spl":
        assert torch.equal(request.what.labels, batch.y)
        assert not predicted
    else:
        assert torch.equal(request.what.labels, inner(made.server.tensors, batch.x, MLP)[1].argmax(1))


def last_model(made, client, seed=5):
    """Give the server a last sub-model of a client, with large weights so that it has opinions."""
    units = made.network.units
    where = {group: torch.arange(1, 4) for group in units.sizes}
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in units.take(made.server.tensors, where).items()}
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    made.server.memory["last"] = {client: Report(tensors, where=where)}
    return tensors


def test_spl_keeps_what_the_last_model_gets_right():
    made = federation("spl", public=60, **MLP)
    home = made.fleet.home.train
    batch = home.images.batch(home.rows)
    for seed in range(6):
        tensors = last_model(made, 1, seed)
        right = inner(tensors, batch.x, MLP)[1].argmax(1) == batch.y
        _, request, (asked,) = scored(made, 1)
        assert asked.tensors.keys() == made.network.shapes().keys()
        expected = home.rows[right] if right.any() else home.rows
        assert sorted(request.samples.rows.tolist()) == sorted(expected.tolist())
        assert torch.equal(request.what.labels, home.images.y[request.samples.rows])
        assert request.batch_size >= len(request.samples), "one batch: the sum over samples comes before the magnitude"
        _, other, _ = scored(made, 3)
        assert len(other.samples) == 60, "another client's model is its own business"


def test_spl_that_keeps_nothing_takes_all_of_p():
    made = federation("spl", **MLP)
    tensors = last_model(made, 1)
    home = made.fleet.home.train
    tensors["classifier.5.weight"].zero_()
    absent = next(label for label in range(10) if label not in set(home.images.y[home.rows].tolist()) or label == 9)
    tensors["classifier.5.bias"].zero_()[absent] = 1
    wrong = (home.images.y[home.rows] != absent).all()
    _, request, _ = scored(made, 1)
    if wrong:
        assert len(request.samples) == len(home)
    else:
        assert set(home.images.y[request.samples.rows].tolist()) == {absent}


def test_csl_uses_the_last_models_guesses():
    made = federation("csl", public=40, **MLP)
    tensors = last_model(made, 3)
    home = made.fleet.home.train
    _, request, _ = scored(made, 3)
    assert sorted(request.samples.rows.tolist()) == sorted(home.rows.tolist())
    x = home.images.batch(request.samples.rows).x
    guesses = inner(tensors, x, MLP)[1].argmax(1)
    assert torch.equal(request.what.labels, guesses)
    assert not torch.equal(guesses, home.images.y[request.samples.rows])


@pytest.mark.parametrize(("samples", "count"), [(8, 8), (30, 30), (500, 30)])
@pytest.mark.parametrize("labels", ["spl", "csl"])
def test_samples_are_limited_and_keep_their_labels(labels, samples, count):
    made = federation(labels, samples, **MLP)
    home = made.fleet.home.train
    _, request, _ = scored(made, 0)
    rows = request.samples.rows
    assert len(rows) == count == len(set(rows.tolist()))
    assert set(rows.tolist()) <= set(home.rows.tolist())
    x = home.images.batch(rows).x
    truth = home.images.y[rows] if labels == "spl" else inner(made.server.tensors, x, MLP)[1].argmax(1)
    assert torch.equal(request.what.labels, truth)


def test_the_server_remembers_last_uploads():
    made = federation(select={"fraction": 0.4}, **MLP)
    seen = {}
    for _ in range(3):
        made.round()
        seen |= {outcome.client: outcome.report for outcome in made.engine.outcomes}
        last = made.server.memory["last"]
        assert last.keys() == seen.keys()
        for client, report in seen.items():
            assert all(torch.equal(last[client].tensors[name], t) for name, t in report.tensors.items())
            assert all(torch.equal(last[client].where[group], kept) for group, kept in report.where.items())


def test_the_server_sends_only_the_sub_model():
    made = federation(**MLP)
    made.round()
    for task in made.engine.tasks:
        capacity = FLEET["capacities"][task.client]
        kept = made.network.units.kept(capacity)
        assert (task.where is None) == (capacity == 1)
        assert task.where is None or {group: len(units) for group, units in task.where.items()} == kept
        shapes = made.network.units.shapes(kept)
        assert all(tensor.shape == shapes[name] for name, tensor in task.tensors["model"].items())
    measures = [each for each in made.engine.requests if isinstance(each, Measure)]
    assert all(set(each.samples.rows.tolist()) <= set(made.fleet.home.train.rows.tolist()) for each in measures)


@pytest.mark.parametrize("labels", ["spl", "csl"])
def test_a_cohort_is_scored_together_as_each_would_be_alone(labels, monkeypatch):
    made, calls = federation(labels, **MLP), []
    made.round()
    made.fleet.begin(made.server.round, made.train)
    alone = [made.method.where(made.server, made.fleet, client) for client in range(5)]
    solve = made.engine.solve
    monkeypatch.setattr(made.engine, "solve", lambda requests: (calls.append(requests), solve(requests))[1])
    together = made.method.choices(made.server, made.fleet, range(5))
    assert together.keys() == set(WEAK), "who trains the whole model is not scored"
    assert alone[2] is None
    for client in WEAK:
        assert all(torch.equal(kept, alone[client][group]) for group, kept in together[client].items())
    assert [[type(each.what) for each in call] for call in calls] == [[Predictions] * 4, [Gradient] * 4]


def test_public_rows_are_nobodys():
    made = federation(public=37)
    public = set(made.fleet.home.train.rows.tolist())
    assert len(public) == 37
    split = made.world.split
    for client in range(5):
        mine = [set(part[client].tolist()) for part in (split.train, split.validation, split.test)]
        assert all(not public & rows for rows in mine)
    assert not public & set(made.world.dataset.test_rows.tolist())


def test_no_public_data_is_a_sentence(command):
    told = command("run", "fedgse", "--model", "mlp", "--clients", 2).sentence()
    assert "fedgse needs public data at the server" in told
    assert "data.public" in told


@pytest.mark.parametrize("cut", ["prefix", "scored", "random"])
def test_a_cut_of_its_own_is_refused(cut, command):
    """The server's scores are the cut; another one would be ignored, or applied twice."""
    told = command("run", "fedgse", "--model", "mlp", "--clients", 2, "--rounds", 1, "--engine", "local",
                   "--set", f"cut.name={cut}", "--set", "data.public=20", "--fleet", "low").sentence()  # fmt: skip
    assert "cut" in told
