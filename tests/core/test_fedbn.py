"""FedBN: norm layers stay where they are (behaviour sheet, section 8)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedbn import FedBN
from fedloom.policies.start import Replace
from fedloom.types import Server, Train
from tests.core.small import CLASSES, Normed, Place, Plain, fleet_of, images_of, network_of

ROWS = [range(12), range(12, 40)]
TRAIN = Train(lr=0.1, batch_size=8)


def rounds(method, count, make=Normed, rows=ROWS):
    network, images = network_of(make), images_of()
    place = Place(network, images, rows, {"work": method.work})
    fleet, server, reports = fleet_of(place, train=TRAIN), Server(0, network.initial(7), network), []
    plain = fleet.engine.run
    fleet.engine.run = lambda tasks: (reports.append(outcome.report) or outcome for outcome in plain(tasks))
    for _ in range(count):
        fleet.begin(server.round, TRAIN)
        server = method.round(replace(server, memory=dict(server.memory)), fleet)
        fleet.commit()
    return network, fleet, server, reports


NORMS = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_norm_tensors_differ_between_clients_and_never_travel():
    network, fleet, server, reports = rounds(FedBN(), 2)
    assert network.norms == NORMS
    one, two = (fleet.engine.states.load(client, (9, 0))["own"] for client in range(2))
    assert one.keys() == two.keys() == NORMS
    for name in NORMS - {"norm.num_batches_tracked"}:
        assert not torch.equal(one[name], two[name]), name
    assert int(one["norm.num_batches_tracked"]) == 2 * 2
    assert int(two["norm.num_batches_tracked"]) == 2 * 4
    for name in NORMS:
        assert torch.equal(server.tensors[name], network.initial(7)[name]), name
    assert not torch.equal(server.tensors["first.weight"], network.initial(7)["first.weight"])
    assert len(reports) == 4
    assert not any(NORMS & report.tensors.keys() for report in reports)
    assert FedBN().model(server) is None


@dataclass(frozen=True)
class Watched(Replace):
    """Starts as always, and remembers with what."""

    seen: list

    def __call__(self, client):
        tensors = yield from super().__call__(client)
        self.seen.append((client.task.round, client.id, {name: tensor.clone() for name, tensor in tensors.items()}))
        return tensors


def test_a_round_starts_from_the_clients_own_norms():
    seen = []
    _, fleet, server, _ = rounds(FedBN(), 1)
    after = [fleet.engine.states.load(client, (9, 0))["own"] for client in range(2)]
    rounds(FedBN(start=Watched(seen)), 2)
    second = {client: tensors for round, client, tensors in seen if round == 1}
    for client in range(2):
        for name, tensor in second[client].items():
            expected = after[client][name] if name in NORMS else server.tensors[name]
            assert torch.equal(tensor, expected), name


def test_without_norm_layers_it_is_fedavg_bit_for_bit():
    _, fleet, one, _ = rounds(FedBN(), 3, Plain)
    _, _, two, _ = rounds(FedAvg(), 3, Plain)
    assert all(torch.equal(tensor, two.tensors[name]) for name, tensor in one.tensors.items())
    assert fleet.engine.states.load(0, (9, 0)) == {}
    assert FedBN().model(one) is one.tensors


def test_clients_with_equal_data_stay_equal():
    network, fleet, _, _ = rounds(FedBN(), 1, rows=[range(8), range(8)])
    one, two = (fleet.engine.states.load(client, (9, 0))["own"] for client in range(2))
    # one batch holds all samples, so that the order in which they were drawn matters in the last bits only
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in network.norms)


class Oddly(nn.Module):
    """Norm layers of several kinds under names that do not say so, and a 'bn' that is none."""

    def __init__(self):
        super().__init__()
        self.bn = nn.Conv2d(1, 4, 3)
        self.down = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4))
        self.scale = nn.LayerNorm(4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.last(self.scale(self.down(self.bn(x)).mean((2, 3))))


def test_norms_are_found_by_type():
    assert network_of(Oddly).norms == {
        "down.1.weight", "down.1.bias", "down.1.running_mean", "down.1.running_var", "down.1.num_batches_tracked",
        "down.3.weight", "down.3.bias", "scale.weight", "scale.bias",
    }  # fmt: skip
