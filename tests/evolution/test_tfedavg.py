"""T-FedAvg: the ternary step by hand, in every trainer; payloads of two bits a weight; the way down."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import pytest
import torch

from fedloom.encoding import Ternary, dense
from fedloom.engine.reference import Eager
from fedloom.engine.stacked import Stacked, timetable
from fedloom.errors import InputError
from fedloom.methods.tfedavg import Quantised, TFedAvg, ternary, weights_of
from fedloom.policies.objective import CrossEntropy
from fedloom.types import Fit, Report
from tests.methods.tiny import close, run
from tests.submodels.federation import Federation

DEEP = {"model": {"name": "mlp", "hidden": [6, 5]}}
NORMED = {"model": {"name": "lenet5_bn", "hidden": None}}


def test_ternary_by_hand():
    weight = torch.tensor([[0.9, -0.1], [-0.5, 0.02]])  # mean 0.38, threshold 0.266
    hard, slope = ternary(weight, 0.7)
    assert torch.allclose(hard, torch.tensor([[0.7, 0.0], [-0.7, 0.0]]))
    assert torch.allclose(slope, torch.tensor([[0.7, 1.0], [0.7, 1.0]]))


def test_all_zero_and_all_equal_layers():
    hard, slope = ternary(torch.zeros(5), 0.7)
    assert torch.equal(hard, torch.zeros(5))
    assert torch.equal(slope, torch.ones(5))
    flat = torch.tensor([0.25, -0.25, 0.25])
    assert torch.equal(ternary(flat, 0.0)[0], flat)  # lossless
    assert torch.equal(ternary(flat, 5.0)[0], torch.zeros(3))  # nothing above the threshold


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 2, 3, 3)])
def test_payload_is_two_bits_a_weight_and_decodes_exactly(shape):
    hard, _ = ternary(torch.randn(shape, generator=torch.Generator().manual_seed(1)), 0.7)
    assert 1 < len(hard.unique()) <= 3
    value = Ternary.of(hard)
    assert value.nbytes == ceil(hard.numel() / 4) + 4
    assert torch.equal(value.decode(), hard)


def test_the_gradient_passes_straight_through():
    """d loss / d W = slope * d loss / d W^, with the loss taken of the ternary model."""
    federation = Federation("tfedavg", **DEEP)
    network, tensors = federation.network, federation.server.tensors
    (name,) = weights_of(network)
    images, rows = federation.world.images, torch.arange(12)
    model, batch = Eager(network, training=True), images.batch(rows)
    latent = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    grads, losses = model.grad(lambda seen: Quantised(CrossEntropy(), False, 0.7)(model, seen, batch, {}), latent)
    hard, slope = ternary(tensors[name], 0.7)
    seen = {n: (hard if n == name else t).clone().requires_grad_() for n, t in tensors.items()}
    expected, plain = model.grad(lambda seen: CrossEntropy()(model, seen, batch, {}), seen)
    assert torch.allclose(losses, plain)
    for n, grad in expected.items():
        assert torch.allclose(grads[n], grad * slope if n == name else grad), n


def test_weights_of_one_magnitude_have_fedavgs_loss_and_w_times_its_gradient():
    federation = Federation("tfedavg", **DEEP)
    network, batch = federation.network, federation.world.images.batch(torch.arange(12))
    (name,), model = weights_of(network), Eager(network, training=True)
    alike = {n: 0.25 * t.sign() if n == name else t.clone() for n, t in federation.server.tensors.items()}
    latent = {n: tensor.requires_grad_() for n, tensor in alike.items()}
    plain, quantised = (
        model.grad(lambda seen, one=one: one(model, seen, batch, {}), latent)
        for one in (CrossEntropy(), Quantised(CrossEntropy(), False, 0.0))
    )
    assert torch.equal(plain[1], quantised[1])
    close(quantised[0], {n: 0.25 * grad if n == name else grad for n, grad in plain[0].items()})


@pytest.mark.parametrize("changes", [DEEP, NORMED], ids=["mlp", "lenet5_bn"])
def test_stacked_equals_reference(changes):
    federation = Federation("tfedavg", **changes)
    fits = [federation.first_request(number) for number in range(3)]
    assert all(isinstance(fit, Fit) for fit in fits)
    alone = federation.world.trainer.solve(fits)
    together = Stacked(federation.network)._together(fits, timetable([fit.plan for fit in fits]))
    for one, two in zip(alone, together, strict=True):
        close(one.tensors, two.tensors, 1e-9)


def test_traffic_is_ternary_both_ways():
    federation = Federation("tfedavg", **NORMED)
    names = weights_of(federation.network)
    assert names == [n for n, t in federation.network.module.named_parameters() if t.ndim > 1][1:-1]
    federation.round()
    assert not any(isinstance(v, Ternary) for task in federation.engine.tasks for v in task.tensors["model"].values())
    federation.round()
    reports = [outcome.report.tensors for outcome in federation.engine.outcomes]
    for model in [*(task.tensors["model"] for task in federation.engine.tasks), *reports]:
        for name, value in model.items():
            assert isinstance(value, Ternary) == (name in names), name
            if name in names:
                assert len(dense(value).unique()) <= 3
                size = 4 if federation.network.dtype == torch.float32 else 8
                assert value.nbytes == ceil(dense(value).numel() / 4) + size
    for name in names:  # what is evaluated is what is sent
        assert len(federation.server.tensors[name].unique()) <= 3


def test_a_round_by_hand():
    federation = Federation("tfedavg", **DEEP)
    after = federation.round().tensors
    outcomes = federation.engine.outcomes
    weight = sum(outcome.report.weight for outcome in outcomes)
    for name, tensor in after.items():
        mean = sum(outcome.report.weight * dense(outcome.report.tensors[name]) for outcome in outcomes) / weight
        expected = ternary(mean, 0.7)[0] if name in weights_of(federation.network) else mean
        assert torch.allclose(tensor, expected, rtol=0, atol=1e-12), name


@pytest.mark.parametrize(("gap", "sent"), [(0.031, True), (0.03, False), (0.0, False)])
def test_full_weights_go_down_where_ternary_ones_lose_too_much(gap, sent, monkeypatch):
    """Full weights get 50 of 100 public images right, ternary ones 47: the fall-back is at a loss of exactly 0.03."""
    federation = Federation(
        "tfedavg", **DEEP, data={"public": 100, "limit": 400}, method={"gap": gap}, train={"lr": 2.0}
    )
    right = iter([50.0, 47.0])
    monkeypatch.setattr(
        federation.fleet, "solve", lambda *asked: [{"right": torch.tensor([next(right)])} for _ in asked]
    )
    federation.round()
    assert (federation.server.memory["ternary"] is not None) is sent
    (name,) = weights_of(federation.network)
    assert (len(federation.server.tensors[name].unique()) <= 3) is sent


def test_up_only():
    federation = Federation("tfedavg", **DEEP, method={"down": False}, train={"lr": 2.0})
    federation.round()
    (name,) = weights_of(federation.network)
    assert isinstance(federation.engine.outcomes[0].report.tensors[name], Ternary)
    assert len(federation.server.tensors[name].unique()) > 3
    federation.round()
    assert not isinstance(federation.engine.tasks[0].tensors["model"][name], Ternary)


def test_shallow_models_need_all_layers(tmp_path):
    with pytest.raises(InputError, match=r"tfedavg leaves the first and the last layer alone"):
        Federation("tfedavg")
    assert run("tfedavg", tmp_path, method={"layers": "all"}).summary["failures"] == 0


def test_under_a_cut(tmp_path):
    """Weak devices get narrower ternary weights."""
    changes = {**NORMED, "fleet": {"name": "low", "clients": 4}, "cut": {"name": "prefix"}}
    result = run("tfedavg", tmp_path, **changes, engine={"precision": "float32"})
    assert result.summary["failures"] == 0


@dataclass(frozen=True)
class Watched(TFedAvg):
    """Looks at what a client sends."""

    def report(self, client, fit, where=None) -> Report:
        report = super().report(client, fit, where)
        for name in self.names(client.network):
            assert torch.equal(dense(report.tensors[name]), ternary(fit.tensors[name], self.threshold)[0])
        return report


def test_it_learns_and_costs_a_fraction(tmp_path):
    changes = {
        "data": {"limit": 600}, "model": {"name": "mlp", "hidden": [64, 64, 32]}, "fleet": {"clients": 4},
        "train": {"lr": 0.2, "epochs": 2}, "run": {"rounds": 12}, "engine": {"precision": "float32"},
    }  # fmt: skip
    full = run("fedavg", tmp_path, **changes).summary
    small = run(f"{__name__}:Watched", tmp_path, **changes).summary
    assert small["failures"] == 0
    assert small["global_accuracy"] > 0.6
    assert small["upload_bytes"] < 0.7 * full["upload_bytes"]


@pytest.mark.parametrize("objective", ["soft", "features"])
def test_a_ternary_model_can_learn_from_a_teacher(objective, tmp_path):
    """The objective that is made ternary keeps its teacher, and its third of a pass."""
    taught, plain = (run("tfedavg", tmp_path, **DEEP, **more) for more in ({"objective": {"name": objective}}, {}))
    assert not [entry["reason"] for entry in taught.rows("clients") if entry["failed"]]
    assert taught.summary["train_macs"] == pytest.approx(plain.summary["train_macs"] * 4 / 3, rel=1e-3)
