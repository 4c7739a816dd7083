"""SCAFFOLD by hand on a linear model, with NumPy (behaviour sheet, section 11)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.errors import InputError
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.scaffold import Scaffold
from fedloom.policies.cut import Prefix
from fedloom.policies.merge import Mean
from fedloom.policies.select import Uniform
from fedloom.types import Server, Train
from tests.core.small import Normed, Place, Plain, fleet_of, images_of, network_of

RATE, NAMES = 0.1, ("last.weight", "last.bias")
ROWS = [range(12), range(12, 40)]
TRAIN = Train(lr=RATE, batch_size=8, epochs=2)


def federation(method, make=Plain, dtype=torch.float64, rows=ROWS):
    network, images = network_of(make, dtype), images_of(60, dtype)
    place = Place(network, images, rows, {"work": method.work})
    return place, fleet_of(place, train=TRAIN), Server(0, network.initial(1), network)


def rounds(method, count, **options):
    place, fleet, server = federation(method, **options)
    for _ in range(count):
        fleet.begin(server.round, TRAIN)
        server = method.round(replace(server, memory=dict(server.memory)), fleet)
        fleet.commit()
    return place, fleet, server


def gradient(x, weights, y):
    """Of the mean cross-entropy of a linear model."""
    weight, bias = weights
    logits = x @ weight.T + bias
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    shares /= len(y)
    return shares.T @ x, shares.sum(0)


def by_hand(place, count, server_rate=1.0):
    """Algorithm 1, option II, in NumPy; batches are those of the clients' plans."""
    model = [place.network.initial(1)[name].numpy().copy() for name in NAMES]
    common = [np.zeros_like(part) for part in model]
    own = [[np.zeros_like(part) for part in model] for _ in ROWS]
    for number in range(count):
        models, changes = [], []
        for client, control in enumerate(own):
            task = fleet_of(place).task(client)
            plan = place.client(replace(task, round=number, train=TRAIN), {}).plan()
            local = [part.copy() for part in model]
            for (rows,) in plan.steps:
                batch = place.images.batch(rows)
                slopes = gradient(batch.x.flatten(1).numpy(), local, batch.y.numpy())
                local = [
                    part - RATE * (g + c - ci) for part, g, c, ci in zip(local, slopes, common, control, strict=True)
                ]
            scale = 1 / (len(plan.steps) * RATE)
            new = [ci - c + (x - y) * scale for ci, c, x, y in zip(control, common, model, local, strict=True)]
            models.append(local)
            changes.append([after - before for after, before in zip(new, control, strict=True)])
            own[client] = new
        mean = [sum(each) / len(ROWS) for each in zip(*models, strict=True)]
        model = [x + server_rate * (m - x) for x, m in zip(model, mean, strict=True)]
        common = [c + sum(each) / len(ROWS) for c, each in zip(common, zip(*changes, strict=True), strict=True)]
    return model, common, own


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("server_rate", [1.0, 0.5])
def test_rounds_are_those_of_the_paper(count, server_rate):
    place, fleet, server = rounds(Scaffold(server_rate=server_rate), count)
    model, common, own = by_hand(place, count, server_rate)
    for name, x, c in zip(NAMES, model, common, strict=True):
        assert np.allclose(server.tensors[name].numpy(), x, rtol=0, atol=1e-12)
        assert np.allclose(server.memory["control"][name].numpy(), c, rtol=0, atol=1e-12)
    for client, controls in enumerate(own):
        kept = fleet.engine.states.load(client, fleet.accepted(client))["control"]
        for name, control in zip(NAMES, controls, strict=True):
            assert np.allclose(kept[name].numpy(), control, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [Plain, Normed])
def test_first_round_is_unweighted_fedavg_bit_for_bit(make):
    _, _, corrected = rounds(Scaffold(), 1, make=make, dtype=torch.float32)
    _, _, plain = rounds(FedAvg(merge=Mean(weights="equal")), 1, make=make, dtype=torch.float32)
    for name, tensor in plain.tensors.items():
        assert torch.equal(tensor, corrected.tensors[name]), name


def test_the_second_round_is_not():
    _, _, corrected = rounds(Scaffold(), 2)
    _, _, plain = rounds(FedAvg(merge=Mean(weights="equal")), 2)
    assert not torch.allclose(corrected.tensors["last.weight"], plain.tensors["last.weight"], atol=1e-6)


def test_full_participation_keeps_c_the_mean_of_the_clients():
    _, fleet, server = rounds(Scaffold(), 3, make=Normed)
    own = [fleet.engine.states.load(client, (9, 0))["control"] for client in range(2)]
    assert not any("running" in name or "tracked" in name for name in own[0])
    for name, c in server.memory["control"].items():
        assert torch.allclose(c, (own[0][name] + own[1][name]) / 2, rtol=0, atol=1e-12)


def test_c_moves_by_the_share_of_those_who_took_part():
    rows = [range(10), range(10, 20), range(20, 30), range(30, 40)]
    _, fleet, server = rounds(Scaffold(select=Uniform(fraction=0.5)), 1, rows=rows)
    own = [fleet.engine.states.load(client, (9, 0)).get("control") for client in range(4)]
    took_part = [control for control in own if control]
    assert len(took_part) == 2
    total = sum(control["last.bias"] for control in took_part)
    assert torch.allclose(server.memory["control"]["last.bias"], total / 4, rtol=0, atol=1e-12)


def test_a_cut_is_refused_with_the_reason():
    with pytest.raises(InputError, match="cannot run under a cut"):
        Scaffold(cut=Prefix()).check()


def test_a_server_rate_moves_parameters_and_leaves_buffers_to_their_mean():
    (_, _, plain), (_, _, fast) = (
        rounds(Scaffold(select=Uniform(), server_rate=rate), 1, make=Normed) for rate in (1.0, 3.0)
    )
    first = network_of(Normed, torch.float64).initial(1)
    for name, tensor in fast.tensors.items():
        if name in fast.network.buffers:
            assert torch.equal(tensor, plain.tensors[name])
        else:
            torch.testing.assert_close(tensor - first[name], 3 * (plain.tensors[name] - first[name]))
