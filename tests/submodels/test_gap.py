"""The distance between what a sub-model and the whole model learn from the same data."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import fedloom
from fedloom.errors import InputError


def ran(tmp_path, method: str, fleet: str, **settings: object):
    base = {"data.limit": 200, "data.public": 40, "evaluate.gap": True, "model.hidden": [16], "train.batch_size": 16}
    return fedloom.run(method, set={**base, **settings}, clients=4, rounds=2, out=tmp_path, fleet=fleet, engine="local")


def test_whole_models_leave_no_gap(tmp_path):
    result = ran(tmp_path, "heterofl", "uniform")
    assert result.summary["accumulated_gap"] == 0
    assert result.summary["accumulated_update"] > 0


def test_whole_models_that_travel_encoded_leave_none_either(tmp_path):
    """T-FedAvg puts its encoded model into the task itself; the question must not take that away."""
    rows = ran(tmp_path, "tfedavg", "uniform", **{"cut.name": "prefix", "method.layers": "all"}).rows("metrics")
    assert [row["gap"] for row in rows] == [0, 0]


def test_stages_that_a_shallow_client_does_not_have_are_in_its_gap(tmp_path):
    model = {"model.name": "cnn4", "model.widths": [4, 6, 8]}
    base = {"data.limit": 200, "evaluate.gap": True, "train.batch_size": 16, **model}
    rows = fedloom.run("depthfl", set=base, clients=3, rounds=1, out=tmp_path, engine="local").rows("metrics")
    assert rows[0]["gap"] > 0


@pytest.mark.parametrize("method", ["heterofl", "feddse", "fedgse"])
def test_sub_models_leave_one_that_adds_up(tmp_path, method):
    result = ran(tmp_path, method, "low")
    rows = result.rows("metrics")
    assert all(row["gap"] > 0 for row in rows)
    assert result.summary["accumulated_gap"] == pytest.approx(sum(row["gap"] for row in rows))


def test_recording_changes_nothing(tmp_path):
    with_gap, without = ran(tmp_path, "feddse", "low"), ran(tmp_path, "feddse", "low", **{"evaluate.gap": False})
    assert with_gap.summary["global_accuracy"] == without.summary["global_accuracy"]
    assert with_gap.summary["upload_bytes"] == without.summary["upload_bytes"]
    one, two = (load_file(each.folder / "model.safetensors") for each in (with_gap, without))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_whole_model_methods_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"evaluate\.gap compares sub-models"):
        ran(tmp_path, "fedavg", "uniform")
