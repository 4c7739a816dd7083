"""At full size every method is FedAvg: same server, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from fedloom.registry import find
from fedloom.types import Task
from tests.methods.tiny import close, far, run, same, server_of, world
from tests.submodels.federation import FLOAT32, HERE, OWN

FULL = {"heterofl": {}, "feddropout": {}, "fedrolex": {}, "feddse": {}, "fedgse": {}, "fjord": {"widths": [1.0]}}
SAME = {"share": {"name": "all"}, "objective": {"name": "cross_entropy"}, "merge": {"name": "mean", "by_class": False}}
MODELS = {"mlp": {}, "own": {"model": {"name": OWN, "hidden": None}} | FLOAT32,
          "lenet5_bn": {"model": {"name": "lenet5_bn", "hidden": None}} | FLOAT32,
          "encoder": {"model": {"name": f"{HERE}:Encoder", "hidden": None}} | FLOAT32}  # fmt: skip
PUBLIC = {"data": {"public": 20}, "train": {"momentum": 0.5, "weight_decay": 1e-3}}


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    made = {}

    def server(model):
        if model not in made:
            made[model] = server_of(run("fedavg", tmp_path_factory.mktemp("fedavg"), **PUBLIC, **MODELS[model]))
        return made[model]

    return server


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", FULL)
def test_full_size_is_fedavg(method, model, fedavg, tmp_path):
    settings = {"method": FULL[method]} if FULL[method] else {}
    same(server_of(run(method, tmp_path, **settings, **SAME, **PUBLIC, **MODELS[model])), fedavg(model))


@pytest.mark.parametrize("capacities", [[1.0], [1.0, 0.5]])
def test_the_comparison_can_fail(capacities, fedavg, tmp_path):
    fleet = {"name": "mixed", "capacities": capacities}
    gap = far(server_of(run("heterofl", tmp_path, fleet=fleet, **SAME, **PUBLIC)), fedavg("mlp"))
    assert (gap == 0) == (capacities == [1.0])


@pytest.mark.parametrize("method", FULL)
def test_full_size_with_all_classes_and_its_own_policies_is_fedavg(method, fedavg, tmp_path):
    """Masks of clients that hold all classes and scalers of whole layers change nothing either."""
    settings = {"method": FULL[method]} if FULL[method] else {}
    every = {**PUBLIC, "partition": {"name": "iid"}, "data": {"public": 20, "limit": 900}, "run": {"rounds": 1}}
    place = world("fedavg", **every)
    assert all(len(place.client(Task(client, 0), {}).classes) == 10 for client in range(3))
    # Rows by class are added up in another way, which rounds another last bit.
    close(server_of(run(method, tmp_path, **settings, **every)), server_of(run("fedavg", tmp_path, **every)), 1e-14)


@dataclass(frozen=True)
class Summed:
    """Cross-entropy summed over exits."""

    def __call__(self, model, tensors, batch, fixed):
        losses = torch.stack([F.cross_entropy(each, batch.y, reduction="none") for each in model(tensors, batch.x)])
        return losses.mean(1).sum(), losses[-1].detach()


@pytest.mark.parametrize("share", ["all", "static"])
def test_depthfl_of_whole_models_is_fedavg_of_the_summed_cross_entropy(share, tmp_path):
    """Equality is with FedAvg on the model that has exits; distillation off, which is an objective of one's own."""
    common = {"objective": {"name": "tests.submodels.test_identities:Summed"}, "share": {"name": share}} | FLOAT32
    one = run(
        "depthfl", tmp_path, method={"depth": "capacity"},
        model={"name": "cnn4", "widths": [4, 6, 8], "hidden": None}, **common,
    )  # fmt: skip
    two = run("fedavg", tmp_path, model={"name": f"{HERE}:with_exits", "hidden": None}, **common)
    same(server_of(one), server_of(two))
    assert one.summary["global_accuracy"] == two.summary["global_accuracy"]


def test_depthfl_teaches_only_through_the_divergence(tmp_path):
    """With the exits' own objective the server differs from the summed cross-entropy's: beta is e^-5 at first."""
    model = {"model": {"name": "cnn4", "widths": [4, 6, 8], "hidden": None}} | FLOAT32
    depth = {"method": {"depth": "capacity"}}
    plain = run("depthfl", tmp_path, objective={"name": "tests.submodels.test_identities:Summed"}, **depth, **model)
    taught = run("depthfl", tmp_path, **depth, **model)
    assert 0 < far(server_of(plain), server_of(taught)) < 0.1


def test_methods_are_registered():
    assert all(find("method", method) for method in FULL)
