"""Policies mix freely: what is shared, who trains and how the server moves are questions of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedloom.errors import InputError
from fedloom.registry import find
from fedloom.types import Task
from tests.contract.study import final, rows
from tests.methods.tiny import NORMED, begin, run, same, server_of, study_of, world

FEDERATED = ["fedavg", "fedsgd", "fedprox", "fednova", "scaffold", "fedavgm", "fedadam", "fedyogi"]
every_method = pytest.mark.parametrize("method", FEDERATED)


@every_method
def test_own_norm_layers_under_any_method(method, tmp_path):
    place = world(method, **NORMED)
    norms = place.network.norms
    result = run(method, tmp_path, share={"name": "fedbn"}, **NORMED)
    first, last = begin(place).tensors, server_of(result)
    assert norms
    same({name: last[name] for name in norms}, {name: first[name] for name in norms})
    shared = set(first) - norms
    assert all(not torch.equal(last[name], first[name]) for name in shared)
    own = [{n for n in final(result) if n.startswith(f"client{client}/own/")} for client in range(3)]
    assert all({name.partition("/own/")[2] for name in each} == norms for each in own)
    assert rows(result)[-1]["global_accuracy"] is None
    whole = run(method, tmp_path, **NORMED).rows("clients")[0]["parameters"]
    assert result.rows("clients")[0]["parameters"] == whole - sum(first[name].numel() for name in norms)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedsgd"])
def test_a_cut_under_methods_that_know_nothing_of_it(method, tmp_path):
    fleet = {"name": "mixed", "clients": 3, "capacities": [0.25, 0.5]}
    result = run(method, tmp_path, cut={"name": "prefix"}, fleet=fleet)
    first, last = begin(world()).tensors, server_of(result)
    hidden = "classifier.1.weight"
    assert torch.equal(last[hidden][4:], first[hidden][4:]), "units that nobody holds never move"
    assert not torch.equal(last[hidden][:4], first[hidden][:4])


def test_fedbn_is_fedavg_that_shares_less(tmp_path):
    one, two = (
        final(run("fedbn", tmp_path, **NORMED)),
        final(run("fedavg", tmp_path, share={"name": "fedbn"}, **NORMED)),
    )
    same(*({name: t for name, t in each.items() if name != "fleet/seconds"} for each in (one, two)))


@every_method
def test_part_of_the_clients(method, tmp_path):
    result = run(method, tmp_path, select={"fraction": 0.67}, run={"rounds": 3})
    asked = [entry for entry in result.rows("clients") if entry["job"] == "work"]
    assert [sum(entry["round"] == round for entry in asked) for round in range(3)] == [2, 2, 2]


@every_method
def test_settings_of_the_preset_are_its_documented_ones(method):
    assert study_of(method).method.fields == {}
    assert find("method", method).__doc__


@pytest.mark.parametrize("method", ["scaffold", "gossip", "local", "fedrkd"])
def test_a_filter_that_would_not_cover_what_leaves_is_refused(method):
    with pytest.raises(InputError, match=r"leave \[filter\] out"):
        world(method, filter={"name": "clip"}).check()


@pytest.mark.parametrize(("method", "slot", "policy"), [
    ("gossip", "select", {"fraction": 0.5}),
    ("metafed", "select", {"name": "chfl"}),
    ("fedrkd", "select", {"name": "round_robin"}),
    ("gossip", "merge", {"name": "momentum"}),
    ("local", "merge", {"name": "momentum"}),
    ("local", "start", {"name": "adaptive"}),
    ("local", "share", {"name": "static"}),
    ("serial", "cut", {"name": "prefix"}),
    ("serial", "start", {"name": "adaptive"}),
    ("serial", "merge", {"name": "median"}),
    ("fedamp", "merge", {"weights": "equal"}),
])  # fmt: skip
def test_a_policy_that_would_change_nothing_is_refused(method, slot, policy):
    with pytest.raises(InputError, match=rf"{method} .*leave \[{slot}\] out"):
        world(method, **{slot: policy}).check()


def test_a_deadline_needs_a_trainer_that_looks_between_steps():
    with pytest.raises(InputError, match="does not stop between them"):
        world(engine={"deadline": 5.0, "trainer": "stacked"}).check()
    assert world(engine={"deadline": 5.0}).settled.engine.trainer == "taped"


def test_fedsgd_shows_a_single_sample_twice_in_one_batch():
    client = replace(world("fedsgd", **NORMED).client(Task(0, 0), {}))
    alone = replace(client, train=replace(client.train, rows=client.train.rows[:1]))
    assert [len(step[0]) for step in find("method", "fedsgd")().plan(alone).steps] == [2]
