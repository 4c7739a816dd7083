"""The baselines that are none: one full-batch step, no federation at all, all data in one place."""

from __future__ import annotations

import pytest
import torch

from fedloom.errors import InputError
from fedloom.types import Task
from tests.contract.study import final, rows
from tests.methods.tiny import NORMED, begin, close, descend, numbers, run, same, server_of, study_of, world


@pytest.mark.parametrize("model", [{}, NORMED])
def test_fedsgd_is_fedavg_with_one_step_over_everything(model, tmp_path):
    one = run("fedsgd", tmp_path, train={"batch_size": 4, "epochs": 3}, **model)
    two = run("fedavg", tmp_path, train={"batch_size": 10_000, "epochs": 1}, **model)
    same(server_of(one), server_of(two))
    assert numbers(one) == numbers(two)
    assert {entry["steps"] for entry in one.rows("clients") if entry["job"] == "work"} == {1}


def test_fedsgd_is_a_gradient_step_on_the_pooled_data(tmp_path):
    place = world("fedsgd", train={"batch_size": 10_000}, run={"rounds": 1})
    whole = world("central", train={"batch_size": 10_000}, run={"rounds": 1})
    expected, steps = descend(whole, begin(place).tensors, 0, 0)
    assert steps == 1
    close(server_of(run("fedsgd", tmp_path, run={"rounds": 1})), expected)


def test_local_clients_train_alone(tmp_path):
    place, result = world("local"), run("local", tmp_path)
    found = final(result)
    for client in range(3):
        expected = begin(place).tensors
        for round in range(2):
            expected, _ = descend(place, expected, client, round)
        mark = f"client{client}/own/"
        close({n.removeprefix(mark): t for n, t in found.items() if n.startswith(mark)}, expected)
    same(server_of(result), begin(place).tensors)
    assert [row["global_accuracy"] for row in rows(result)] == [None, None]
    assert result.summary["global_accuracy"] is None
    assert result.summary["best_global_accuracy"] is None
    assert result.summary["local_accuracy"] > 0.2


def test_local_sends_no_model(tmp_path):
    entries = [entry for entry in run("local", tmp_path).rows("clients") if entry["job"] == "work"]
    assert {entry["parameters"] for entry in entries} == {0}
    assert max(entry["upload_bytes"] + entry["download_bytes"] for entry in entries) < 1500


def test_local_clients_that_are_not_chosen_stay(tmp_path):
    result = run("local", tmp_path, select={"fraction": 0.34}, run={"rounds": 1})
    assert sum(name.startswith("client") for name in final(result)) == 4, "one client's four tensors"


def test_local_refuses_a_cut_that_it_would_ignore():
    """It passes as a method for weak devices, and trains the whole model on them."""
    with pytest.raises(InputError, match="local"):
        study_of("local", cut={"name": "prefix"})


@pytest.mark.parametrize("epochs", [1, 2])
def test_central_is_plain_descent_on_all_data(epochs, tmp_path):
    study = {"train": {"epochs": epochs}}
    place = world("central", **study)
    expected = begin(place).tensors
    for round in range(2):
        expected, steps = descend(place, expected, 0, round)
        assert steps == epochs * 8, "120 pictures, 16 a batch"
    result = run("central", tmp_path, **study)
    close(server_of(result), expected)
    work = [entry for entry in result.rows("clients") if entry["job"] == "work"]
    assert [(entry["client"], entry["samples"]) for entry in work] == [(0, epochs * 120)] * 2


def test_central_sees_the_training_parts_only(tmp_path):
    place = world("central", data={"validation": 0.25, "public": 10})
    seen = place.client(Task(0, 0), {}).train.rows
    held_back = torch.from_numpy(place.split.validation.rows)
    assert len(seen) == place.split.train.sizes.sum() < 110
    assert not set(seen.tolist()) & (set(held_back.tolist()) | set(place.split.public.tolist()))


def test_central_does_not_depend_on_the_partition(tmp_path):
    """Up to the order of the pooled rows: the same pictures, the same number of steps."""
    counts = []
    for name in ("iid", "classes:2"):
        place = world("central", partition={"name": name}, fleet={"clients": 5})
        counts.append(sorted(place.split.train.rows.tolist()))
    assert counts[0] == counts[1]


def test_central_with_a_selection_of_several_is_refused():
    """Ten clients that each train on everybody's data and are averaged are not what federation could reach."""
    with pytest.raises(InputError, match="central"):
        study_of("central", select={"name": "uniform"})
