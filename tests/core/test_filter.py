"""Clipping and noise at the client."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from fedloom.deploy.worlds import DeviceWorld
from fedloom.encoding import Sparse, mask_of
from fedloom.policies import filter as filters
from fedloom.policies.filter import Clip
from fedloom.runs.world import world_of
from fedloom.types import Report, Task
from tests.core.small import Normed, client_of, network_of
from tests.methods.tiny import study_of

NETWORK = network_of(Normed)


def received(seed=7):
    return NETWORK.initial(seed)


def client():
    return client_of(range(4), NETWORK, tensors={"model": received()})


def moved(by):
    sent = received()
    return {name: sent[name] + by for name in ("last.weight", "last.bias")}


def test_a_large_change_is_cut_to_the_norm_and_keeps_its_direction():
    report = Clip(norm=0.5)(client(), Report(moved(3.0), 4.0))
    change = torch.cat([(report.tensors[name] - received()[name]).flatten() for name in ("last.weight", "last.bias")])
    assert float(change.norm()) == pytest.approx(0.5, rel=1e-5)
    assert torch.allclose(change, change[0].expand_as(change), atol=1e-6)
    assert report.weight == 4.0


def test_a_small_change_passes():
    report = Clip(norm=1e6)(client(), Report(moved(3.0)))
    assert torch.allclose(report.tensors["last.bias"], moved(3.0)["last.bias"])


def test_buffers_pass_unchanged():
    tensors = {**moved(3.0), "norm.running_mean": torch.full((4,), 50.0), "norm.num_batches_tracked": torch.tensor(9)}
    report = Clip(norm=0.1)(client(), Report(tensors))
    assert torch.equal(report.tensors["norm.running_mean"], torch.full((4,), 50.0))
    assert int(report.tensors["norm.num_batches_tracked"]) == 9


def test_noise_is_the_clients_own_and_repeatable():
    one, two = (Clip(norm=1.0, noise=0.5)(client(), Report(moved(0.0))).tensors["last.weight"] for _ in range(2))
    other = Clip(norm=1.0, noise=0.5)(
        client_of(range(4), NETWORK, client=1, tensors={"model": received()}), Report(moved(0.0))
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other.tensors["last.weight"])


def test_noise_is_brought_to_the_device_together(monkeypatch):
    brought = []
    monkeypatch.setattr(filters, "to_device", lambda drawn, device: brought.append(len(drawn)) or drawn)
    Clip(norm=1.0, noise=0.5)(client(), Report(moved(0.0)))
    assert brought == [2]


def test_elements_that_did_not_travel_still_do_not_vote():
    """Otherwise a clipped sparse report says "zero" wherever its client said nothing."""
    kept = torch.tensor([True, False, False])
    value = Sparse.of(received()["last.bias"] + 1, kept, partial=True)
    clipped = Clip(norm=0.5)(client(), Report({"last.bias": value})).tensors["last.bias"]
    assert torch.equal(mask_of(clipped), kept)
    assert float(clipped.decode()[0] - received()["last.bias"][0]) == pytest.approx(0.5, abs=1e-5)


def test_the_noise_of_a_real_device_cannot_be_drawn_again(tmp_path):
    """The server gives devices the run's seed: noise that is drawn from it could be taken away again."""
    study = study_of("fedavg", tmp_path, filter={"name": "clip", "norm": 1.0, "noise": 0.5})
    place = world_of(study.model_dump_json())
    device = DeviceWorld(study, place.dataset, place.split, normal=place._common())
    task = Task(0, 0, tensors={"model": place.network.initial(0)})
    report = Report(place.network.initial(1), 1.0)
    here, there = ([each.filter(each.client(task, {}), report) for _ in range(2)] for each in (place, device))
    assert torch.equal(here[0].tensors["classifier.1.bias"], here[1].tensors["classifier.1.bias"])
    drawn = [here[0], *there]
    for one, other in combinations(drawn, 2):
        assert not torch.equal(one.tensors["classifier.1.bias"], other.tensors["classifier.1.bias"])
