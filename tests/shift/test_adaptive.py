"""Adaptive local aggregation: what must stay, what must move and where to."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedloom.engine.reference import Reference
from fedloom.engine.stacked import Stacked, stackable
from fedloom.errors import InputError
from fedloom.network import Network
from fedloom.policies.adaptive import Adaptive, Boxed, mixed
from fedloom.policies.layers import layers_of
from fedloom.policies.start import Replace
from fedloom.runs.study import resolve
from fedloom.steps import Descent
from fedloom.types import Fit, Measure, Task, Train
from tests.contract.study import final
from tests.core.small import Normed, client_of, images_of, network_of
from tests.methods.tiny import close, far, numbers, run, same, sections_of, server_of, world

QUICK = Adaptive(top=2, most=12)


def driven(work, trainer):
    """What a client half returns, and the requests it made."""
    asked = []
    try:
        request = next(work)
        while True:
            asked.append(request)
            (answer,) = trainer.solve([request])
            if isinstance(answer, Exception):
                raise answer
            request = work.send(answer)
    except StopIteration as stop:
        return stop.value, asked


def shifted(tensors, by, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + by * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in tensors.items()
    }


def client_with(policy, network, *, own=0.1, **state):
    """A client that has trained before: its own top layers are a little apart from what it receives."""
    received = network.initial(1)
    kept = shifted({n: received[n] for n in sorted(policy.keeps(network))}, own)
    images = images_of(dtype=network.dtype)
    client = client_of(range(40), network, images, round=1, tensors={"model": received}, train=Train(batch_size=8))
    return replace(client, state={"own": kept, **state}), received, kept


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (Adaptive(top=0), set()),
        (Adaptive(top=1), {"last.weight", "last.bias"}),
        (Adaptive(top=2), {"last.weight", "last.bias", "second.weight", "second.bias"}),
        (Adaptive(top=99), {n for n, _ in Normed().named_parameters()}),
        (Adaptive(top=3, count="tensors"), {"last.weight", "last.bias", "second.bias"}),
    ],
)
def test_the_top_is_counted_in_layers_or_tensors(policy, names):
    assert policy.keeps(network_of(Normed)) == names


def test_a_norm_belongs_to_its_layer():
    place = world("fedcpn", model={"name": "digit_cnn", "hidden": None}, data={"size": 28})
    layers = layers_of(place.network)
    assert len(layers) == 6
    assert [len(layer) for layer in layers] == [4, 4, 4, 4, 4, 2]
    top = Adaptive().keeps(place.network)
    assert top == frozenset(name for layer in layers[1:] for name in layer)
    assert not top & place.network.buffers


@pytest.mark.parametrize("trainer", [Reference, Stacked])
def test_below_the_top_the_received_model_stays(trainer):
    network = network_of(Normed, torch.float64)
    client, received, kept = client_with(QUICK, network)
    started, asked = driven(QUICK(client), trainer(network))
    assert asked
    assert list(started) == list(network.names)
    for name, tensor in started.items():
        if name in kept:
            low, high = torch.minimum(kept[name], received[name]), torch.maximum(kept[name], received[name])
            assert bool(((low - 1e-12 <= tensor) & (tensor <= high + 1e-12)).all())
        else:
            assert torch.equal(tensor, received[name]), name
    weights = client.state["mix"]
    assert weights.keys() == kept.keys()
    assert all(float(w.min()) >= 0 and float(w.max()) <= 1 for w in weights.values())
    assert any(float(w.min()) < 1 for w in weights.values())


def test_received_tensors_and_own_ones_are_left_alone():
    network = network_of(Normed)
    client, received, kept = client_with(QUICK, network)
    before = [{n: t.clone() for n, t in tensors.items()} for tensors in (received, kept)]
    driven(QUICK(client), Reference(network))
    same(received, before[0])  # statistics of norms too, though passes are in training mode
    same(kept, before[1])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_weights_of_one_and_zero_are_exact(value):
    network = network_of(Normed)
    policy = Adaptive(top=3, rate=0.0)
    client, received, kept = client_with(policy, network, own=3.0)
    client.state["mix"] = {name: torch.full_like(tensor, value) for name, tensor in kept.items()}
    started, asked = driven(policy(client), Reference(network))
    plain, _ = driven(Replace()(client), Reference(network))
    assert not asked
    same(started, plain if value else {name: kept.get(name, tensor) for name, tensor in received.items()})


def test_a_rate_of_zero_is_fedavg(tmp_path):
    changes = {"start": {"name": "adaptive", "rate": 0.0, "top": 9}, "run": {"rounds": 3}}
    mixed_run, plain = run("fedavg", tmp_path / "a", **changes), run("fedavg", tmp_path / "b", run={"rounds": 3})
    same(server_of(mixed_run), server_of(plain))
    assert numbers(mixed_run) == numbers(plain)


def test_round_one_is_untouched(tmp_path):
    once = {"run": {"rounds": 1}}
    one = run("fedavg", tmp_path / "a", **once, start={"name": "adaptive"})
    same(server_of(one), server_of(run("fedavg", tmp_path / "b", **once)))
    kept = final(one)
    assert any("own" in name for name in kept)
    assert not any("mix" in name for name in kept)
    client = client_of(range(9), network_of(), tensors={"model": network_of().initial(1)})
    started, asked = driven(Adaptive()(client), Reference(client.network))
    assert not asked
    same(started, client.network.initial(1))
    assert not client.state


class Line(nn.Module):
    """Two classes; the logit of the second is one number. Its best value depends on the labels alone."""

    def __init__(self):
        super().__init__()
        self.at = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        one = self.at(torch.ones_like(x[:, 0, 0, :1]))
        return torch.cat([torch.zeros_like(one), one], 1)


@pytest.mark.parametrize(("own", "received", "expected"), [(2.0, -2.0, 0.0), (-2.0, 2.0, 1.0)])
@pytest.mark.parametrize("rate", [0.3, 5.0])
def test_one_dimension_drives_the_weight_to_the_better_end(own, received, expected, rate):
    """All labels are 1, so the loss falls with the logit: the end with the larger one wins, and W stays there."""
    network = Network(Line, (1, 6, 6), 2, dtype=torch.float64)
    images = replace(images_of(dtype=torch.float64), y=torch.ones(60, dtype=torch.long))
    model = {"at.weight": torch.full((1, 1), received, dtype=torch.float64)}
    client = client_of(range(40), network, images, round=1, tensors={"model": model}, train=Train(batch_size=8))
    client.state["own"] = {"at.weight": torch.full((1, 1), own, dtype=torch.float64)}
    policy = Adaptive(top=1, rate=rate)
    started, _ = driven(policy(client), Reference(network))
    assert float(client.state["mix"]["at.weight"]) == expected
    assert float(started["at.weight"]) == max(own, received)


class Half:
    """(w - target)^2 / 2, whatever the batch."""

    def __init__(self, target):
        self.target = target

    def __call__(self, model, tensors, batch, fixed):
        loss = (tensors["at.weight"] - self.target).square().sum() / 2
        return loss, loss.detach().reshape(1)


@pytest.mark.parametrize(("target", "expected"), [(1.0, 0.0), (3.0, 1.0), (1.5, 0.25), (9.0, 1.0)])
def test_a_quadratic_drives_the_weight_to_its_optimum(target, expected):
    """own 1, received 3: dL/dW = (1 + 2 W - target) * 2, so W goes to (target - 1) / 2, clipped."""
    network = Network(Line, (1, 6, 6), 2, dtype=torch.float64)
    own, received = ({"at.weight": torch.full((1, 1), value, dtype=torch.float64)} for value in (1.0, 3.0))
    fixed = {"lr": network.scalar(0.1), "own": own, "received": received}
    client = client_of(range(40), network, images_of(dtype=torch.float64), train=Train(batch_size=1))
    step = Descent(Half(target), Boxed(), make=mixed)
    start = {"at.weight": torch.ones(1, 1, dtype=torch.float64)}
    (fit,) = Reference(network).solve([Fit(start, step, client.plan(), fixed)])
    assert float(fit.tensors["at.weight"]) == pytest.approx(expected, abs=1e-6)
    (once,) = Reference(network).solve([Fit(start, step, client.plan(train=Train(steps=1)), fixed)])
    assert float(once.tensors["at.weight"]) == pytest.approx(min(1.0, 1 - 0.1 * 2 * (3 - target)), abs=1e-12)


def losses_told(monkeypatch, told):
    """A trainer that fits as always and tells these losses."""
    series = iter(told)

    class Telling(Reference):
        def solve(self, requests):
            return [replace(answer, loss=next(series)) for answer in super().solve(requests)]

    return Telling


def test_the_settle_rule(monkeypatch):
    network = network_of(Normed)
    flat, falling = [1.0] * 99, [100.0 - number for number in range(99)]
    for told, passes in [(flat, 11), (falling[:5] + flat, 15), (falling[:1] + flat, 11)]:
        client, *_ = client_with(Adaptive(top=1), network)
        _, asked = driven(Adaptive(top=1)(client), losses_told(monkeypatch, told)(network))
        assert len(asked) == passes


def test_the_cap_is_logged_and_later_rounds_take_one_pass(monkeypatch, caplog):
    network = network_of(Normed)
    policy = Adaptive(top=1, most=13)
    client, *_ = client_with(policy, network)
    with caplog.at_level(logging.WARNING, "fedloom.start"):
        _, asked = driven(policy(client), losses_told(monkeypatch, [100.0 - n for n in range(99)])(network))
    assert len(asked) == 13
    assert "round 2: mixing weights have not settled after 13 passes" in caplog.text
    before = client.state["mix"]
    caplog.clear()
    _, asked = driven(policy(client), Reference(network))
    assert len(asked) == 1
    assert not caplog.text
    assert all(torch.equal(asked[0].tensors[name], before[name]) for name in before)  # kept between rounds


def test_the_last_batch_alone(monkeypatch):
    network = network_of(Normed)
    policy = Adaptive(top=1, losses="last_batch")
    client, *_ = client_with(policy, network, mix={})
    _, (most, last) = driven(policy(client), Reference(network))
    assert len(most.plan.steps) == 3
    assert len(last.plan.steps) == 1
    whole = replace(policy, losses="pass")
    other, *_ = client_with(whole, network, mix={})
    _, (one,) = driven(whole(other), Reference(network))
    assert len(one.plan.steps) == 4
    same(client.state["mix"], other.state["mix"])


def test_samples():
    client, *_ = client_with(QUICK, network_of())
    drawn = QUICK.sampled(client).rows.tolist()
    assert len(drawn) == 32
    assert len(set(drawn)) == 32
    assert drawn == QUICK.sampled(client).rows.tolist()
    block = replace(QUICK, block=True)
    starts = set()
    for round in range(40):
        rows = block.sampled(replace(client, task=replace(client.task, round=round))).rows.tolist()
        assert rows == list(range(rows[0], rows[0] + 32))
        starts.add(rows[0])
    assert starts == set(range(9))
    lonely = replace(client, train=replace(client.train, rows=client.train.rows[:1]))
    assert QUICK.sampled(lonely).rows.tolist() == block.sampled(lonely).rows.tolist() == [0]


def test_fits_of_several_clients_are_stacked(monkeypatch):
    network = network_of(Normed, torch.float64)
    images = images_of(dtype=torch.float64)
    made = []
    for number in range(3):
        client = client_of(
            range(20 * number, 20 * number + 20), network, images, client=number, round=1, train=Train(batch_size=4),
            tensors={"model": network.initial(1)},
        )  # fmt: skip
        kept = shifted({n: network.initial(1)[n] for n in sorted(QUICK.keeps(network))}, 0.1, number)
        made.append(next(QUICK(replace(client, state={"own": kept}))))
    assert all(stackable(fit) for fit in made)
    monkeypatch.setattr(Stacked, "_fit", lambda *_: pytest.fail("it ran alone"))
    for one, other in zip(Reference(network).solve(made), Stacked(network).solve(made), strict=True):
        close(one.tensors, other.tensors, 1e-9)
        assert one.macs == other.macs == 3 * network.macs(network.initial(1)) * 16


@pytest.mark.parametrize("method", ["fedcpn", "fedala"])
def test_trainers_agree_after_whole_rounds(method, tmp_path):
    changes = {
        "model": {"name": "lenet5_bn", "hidden": None}, "engine": {"precision": "float64"}, "run": {"rounds": 3},
        "partition": {"name": "iid"}, "start": {"most": 2},
    }  # fmt: skip
    one = run(method, tmp_path / "a", **changes)
    changes["engine"] = {"precision": "float64", "trainer": "stacked"}
    close(server_of(one), server_of(run(method, tmp_path / "b", **changes)), 1e-9)


def test_it_works_under_a_cut_and_under_own_norms(tmp_path):
    changes = {"model": {"name": "lenet5_bn", "hidden": None}, "engine": {"precision": "float32"}, "run": {"rounds": 2}}
    mixing = {"start": {"name": "adaptive", "most": 3}}
    result = run("heterofl", tmp_path / "a", **changes, **mixing, fleet={"name": "low", "clients": 3})
    assert result.summary["failures"] == 0
    assert far(server_of(result), server_of(run("heterofl", tmp_path / "b", **changes, fleet={"name": "low"}))) > 0
    assert run("fedbn", tmp_path / "c", **changes, **mixing).summary["failures"] == 0
    assert run("feddse", tmp_path / "d", **changes, **mixing, fleet={"name": "low"}).summary["failures"] == 0


def test_fedcpn_is_its_parts(tmp_path):
    changes = {"model": {"name": "lenet5_bn", "hidden": None}, "engine": {"precision": "float32"}, "run": {"rounds": 2}}
    augmented = {"limit": 120, "validation": 0.0, "augment": "randaugment"}
    whole = run("fedcpn", tmp_path / "a", **changes, data=augmented, start={"most": 3})
    parts = run(
        "fedavg", tmp_path / "b", **changes, data=augmented | {"normalise": "personal"},
        start={"name": "adaptive", "most": 3},
    )  # fmt: skip
    same(server_of(whole), server_of(parts))
    bare = run(
        "fedcpn", tmp_path / "c", **changes, data=augmented, method={"normalise": "study"}, start={"name": "replace"}
    )
    same(server_of(bare), server_of(run("fedavg", tmp_path / "d", **changes, data=augmented)))
    assert far(server_of(whole), server_of(bare)) > 0


def test_training_on_the_sample_alone():
    place = world("fedcpn", method={"train_on": "sample"})
    client = place.client(Task(0, 3), {})
    rows = {int(row) for step in place.method.plan(client).steps for row in step[0]}
    assert rows == set(place.method.start.sampled(client).rows.tolist())
    assert len(rows) == int(0.8 * client.samples)
    with pytest.raises(InputError, match="set train_on to all"):
        resolve(sections_of("fedcpn", method={"train_on": "sample"}, start={"name": "replace"}))


def test_fedala_keeps_statistics_at_the_client(tmp_path):
    place = world("fedala", model={"name": "lenet5_bn", "hidden": None})
    private = place.method.share.private(place.network)
    assert private == place.network.buffers != frozenset()
    assert world("fedala").method.share.private(world("fedala").network) == frozenset()
    assert place.method.start == Adaptive(2, "tensors", 1.0, 0.8, True, 0.1, 10, "last_batch", 50)


def test_a_client_of_one_sample_under_batch_norm(tmp_path):
    network = network_of(Normed)
    client, *_ = client_with(QUICK, network)
    lonely = replace(client, train=replace(client.train, rows=client.train.rows[:1]))
    _, asked = driven(QUICK(lonely), Reference(network))
    assert all(isinstance(request, Fit) and not isinstance(request, Measure) for request in asked)
    assert all(bool(torch.isfinite(w).all()) for w in lonely.state["mix"].values())
    assert [rows[0].tolist() for rows in lonely.plan().steps] == [[0, 0]]
    assert [rows[0].tolist() for rows in replace(lonely, network=network_of(Line)).plan().steps] == [[0]]
