"""FedCKD: who keeps its model, and when it is FedAvg."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedloom.models.resolve import build
from tests.contract.study import rows
from tests.distillation.test_ring import VALID, models
from tests.methods.tiny import NORMED, batches, begin, close, far, numbers, run, same, server_of, world


@pytest.mark.parametrize("study", [{}, NORMED, {"cut": {"name": "rolling"}, "fleet": {"name": "low"}}])
def test_above_one_it_is_fedavg(study, tmp_path):
    study = VALID | study | {"train": {"momentum": 0.9, "weight_decay": 1e-3}, "run": {"rounds": 3}}
    distilled, plain = (
        run(name, tmp_path, method=own, **study) for name, own in (("fedckd", {"mu0": 1.01}), ("fedavg", {}))
    )
    same(server_of(distilled), server_of(plain))
    # Each client uses its own model, so only what is measured of the server's agrees; and it looks at it every round.
    for one, other in zip(numbers(distilled), numbers(plain), strict=True):
        shared = [key for key in one if "local_accuracy" not in key and key not in ("train_macs", "virtual_seconds")]
        assert one["train_macs"] > other["train_macs"]
        assert {key: one[key] for key in shared} == {key: other[key] for key in shared}


@pytest.mark.parametrize("share", ["all", "static"])
def test_without_its_teacher_nothing_is_scaled(share, tmp_path):
    """Masked steps of small sub-models are those of FedAvg with the scaler off, whatever the share."""
    study = VALID | NORMED | {"cut": {"name": "prefix"}, "share": {"name": share}, "fleet": {"name": "low"}}
    study |= {"partition": {"name": "classes:4"}}
    masked = {"name": "masked", "scaler": False}
    plain = run("fedavg", tmp_path, objective=masked, **study)
    distilled = run("fedckd", tmp_path, objective={"to": "masked"}, method={"mu0": 1.01}, **study)
    same(server_of(distilled), server_of(plain))


def test_who_is_good_enough_keeps_its_model_and_learns(tmp_path):
    """One client, mu0 0: the second round by hand, from the own model towards the received one."""
    study = {"data": {"validation": 0.2, "limit": 80}, "fleet": {"clients": 1}, "partition": {"name": "iid"}}
    study |= {"model": {"name": "lenet5", "hidden": None}, "train": {"steps": 2}}
    result = run("fedckd", tmp_path, method={"mu0": 0.0}, **study)
    place = world("fedckd", **study)

    def features(tensors, x):
        module, found = build("lenet5", channels=1, classes=10, size=8), []
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(lambda layer, inputs, output: found.append(output))
        return functional_call(module, tensors, (x,)), found[-2:]

    own = begin(place).tensors
    for round in range(2):
        teacher = own  # with one client, the server's model is its own
        for x, y in batches(place, 0, round):
            leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in own.items()}
            logits, seen = features(leaves, x)
            _, aims = features(teacher, x)
            apart = sum((one - aim.detach()).square().mean() for one, aim in zip(seen, aims, strict=True))
            slopes = torch.autograd.grad(F.cross_entropy(logits, y) + apart, list(leaves.values()))
            own = {n: t - place.study.train.lr * g for (n, t), g in zip(own.items(), slopes, strict=True)}
    close(models(result)[0], own)
    close(server_of(result), own)


def test_own_models_part_from_the_servers(tmp_path):
    study = VALID | {"run": {"rounds": 3}}
    result = run("fedckd", tmp_path, method={"mu0": 0.05}, **study)
    work = [entry for entry in result.rows("clients") if entry["job"] == "work"]
    for entry in work:
        assert entry["kept"] == float(entry["validation_accuracy"] > 0.05)
    assert {entry["kept"] for entry in work} == {0.0, 1.0}
    for own in models(result).values():
        assert far(own, server_of(result)) > 1e-4


def test_own_models_are_what_is_evaluated(tmp_path):
    """After a round of plain FedAvg the own models are those before averaging."""
    result = run("fedckd", tmp_path, method={"mu0": 2.0}, run={"rounds": 1}, **VALID)
    local = run("local", tmp_path, run={"rounds": 1}, **VALID)
    assert rows(result)[0]["local_accuracy"] == rows(local)[0]["local_accuracy"]


def test_a_client_that_cuts_for_itself_may_learn_from_the_whole(tmp_path):
    study = VALID | {"model": {"name": "lenet5", "hidden": None}, "cut": {"name": "scored"}}
    study |= {"fleet": {"name": "low", "clients": 5}, "method": {"mu0": 0.0}, "partition": {"name": "iid"}}
    plain = run("fedckd", tmp_path, **study)
    adapted = run("fedckd", tmp_path, objective={"adapter": True}, **study)
    assert plain.summary["failures"] == adapted.summary["failures"] == 0
    assert far(server_of(plain), server_of(adapted)) > 1e-6
