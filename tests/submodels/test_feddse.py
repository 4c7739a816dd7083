"""FedDSE: a client keeps the units that its own data excite most."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedloom import copies
from fedloom.client import Client
from fedloom.engine.reference import Reference
from fedloom.network import Network
from fedloom.policies.cut import Scored, narrow
from fedloom.types import Images, Measure, Samples, Task
from tests.submodels.federation import FLOAT32, OWN, Federation


class Lamps(nn.Module):
    """Unit i of eight lights up for pixels of column i // 2."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x.flatten(1))))


def lamps() -> tuple[Network, dict[str, Tensor]]:
    network = Network(Lamps, (1, 4, 4), 4)
    tensors = network.initial(0)
    tensors["hidden.bias"] = torch.zeros(8)
    columns = torch.arange(16) % 4
    tensors["hidden.weight"] = (columns == torch.arange(8)[:, None] // 2) * (1 + 0.1 * torch.arange(8))[:, None]
    return network, tensors


def stripes(labels: list[int]) -> Images:
    """A picture of class c is column c, in some brightness."""
    x = torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8)
    for number, label in enumerate(labels):
        x[number, 0, :, label] = 100 + 10 * number % 100
    return Images(x, torch.tensor(labels), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))


def client_of(network, images, rows=None, capacity=0.5, round=0, tensors=None):
    rows = torch.arange(len(images.y)) if rows is None else rows
    task, nothing = Task(0, round, tensors={"model": tensors or {}}), Samples(images, torch.arange(0))
    return Client(0, task, 7, network, Samples(images, rows), nothing, nothing, capacity)


def choose(cut, client, tensors):
    """The client's side of a cut; gives what was measured too."""
    work, trainer, measured = narrow(cut, client, tensors), Reference(client.network), []
    try:
        request = next(work)
        while True:
            measured.append(request)
            (answer,) = trainer.solve([request])
            if isinstance(answer, Exception):
                raise answer
            request = work.send(answer)
    except StopIteration as end:
        return *end.value, measured


def test_clients_of_disjoint_classes_choose_disjoint_units():
    network, tensors = lamps()
    found = []
    for labels in ([0, 1, 1, 0], [2, 3, 3]):
        small, where, _ = choose(Scored(), client_of(network, stripes(labels)), tensors)
        found.append(where["hidden"].tolist())
        assert torch.equal(small["hidden.weight"], tensors["hidden.weight"][where["hidden"]])
        assert torch.equal(small["out.weight"], tensors["out.weight"][:, where["hidden"]])
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_who_trains_the_whole_model_is_asked_for_no_scores():
    network, tensors = lamps()
    chosen, where, measured = choose(Scored(), client_of(network, stripes([0, 1]), capacity=1.0), tensors)
    assert chosen is tensors
    assert where is None
    assert not measured


def test_scores_of_all_groups_are_looked_at_together(monkeypatch):
    federation, looks, copy = Federation("feddse", model={"name": OWN, "hidden": None}, **FLOAT32), [], copies.to_host
    monkeypatch.setattr(copies, "to_host", lambda tensors: (looks.append(len(tensors)), copy(tensors))[1])
    client = federation.client(0)
    started = federation.answer(federation.method.start(client))
    work = narrow(federation.method.cut, replace(client, capacity=0.5), started)
    federation.answer(work)
    assert looks == [len(federation.network.units.sizes)]
    assert looks[0] > 1


def test_the_score_is_the_activation_not_the_weight():
    """Unit 7 has the largest weights of all; data of class 0 do not excite it."""
    network, tensors = lamps()
    _, where, _ = choose(Scored(), client_of(network, stripes([0, 0, 1]), capacity=0.25), tensors)
    assert where["hidden"].tolist() == [0, 1]


def test_the_magnitude_of_weights_is_another_score():
    network, tensors = lamps()
    _, where, _ = choose(Scored(score="magnitude"), client_of(network, stripes([0, 0, 1]), capacity=0.25), tensors)
    norms = tensors["hidden.weight"].abs().sum(1) + tensors["hidden.bias"].abs() + tensors["out.weight"].abs().sum(0)
    assert where["hidden"].tolist() == sorted(norms.topk(2).indices.tolist())


@pytest.mark.parametrize("seed", range(4))
def test_choices_follow_a_permutation_of_the_units(seed):
    network, tensors = lamps()
    generator = torch.Generator().manual_seed(seed)
    tensors |= {name: torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    order = torch.randperm(8, generator=generator)
    permuted = {
        "hidden.weight": tensors["hidden.weight"][order], "hidden.bias": tensors["hidden.bias"][order],
        "out.weight": tensors["out.weight"][:, order], "out.bias": tensors["out.bias"],
    }  # fmt: skip
    client = client_of(network, stripes([0, 1, 2, 2, 3]), capacity=0.4)
    _, plain, _ = choose(Scored(), client, tensors)
    _, moved, _ = choose(Scored(), client, permuted)
    assert set(order[moved["hidden"]].tolist()) == set(plain["hidden"].tolist())


@pytest.mark.parametrize(("samples", "count"), [(0, 12), (5, 5), (12, 12), (64, 12)])
def test_samples_are_limited(samples, count):
    network, tensors = lamps()
    images = stripes([0, 1, 2, 3] * 5)
    client = client_of(network, images, torch.arange(4, 16))
    _, _, (measure,) = choose(Scored(samples=samples), client, tensors)
    assert isinstance(measure, Measure)
    assert len(measure.samples) == count == len(set(measure.samples.rows.tolist()))
    assert set(measure.samples.rows.tolist()) <= set(range(4, 16))


def test_limited_samples_change_between_rounds():
    network, tensors = lamps()
    drawn = set()
    for round in range(5):
        client = client_of(network, stripes([0, 1, 2, 3] * 5), round=round)
        _, _, (measure,) = choose(Scored(samples=4), client, tensors)
        drawn.add(tuple(sorted(measure.samples.rows.tolist())))
    assert len(drawn) > 1


def test_the_draw_is_by_the_mean_not_by_the_sum():
    """softmax(h / T) with h the mean activation: ten times the same samples are the same h, so the same draw."""
    network, tensors = lamps()
    images, cut = stripes([0, 1, 2, 3]), Scored(temperature=1.0)
    for round in range(30):
        _, once, _ = choose(cut, client_of(network, images, round=round), tensors)
        _, often, _ = choose(cut, client_of(network, images, torch.arange(4).repeat(10), round=round), tensors)
        assert torch.equal(once["hidden"], often["hidden"]), f"round {round}"


def test_draws_have_the_stated_chances():
    network, tensors = lamps()
    images = stripes([0, 0, 0, 1] * 10)
    x = images.batch(torch.arange(40)).x
    h = torch.relu(nn.functional.linear(x.flatten(1), tensors["hidden.weight"], tensors["hidden.bias"])).mean(0)
    chance = (h.double() / 0.5).softmax(0)
    rounds, counts = 600, torch.zeros(8)
    for round in range(rounds):
        client = client_of(network, images, capacity=0.125, round=round)
        _, where, _ = choose(Scored(temperature=0.5), client, tensors)
        counts[where["hidden"]] += 1
    expected = rounds * chance
    assert ((counts - expected).square() / expected.clamp(min=1)).sum() < 40


def test_batches_do_not_change_the_score():
    network, tensors = lamps()
    client = client_of(network, stripes([0, 1, 2, 3, 1] * 5))
    trainer = Reference(network)
    one, many = (
        trainer.solve([Measure(tensors, Scored().reading, client.train, batch_size=size)])[0] for size in (25, 4)
    )
    torch.testing.assert_close(one["hidden"], many["hidden"])


def test_it_reports_what_it_chose():
    federation = Federation(
        "feddse", fleet={"name": "mixed", "clients": 5, "capacities": [0.5]}, partition={"name": "classes:2"},
        model={"name": OWN, "hidden": None}, **FLOAT32,
    )  # fmt: skip
    federation.round()
    choices = []
    for task, outcome in zip(federation.engine.tasks, federation.engine.outcomes, strict=True):
        assert task.where is None, "the client chooses"
        assert {name: t.shape for name, t in task.tensors["model"].items()} == {
            name: shape for name, shape in federation.network.shapes().items() if name in task.tensors["model"]
        }, "it pulls the whole model"
        where = outcome.report.where
        assert {group: len(kept) for group, kept in where.items()} == federation.network.units.kept(0.5)
        choices.append({group: kept.tolist() for group, kept in where.items()})
    assert any(choice != choices[0] for choice in choices), "data differ, so choices do"
    same = Federation(
        "feddse", fleet={"name": "mixed", "clients": 5, "capacities": [0.5]}, partition={"name": "classes:2"},
        model={"name": OWN, "hidden": None}, **FLOAT32,
    )  # fmt: skip
    same.round()
    for outcome, choice in zip(same.engine.outcomes, choices, strict=True):
        assert {group: kept.tolist() for group, kept in outcome.report.where.items()} == choice
