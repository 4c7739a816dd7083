"""FedNAS: the bilevel step by hand, alpha averaged, genotypes, and the search space as a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedloom.encoding import dense
from fedloom.errors import InputError
from fedloom.methods.fednas import Bilevel
from fedloom.models.darts import OPERATIONS, genotype, random_genotype
from fedloom.models.resolve import build
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD, Adam
from fedloom.types import Fit
from tests.methods.tiny import close, run, server_of
from tests.submodels.federation import Federation, solved

SPACE = {
    "model": {"name": "darts_search", "hidden": None, "width": 2, "cells": 2, "nodes": 1},
    "data": {"validation": 0.3},
}
ALPHA = ("normal", "reduce")


def gradient(tensors, batch):
    """Of the mean cross-entropy, with nothing of fedloom but the module; statistics of norms are left alone."""
    fields = {key: value for key, value in SPACE["model"].items() if value is not None}
    module = build(fields.pop("name"), channels=1, classes=10, size=8, **fields)
    buffers = {name: tensors[name].clone() for name, _ in module.named_buffers()}
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name, _ in module.named_parameters()}
    loss = F.cross_entropy(functional_call(module, {**leaves, **buffers}, (batch.x,)), batch.y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize("balance", [0.0, 1.0, 0.5])
def test_a_step_by_hand(balance):
    """Alpha by torch's Adam along val + lambda train, then w by torch's SGD at the new alpha."""
    federation = Federation(
        "fednas", **SPACE, method={"balance": balance, "alpha_lr": 0.05}, train={"momentum": 0.9, "steps": 2}
    )
    fit = federation.first_request(0)
    assert len(fit.plan.steps) == 2
    found = solved(federation.world, fit)
    tensors = {name: tensor.clone() for name, tensor in fit.tensors.items()}
    leaves = {name: tensors[name] for name, _ in federation.network.module.named_parameters()}
    for tensor in leaves.values():
        tensor.requires_grad_()
    adam = torch.optim.Adam([leaves[name] for name in ALPHA], 0.05, (0.5, 0.999), weight_decay=1e-3)
    sgd = torch.optim.SGD([t for n, t in leaves.items() if n not in ALPHA], 0.1, momentum=0.9)
    for train, validation in fit.plan.steps:
        parts = [federation.world.images.batch(rows) for rows in (train, validation)]
        on_train, on_validation = (gradient(tensors, part) for part in parts)
        for name in ALPHA:
            leaves[name].grad = on_validation[name] + balance * on_train[name]
        adam.step()
        slopes = gradient(tensors, parts[0])
        for name, leaf in leaves.items():
            leaf.grad = slopes[name]
        sgd.step()
    for name, leaf in leaves.items():
        assert torch.allclose(found.tensors[name], leaf.detach(), rtol=0, atol=1e-10), name
    assert found.macs == 3 * federation.network.macs(tensors) * (3 if balance else 2) * sum(
        len(train) for train, _ in fit.plan.steps
    )


def test_validation_batches_are_validation_images():
    federation = Federation("fednas", **SPACE)
    client = federation.client(0)
    for train, validation in federation.first_request(0).plan.steps:
        assert set(train.tolist()) <= set(client.train.rows.tolist())
        assert set(validation.tolist()) <= set(client.validation.rows.tolist())


def test_weights_and_alpha_are_averaged_by_samples():
    federation = Federation("fednas", **SPACE, method={"alpha_lr": 0.1})
    after = federation.round().tensors
    outcomes = federation.engine.outcomes
    weight = sum(outcome.report.weight for outcome in outcomes)
    alphas = [dense(outcome.report.tensors["normal"]) for outcome in outcomes]
    assert not torch.allclose(alphas[0], alphas[1])
    for name in (*ALPHA, "head.weight"):
        mean = sum(outcome.report.weight * dense(outcome.report.tensors[name]) for outcome in outcomes) / weight
        assert torch.allclose(after[name], mean, rtol=0, atol=1e-12), name


def test_one_client_is_centralised_darts():
    """A federation of one is the same steps as a fit by hand, round after round."""
    federation = Federation("fednas", **SPACE, fleet={"clients": 1}, partition={"name": "iid"})
    tensors = federation.server.tensors
    for round in range(2):
        request = federation.first_request(0, round)
        tensors = solved(federation.world, replace(request, tensors=tensors)).tensors
        federation.round()
    close({n: t.double() for n, t in federation.server.tensors.items()}, {n: t.double() for n, t in tensors.items()})


def test_without_alpha_it_would_be_sgd():
    """With the architecture's rate at zero the weights move as FedAvg's do, but for the statistics of norms."""
    federation = Federation("fednas", **SPACE, train={"steps": 1})
    fit = federation.first_request(0)
    still = Fit(fit.tensors, fit.step, fit.plan, {**fit.fixed, "alpha_lr": torch.zeros((), dtype=torch.float64)})
    found = solved(federation.world, still).tensors
    rows, _ = fit.plan.steps[0]
    batch = federation.world.images.batch(rows)
    slopes = gradient(fit.tensors, batch)
    for name, _ in federation.network.module.named_parameters():
        moved = 0 if name in ALPHA else 0.1 * slopes[name]
        assert torch.allclose(found[name], fit.tensors[name] - moved, rtol=0, atol=1e-12), name


def test_two_memories_do_not_meet():
    step = Bilevel(CrossEntropy(), ("a",), Adam(), Adam(beta1=0.5), 1.0)
    slots = step.slots({"a": torch.zeros(2), "b": torch.zeros(3)})
    assert {kind: set(slot) for kind, slot in slots.items() if "taken" not in kind} == {
        "alpha first": {"a"}, "alpha second": {"a"}, "w first": {"b"}, "w second": {"b"},
    }  # fmt: skip
    assert Bilevel(CrossEntropy(), ("a",), SGD(), Adam(), 0.0).passes == 2


def test_genotype_ignores_a_constant_and_none():
    alpha = torch.randn(5, len(OPERATIONS), generator=torch.Generator().manual_seed(2))
    assert genotype(alpha) == genotype(alpha + torch.tensor([[3.0], [-1.0], [0.0], [7.0], [2.0]]))
    loud = alpha.clone()
    loud[:, 0] = -50.0
    assert not any(edge.startswith("none") for edge in genotype(alpha))
    assert [edge.split(":")[0] for edge in genotype(loud)]
    by_hand = torch.full((5, 6), -9.0)
    by_hand[0, 4], by_hand[1, 1] = 9.0, 8.0  # node 0 takes both of its inputs
    by_hand[2, 2], by_hand[3, 3], by_hand[4, 5] = 1.0, 5.0, 9.0  # node 1 takes its two strongest
    assert genotype(by_hand) == ["sep3:0", "skip:1", "avg3:1", "dil3:2"]


def test_every_structure_that_can_be_found_can_be_built():
    for seed in range(4):
        found = random_genotype(seed, nodes=3)
        made = build("darts", channels=1, classes=4, size=8, nodes=3, width=2, **{k: list(v) for k, v in found.items()})
        assert made(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    assert random_genotype(1, 2) == random_genotype(1, 2) != random_genotype(2, 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "needs its edges"),
        ({"normal": ["sep3:0"], "reduce": ["sep3:0"]}, "needs two edges a node, 4 for 2 nodes; got 1"),
        ({"normal": ["sep4:0"] * 4, "reduce": ["sep3:0"] * 4}, "Did you mean 'sep3'?"),
        ({"normal": ["sep3:2"] * 4, "reduce": ["sep3:0"] * 4}, "edge 'sep3:2' of node 0 must be operation:input"),
    ],
)
def test_structures_that_cannot_be_are_refused(fields, said):
    with pytest.raises(InputError) as error:
        build("darts", channels=1, classes=10, size=8, **fields)
    assert said in str(error.value)


def test_a_model_without_an_architecture_is_refused():
    with pytest.raises(InputError, match="fednas needs a model with an architecture"):
        Federation("fednas", data={"validation": 0.2})


def test_search_then_train_what_was_found(tmp_path):
    small = {"engine": {"precision": "float32"}, "run": {"rounds": 2}}
    space = {"name": "darts_search", "hidden": None, "width": 4, "cells": 3}
    result = run("fednas", tmp_path, **small, model=space, data={"validation": 0.2}, method={"alpha_lr": 0.05})
    found = result.summary["found"]
    tensors = server_of(result)
    assert found == {kind: genotype(tensors[kind]) for kind in ALPHA}
    model = {"name": "darts", "hidden": None, "width": 4, "cells": 3, **found}
    assert run("fedavg", tmp_path, **small, model=model).summary["failures"] == 0
