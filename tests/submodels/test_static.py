"""Static batch norm: no statistics in training, those of the pooled data at evaluation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import wire
from fedloom.methods.heterofl import HeteroFL
from fedloom.network import Network
from fedloom.policies.moments import statistics
from fedloom.policies.objective import Masked
from fedloom.policies.share import AllTensors, NotNorms, Static
from fedloom.readings import Accuracy
from fedloom.runs.evaluation import evaluate
from fedloom.runs.export import export
from fedloom.types import Measure, Server
from tests.contract.study import rows
from tests.core.small import Place, fleet_of, images_of
from tests.methods.tiny import run
from tests.submodels.federation import FLOAT32, OWN, Federation

NORMED = {"model": {"name": "lenet5_bn", "hidden": None}} | FLOAT32
MIXED = {"name": "mixed", "clients": 4, "capacities": [1.0, 0.5, 0.25]}
METHODS = ["heterofl", "feddropout", "fedrolex", "feddse", "fedgse", "fjord"]


@pytest.mark.parametrize("model", ["lenet5_bn", OWN])
@pytest.mark.parametrize("method", METHODS)
def test_statistics_do_not_travel_in_training(method, model):
    federation = Federation(method, fleet=MIXED, data={"public": 12}, model={"name": model, "hidden": None}, **FLOAT32)
    buffers = federation.network.buffers
    first = federation.server.tensors
    assert buffers
    federation.round()
    assert len(federation.engine.tasks) == len(federation.engine.outcomes) == 4
    for task, outcome in zip(federation.engine.tasks, federation.engine.outcomes, strict=True):
        assert not task.tensors["model"].keys() & buffers
        assert not outcome.report.tensors.keys() & buffers
        assert task.tensors["model"].keys() == outcome.report.tensors.keys() == federation.network.units.parameters
        assert outcome.download_bytes == wire.size(task)
    for name in buffers:
        assert torch.equal(federation.server.tensors[name], first[name])


def test_bytes_are_those_of_the_parameters():
    static, all_tensors = (Federation("heterofl", share={"name": share}, **NORMED) for share in ("static", "all"))
    for federation in (static, all_tensors):
        federation.round()
    values = 2 * (6 + 16 + 120 + 84) * 4 + 4 * 8  # two statistics a channel in float32, four counters in int64
    for one, two in zip(static.engine.outcomes, all_tensors.engine.outcomes, strict=True):
        assert two.upload_bytes - one.upload_bytes >= values
        assert two.download_bytes - one.download_bytes >= values


class OneNorm(nn.Module):
    """A convolution, a norm, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))).mean((2, 3)))


def one_norm(dtype=torch.float64, parts=(range(10), range(10, 13), range(13, 40))):
    network = Network(OneNorm, (1, 6, 6), 3, dtype=dtype)
    place = Place(network, images_of(60, dtype), [list(part) for part in parts], {})
    place.jobs = {"statistics": lambda client, task: statistics(None, client, task)}
    return network, place, Server(0, network.initial(3), network)


def test_pooled_statistics_by_hand():
    network, place, server = one_norm()
    filled = Static().completed(server, fleet_of(place)).tensors
    x = place.images.batch(torch.arange(40)).x
    h = torch.nn.functional.conv2d(x, server.tensors["first.weight"], server.tensors["first.bias"])
    h = h.transpose(0, 1).flatten(1)
    torch.testing.assert_close(filled["norm.running_mean"], h.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(filled["norm.running_var"], h.var(1, correction=0), rtol=1e-10, atol=1e-12)
    for name in network.units.parameters:
        assert filled[name] is server.tensors[name]
    assert torch.equal(server.tensors["norm.running_mean"], torch.zeros(3).double()), "the server itself keeps its own"
    assert torch.equal(filled["norm.num_batches_tracked"], server.tensors["norm.num_batches_tracked"])


def test_pooled_statistics_make_evaluation_batch_free():
    """On the pooled data, evaluation mode then computes what training mode does in one batch."""
    network, place, server = one_norm()
    filled = Static().completed(server, fleet_of(place)).tensors
    x = place.images.batch(torch.arange(40)).x
    still = network.bound(filled, training=False)(x).clone()
    fresh = {name: tensor.clone() for name, tensor in server.tensors.items()}
    torch.testing.assert_close(still, network.bound(fresh, training=True)(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ratio", [30.0, 300.0])
def test_variances_survive_large_means(ratio):
    """A channel whose mean is far above its spread; in float32 the second moment swallows the variance."""
    _, place, server = one_norm(torch.float32)
    server.tensors["first.bias"].fill_(ratio)
    filled = Static().completed(server, fleet_of(place)).tensors
    x = place.images.batch(torch.arange(40)).x.double()
    weights = (server.tensors[f"first.{part}"].double() for part in ("weight", "bias"))
    h = torch.nn.functional.conv2d(x, *weights).transpose(0, 1).flatten(1)
    torch.testing.assert_close(filled["norm.running_var"].double(), h.var(1, correction=0), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("asked", "count"), [(1.0, 8), (0.5, 4), (0.25, 2), (0.01, 1)])
def test_a_share_of_the_clients_is_asked(asked, count):
    _, place, server = one_norm(parts=[range(5 * part, 5 * part + 5) for part in range(8)])
    chosen = []
    for round in range(12):
        fleet = fleet_of(place)
        fleet.begin(round, fleet.train)
        Static(asked=asked).completed(server, fleet)
        asked_now = [entry["client"] for entry in fleet.ledger]
        assert len(set(asked_now)) == len(asked_now) == count
        assert {entry["job"] for entry in fleet.ledger} == {"statistics"}
        chosen.append(tuple(asked_now))
    assert (len(set(chosen)) == 1) == (count == 8), "drawn anew each time"


@pytest.mark.parametrize("asked", [0.0, 1.5, -1.0])
def test_a_share_outside_zero_to_one_is_refused(asked, command):
    told = command("run", "heterofl", "--set", f"share.asked={asked}").sentence()
    assert "asked of share 'static' is wrong" in told


def test_sampled_statistics_are_those_of_the_sample():
    _, place, server = one_norm(parts=[range(5 * part, 5 * part + 5) for part in range(8)])
    fleet = fleet_of(place)
    filled = Static(asked=0.25).completed(server, fleet).tensors
    picked = torch.cat([place.rows[entry["client"]] for entry in fleet.ledger])
    h = torch.nn.functional.conv2d(
        place.images.batch(picked).x, server.tensors["first.weight"], server.tensors["first.bias"]
    )
    torch.testing.assert_close(filled["norm.running_mean"], h.mean((0, 2, 3)), rtol=1e-12, atol=1e-12)


def test_traffic_is_in_the_ledger_and_not_in_the_run(tmp_path):
    result = run("heterofl", tmp_path, fleet=MIXED, evaluate={"every": 2}, run={"rounds": 4}, **NORMED)
    ledger = result.rows("clients")
    asked = [entry for entry in ledger if entry["job"] == "statistics"]
    assert [sum(entry["round"] == round for entry in asked) for round in range(4)] == [0, 4, 0, 4]
    assert all(entry["upload_bytes"] > 2 * (6 + 16 + 120 + 84) * 4 for entry in asked)
    assert all(entry["download_bytes"] > 4 * 21_000 for entry in asked), "the whole model goes down"
    work = sum(entry["upload_bytes"] for entry in ledger if entry["job"] == "work")
    assert result.summary["upload_bytes"] == work == sum(row["upload_bytes"] for row in rows(result))


def test_networks_without_norms_ask_nothing():
    federation = Federation("heterofl")
    federation.round()
    assert federation.method.evaluated(federation.server, federation.fleet) is federation.server
    assert {entry["job"] for entry in federation.fleet.ledger} == {"work"}


@pytest.mark.parametrize("count", [2, 500, 501, 1001])
def test_any_number_of_samples_can_be_measured(count):
    """A last batch of one sample is no reason for a client to fail: training joins it to the one before."""
    images = images_of(count)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.norm(self.first(x.flatten(1)))))

    network = Network(Flat, (1, 6, 6), 3)
    place = Place(network, images, [list(range(count))], {"statistics": lambda c, t: statistics(None, c, t)})
    fleet, server = fleet_of(place), Server(0, network.initial(3), network)
    filled = Static().completed(server, fleet).tensors
    assert [failure.message for failure in fleet.failed] == []
    h = torch.nn.functional.linear(
        images.batch(torch.arange(count)).x.flatten(1), server.tensors["first.weight"], server.tensors["first.bias"]
    )
    torch.testing.assert_close(filled["norm.running_mean"], h.mean(0), rtol=1e-4, atol=1e-5)


def test_statistics_that_nobody_told_are_not_made_up():
    """If all clients fail to answer, an accuracy under the initial statistics would be a made-up number."""
    _, place, server = one_norm()

    def broken(client, task):
        raise RuntimeError("no power")
        yield

    place.jobs = {"statistics": broken}
    with pytest.raises(Exception, match="statistics"):
        Static().completed(server, fleet_of(place))


def test_a_norm_that_no_image_reaches_keeps_its_statistics():
    class Idle(OneNorm):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.BatchNorm2d(3)

    network = Network(Idle, (1, 6, 6), 3)
    place = Place(network, images_of(20), [list(range(20))], {})
    place.jobs = {"statistics": lambda client, task: statistics(None, client, task)}
    server = Server(0, network.initial(3), network)
    filled = Static().completed(server, fleet_of(place)).tensors
    assert filled["idle.running_mean"] is server.tensors["idle.running_mean"]
    assert filled["norm.running_mean"] is not server.tensors["norm.running_mean"]


def test_who_tells_half_of_its_statistics_is_left_out():
    _, place, server = one_norm()
    whole = place.jobs["statistics"]

    def half(client, task):
        report = yield from whole(client, task)
        if client.id == 0:
            return replace(report, tensors={"norm.running_var": report.tensors["norm.running_var"]})
        return report

    place.jobs = {"statistics": half}
    Static().completed(server, fleet := fleet_of(place))
    assert [(each.client, each.message) for each in fleet.failed] == [(0, "it holds no 'norm.running_mean'")]


def test_a_norm_that_is_used_twice_pools_both_uses():
    class Twice(OneNorm):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.first(x))
            return self.last(torch.relu(self.norm(h * 3 + 1)).mean((2, 3)))

    network = Network(Twice, (1, 6, 6), 3, dtype=torch.float64)
    place = Place(network, images_of(20, torch.float64), [list(range(20))], {})
    place.jobs = {"statistics": lambda client, task: statistics(None, client, task)}
    server = Server(0, network.initial(3), network)
    filled = Static().completed(server, fleet_of(place)).tensors
    x = place.images.batch(torch.arange(20)).x
    h = torch.nn.functional.conv2d(x, server.tensors["first.weight"], server.tensors["first.bias"])
    g = 3 * torch.nn.functional.batch_norm(h, None, None, server.tensors["norm.weight"],
                                           server.tensors["norm.bias"], training=True) + 1  # fmt: skip
    both = torch.cat([h, g]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(filled["norm.running_mean"], both.mean(1), rtol=1e-6, atol=1e-6)


def test_clients_evaluate_with_the_pooled_statistics():
    federation = Federation("heterofl", fleet=MIXED, **NORMED)
    federation.round()
    federation.engine.forget()
    evaluate(federation.method, federation.server, federation.fleet)
    filled = federation.method.evaluated(federation.server, federation.fleet).tensors
    asked = [task for task in federation.engine.tasks if task.job == "evaluate"]
    assert len(asked) == 4
    for name in federation.network.buffers:
        assert torch.equal(asked[0].tensors["model"][name], filled[name]), name


def by_its_data(federation, outcome, model):
    """A client's own model in evaluation, and by the statistics of all its training images."""
    client = federation.world.client(replace(federation.engine.tasks[0], client=outcome.client), {})
    x = client.train.images.batch(client.train.rows).x
    with torch.no_grad():
        logits = [federation.network.bound(model, training=mode)(x).clone() for mode in (False, True)]
    return logits


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("heterofl", {"evaluate": {"model": "trained"}}),
        ("fedes", {"share": {"name": "static"}, "method": {"redraw": False}}),
    ],
)
def test_what_a_client_is_judged_by_has_the_statistics_of_its_own_data(method, changes):
    """Training starts them anew in every round, so what a few steps leave of them is mostly the start."""
    federation = Federation(method, fleet=MIXED, data={"validation": 0.2}, **NORMED, **changes)
    federation.round()
    for outcome in federation.engine.outcomes:
        federation.engine.forget()
        list(federation.fleet.ask("evaluate", federation.fleet.show(federation.server, [outcome.client])))
        (judged,) = (each.tensors for each in federation.engine.requests if each.what == Accuracy())
        alone, together = by_its_data(federation, outcome, judged)
        torch.testing.assert_close(alone, together, rtol=1e-3, atol=1e-3)


def test_the_ternary_server_is_judged_by_the_statistics_of_the_batch():
    federation = Federation("tfedavg", share={"name": "static"}, data={"public": 20}, **NORMED)
    federation.round()
    judged = [each.what for each in federation.engine.requests if isinstance(each, Measure)]
    assert judged == [Accuracy(training=True)] * 2


def test_the_scaler_rests_where_statistics_are_kept():
    """They would be those of divided activations, and models are evaluated without the division."""
    assert HeteroFL().objective.scaler is None
    assert HeteroFL(share=NotNorms()).objective.scaler is False
    assert HeteroFL(share=AllTensors(), objective=Masked(scaler=True)).objective.scaler is True


def test_an_exported_model_is_the_one_that_was_evaluated(tmp_path):
    """A state dict with initial statistics would be useless outside."""
    from fedloom.models.resolve import build

    result = run("heterofl", tmp_path, fleet=MIXED, data={"limit": 400}, run={"rounds": 6}, **NORMED)
    line = export(result.folder, tmp_path / "model.pt")
    assert "lenet5_bn" in line
    module = build("lenet5_bn", channels=1, classes=10, size=8)
    module.load_state_dict(torch.load(tmp_path / "model.pt"))
    federation = Federation("heterofl", fleet=MIXED, data={"limit": 400}, run={"rounds": 6}, **NORMED)
    home = federation.world.home()
    batch = home.test.images.batch(home.test.rows)
    with torch.no_grad():
        right = (module.eval()(batch.x).argmax(1) == batch.y).double().mean()
    assert not np.allclose(module.features[1].running_mean, 0)
    assert float(right) == pytest.approx(result.summary["global_accuracy"], abs=1e-6)
