"""FedProx: Li et al., MLSys 2020 (behaviour sheet, section 8)."""

from __future__ import annotations

import pytest
import torch

from fedloom.policies.objective import Proximal
from tests.contract.study import rows
from tests.methods.tiny import NORMED, begin, close, descend, far, numbers, run, same, server_of, world

ONE = {"fleet": {"clients": 1}, "partition": {"name": "iid"}, "run": {"rounds": 1}, "data": {"limit": 80}}


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_without_mu_it_is_fedavg_bit_for_bit(precision, tmp_path):
    train = {"momentum": 0.9, "weight_decay": 1e-3, "clip": 1.0}
    model = NORMED["model"] if precision == "float32" else {}
    study = {"model": model, "train": train, "engine": {"precision": precision}}
    prox, plain = run("fedprox", tmp_path, method={"mu": 0.0}, **study), run("fedavg", tmp_path, **study)
    same(server_of(prox), server_of(plain))
    assert numbers(prox) == numbers(plain)


def test_with_mu_it_is_not(tmp_path):
    assert far(server_of(run("fedprox", tmp_path)), server_of(run("fedavg", tmp_path))) > 1e-6


@pytest.mark.parametrize("mu", [0.01, 3.0])
def test_gradient_of_the_term(mu):
    generator = torch.Generator().manual_seed(0)
    here, anchor = ({n: torch.randn(3, 2, generator=generator, dtype=torch.float64) for n in "ab"} for _ in range(2))
    leaves = {name: tensor.requires_grad_() for name, tensor in here.items()}
    term = Proximal(mu)(leaves, {"anchor": anchor})
    squares = sum((here[n] - anchor[n]).detach().square().sum() for n in "ab")
    assert float(term.detach()) == pytest.approx(mu / 2 * float(squares))
    for name, slope in zip(leaves, torch.autograd.grad(term, list(leaves.values())), strict=True):
        assert torch.allclose(slope, mu * (here[name] - anchor[name]).detach(), rtol=1e-14)
    at_anchor = {name: tensor.clone().requires_grad_() for name, tensor in anchor.items()}
    for slope in torch.autograd.grad(Proximal(mu)(at_anchor, {"anchor": anchor}), list(at_anchor.values())):
        assert not slope.any(), "no NaN and no pull where the client starts"


def test_a_round_is_the_one_by_hand(tmp_path):
    """From the first step on; the anchor is the received model, not a moving one."""
    place = world("fedprox", **ONE)
    expected, steps = descend(place, begin(place).tensors, 0, 0, mu=2.0)
    assert steps == 5
    close(server_of(run("fedprox", tmp_path, method={"mu": 2.0}, **ONE)), expected)


def test_a_large_mu_keeps_the_weights_at_the_start(tmp_path):
    first, moved = begin(world(**ONE)).tensors, []
    for mu, lr in ((0.0, 0.1), (1.0, 0.1), (10.0, 0.1), (1e4, 1e-4), (1e8, 1e-8)):
        study = ONE | {"train": {"lr": lr, "epochs": 4}}
        moved.append(far(server_of(run("fedprox", tmp_path, method={"mu": mu}, **study)), first))
    assert moved == sorted(moved, reverse=True)
    # with eta mu = 1 every step ends one plain step away from the start, however many there are
    assert moved[2] <= 0.1
    assert moved[-1] <= 1e-8


def test_the_reported_loss_is_that_of_the_data_alone(tmp_path):
    """The term is no part of train_loss, so that methods compare."""
    step = ONE | {"train": {"steps": 1}}
    losses = [rows(run(name, tmp_path, **step))[0]["train_loss"] for name in ("fedavg", "fedprox")]
    assert losses[0] == losses[1]
