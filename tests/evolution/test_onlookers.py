"""Clients that never train and test the global model."""

from __future__ import annotations

import pytest
import torch

from fedloom.readings import Accuracy
from fedloom.types import Measure, Task
from tests.contract.study import final
from tests.methods.tiny import run, server_of, world
from tests.submodels.federation import solved

FLEET = {"fleet": {"clients": 5, "onlookers": 0.4}, "run": {"rounds": 2}}


def test_they_never_train_and_test_the_global_model(tmp_path):
    result = run("fedavg", tmp_path, **FLEET)
    place = world("fedavg", **FLEET)
    looking_on = place.columns["onlooker"].nonzero()[0].tolist()
    assert len(looking_on) == 2
    ledger = result.rows("clients")
    assert {entry["client"] for entry in ledger if entry["job"] == "work"} == set(range(5)) - set(looking_on)
    model, right, samples = server_of(result), 0.0, 0.0
    for client in looking_on:
        read = solved(place, Measure(model, Accuracy(), place.client(Task(client, 0), {}).test))
        right, samples = right + float(read["right"].sum()), samples + float(read["samples"].sum())
    assert result.summary["onlooker_accuracy"] == pytest.approx(right / samples)
    others = [
        solved(place, Measure(model, Accuracy(), place.client(Task(client, 0), {}).test))
        for client in set(range(5)) - set(looking_on)
    ]
    own = [float(read["right"].sum() / read["samples"].sum()) for read in others]
    assert result.summary["local_accuracy"] == pytest.approx(sum(own) / 3)


def test_other_seeds_draw_others_and_none_is_the_default(tmp_path):
    drawn = {tuple(world("fedavg", **FLEET | {"run": {"seed": seed}}).columns["onlooker"]) for seed in range(6)}
    assert len(drawn) > 1
    assert "onlooker_accuracy" not in run("fedavg", tmp_path, run={"rounds": 1}).summary


def test_without_a_global_model_there_is_nothing_to_test(tmp_path):
    result = run("fedbn", tmp_path, **FLEET, model={"name": "lenet5_bn", "hidden": None})
    assert result.summary["onlooker_accuracy"] is None
    assert result.summary["local_accuracy"] is not None


@pytest.mark.parametrize("model", ["mlp", ["mlp", "lenet5"]])
def test_they_are_sent_the_global_model_where_clients_evaluate_their_own(tmp_path, model):
    named = {"model": {"name": model, "hidden": None}, "data": {"public": 20}}
    result, place = run("dsfl", tmp_path, **FLEET, **named), world("dsfl", **FLEET, **named)
    read = [
        solved(place, Measure(server_of(result), Accuracy(), place.client(Task(client, 0), {}).test))
        for client in place.columns["onlooker"].nonzero()[0].tolist()
    ]
    right, samples = (sum(float(each[name].sum()) for each in read) for name in ("right", "samples"))
    assert result.summary["onlooker_accuracy"] == pytest.approx(right / samples)


def test_their_data_are_not_in_the_statistics_of_the_model(tmp_path):
    normed = {"model": {"name": "lenet5_bn", "hidden": None}, "engine": {"precision": "float32"}}
    ledger = run("heterofl", tmp_path, **FLEET, **normed).rows("clients")
    looking_on = set(world("heterofl", **FLEET, **normed).columns["onlooker"].nonzero()[0].tolist())
    asked = {entry["client"] for entry in ledger if entry["job"] == "statistics"}
    assert asked == set(range(5)) - looking_on


def test_scaffolds_common_control_is_the_mean_of_those_who_train(tmp_path):
    state = final(run("scaffold", tmp_path, **FLEET))
    own = {}
    for name, tensor in state.items():
        _, mark, end = name.partition("/control/")
        if mark:
            own.setdefault(end, {})["server" if name.startswith("server/") else name] = tensor
    assert own
    for kinds in own.values():
        common = kinds.pop("server")
        assert len(kinds) == 3
        torch.testing.assert_close(common, torch.stack(list(kinds.values())).mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["fedes", "tfedavg"])
def test_trained_models_are_the_ones_that_were_sent(method, tmp_path):
    """Judged by what they trained, FedES clients use their pruned survivors and T-FedAvg clients ternary weights."""
    changes = {
        "model": {"name": "lenet5_bn", "hidden": None}, "data": {"validation": 0.2}, "evaluate": {"model": "trained"},
        "engine": {"precision": "float32"}, "run": {"rounds": 1, "checkpoint_every": 1},
    }  # fmt: skip
    states = {n: t for n, t in final(run(method, tmp_path, **changes)).items() if "/trained/" in n}
    inner = [t for n, t in states.items() if n.endswith("classifier.1.weight") or n.endswith("classifier.3.weight")]
    assert inner
    for tensor in inner:
        assert len(tensor.unique()) <= 3 if method == "tfedavg" else torch.count_nonzero(tensor) < tensor.numel()
