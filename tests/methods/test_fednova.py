"""FedNova: Wang et al., NeurIPS 2020 (behaviour sheet, section 9)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedloom.errors import FedloomError, InputError
from fedloom.methods.fednova import normaliser
from fedloom.policies.merge import Mean
from fedloom.policies.normalised import Normalised
from fedloom.types import Report
from tests.methods.tiny import NORMED, begin, close, descend, far, run, server_of, study_of, world

EQUAL = {"train": {"steps": 3}}


@pytest.mark.parametrize("model", [{}, NORMED])
def test_equal_steps_make_it_fedavg(model, tmp_path):
    nova, plain = (server_of(run(name, tmp_path, **EQUAL, **model)) for name in ("fednova", "fedavg"))
    close(nova, plain, 1e-6 if model else 1e-12)


def test_equal_steps_with_momentum_make_it_fedavg_too(tmp_path):
    """a_i is the same for all, whatever it is."""
    study = {"train": {"steps": 3, "momentum": 0.9}}
    close(server_of(run("fednova", tmp_path, **study)), server_of(run("fedavg", tmp_path, **study)))


def test_unequal_steps_do_not(tmp_path):
    assert far(server_of(run("fednova", tmp_path)), server_of(run("fedavg", tmp_path))) > 1e-4


def test_a_round_is_the_one_by_hand(tmp_path):
    place = world("fednova", run={"rounds": 1}, train={"epochs": 2})
    first = begin(place).tensors
    sizes = place.split.train.sizes
    shares = [float(size) / float(sizes.sum()) for size in sizes]
    ended = [descend(place, first, client, 0) for client in range(3)]
    taus = [steps for _, steps in ended]
    assert len(set(taus)) > 1, "the clients must differ for this to say anything"
    effective = sum(p * tau for p, tau in zip(shares, taus, strict=True))
    expected = {
        name: w - effective * sum(p * (w - end[name]) / tau for p, (end, tau) in zip(shares, ended, strict=True))
        for name, w in first.items()
    }
    close(server_of(run("fednova", tmp_path, run={"rounds": 1}, train={"epochs": 2})), expected)


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("tau", [1, 2, 7, 50])
def test_normaliser_of_momentum(rho, tau):
    assert normaliser(tau, rho, 0.0) == pytest.approx((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho))


@pytest.mark.parametrize("shrink", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("tau", [1, 2, 7, 50])
def test_normaliser_of_the_proximal_term(shrink, tau):
    assert normaliser(tau, 0.0, shrink) == pytest.approx((1 - (1 - shrink) ** tau) / shrink)


def test_normaliser_of_plain_steps():
    assert [normaliser(tau, 0.0, 0.0) for tau in (1, 2, 9)] == [1, 2, 9]
    assert [normaliser(1, rho, shrink) for rho in (0.0, 0.9) for shrink in (0.0, 0.5)] == [1, 1, 1, 1]


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 3.0), (0.9, 3.0), (0.5, 10.0)])
def test_normaliser_is_what_steps_amount_to_under_a_constant_gradient(rho, mu):
    """With torch's SGD: the distance is eta a times the gradient."""
    eta, tau, slope = 0.05, 9, torch.tensor([1.0, -2.0], dtype=torch.float64)
    at = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([at], eta, momentum=rho)
    for _ in range(tau):
        optimiser.zero_grad()
        ((at * slope).sum() + mu / 2 * at.square().sum()).backward()
        optimiser.step()
    assert torch.allclose(at.detach(), -eta * normaliser(tau, rho, eta * mu) * slope, rtol=1e-12)


def test_the_clients_settings_reach_the_normaliser(tmp_path):
    changes = {"method": {"mu": 0.5}, "train": {"momentum": 0.3, "lr": 0.2, "steps": 4}}
    found = {entry["normaliser"] for entry in run("fednova", tmp_path, **changes).rows("clients") if "steps" in entry}
    assert sorted(found) == [pytest.approx(normaliser(4, 0.3, 0.1))]


def test_under_adam_a_client_counts_its_steps(tmp_path):
    changes = {"train": {"optimizer": "adam", "lr": 0.01}, "method": {"mu": 0.1}, "run": {"rounds": 1}}
    for entry in run("fednova", tmp_path, **changes).rows("clients"):
        if entry["job"] == "work":
            assert entry["normaliser"] == entry["steps"]


def quadratic(merge, taus, rounds=1500, eta=0.01):
    """Two clients with (x - b)^2 / 2, b = 0 and 1, weights 1 and 3: where do rounds of plain descent end?"""
    server, bias = begin(world()), "classifier.3.bias"
    for _ in range(rounds):
        joined = merge.begin(server)
        for optimum, weight, tau in zip((0.0, 1.0), (1.0, 3.0), taus, strict=True):
            x = optimum + (1 - eta) ** tau * (server.tensors[bias] - optimum)
            joined.add(Report({bias: x}, weight, {"normaliser": float(tau), "steps": float(tau)}))
        server = replace(server, tensors=joined.result())
    return float(server.tensors[bias].mean())


def test_twice_the_steps_do_not_move_the_optimum():
    assert quadratic(Mean(), (4, 4)) == pytest.approx(0.75, abs=1e-6)
    assert quadratic(Mean(), (8, 4)) == pytest.approx(0.6, abs=0.02), "FedAvg: weights times steps, 3 * 4 / (8 + 12)"
    assert quadratic(Normalised(), (8, 4)) == pytest.approx(0.75, abs=0.01)


def reports(server, taus=(1, 3)):
    moved = [{name: t + scale for name, t in server.tensors.items()} for scale in (1.0, 2.0)]
    return [
        Report(tensors, weight, {"normaliser": float(tau), "steps": float(tau)})
        for tensors, weight, tau in zip(moved, (1.0, 3.0), taus, strict=True)
    ]


def joined(rule, server, given):
    merge = rule.begin(server)
    for report in given:
        merge.add(report)
    return merge.result()


def test_hand_computed_merge():
    """p = 1/4, 3/4; a = 1, 3; moves 1, 2: tau_eff = 2.5, move = 2.5 (1/4 + 3/4 * 2/3) = 1.875."""
    server = begin(world())
    close(joined(Normalised(), server, reports(server)), {n: t + 1.875 for n, t in server.tensors.items()})


def test_who_took_no_step_moves_nothing():
    server = begin(world())
    after = joined(Normalised(), server, [replace(each, numbers={"normaliser": 0}) for each in reports(server)])
    assert all(torch.equal(after[name], server.tensors[name]) for name in after if name not in server.network.buffers)


def test_tau_eff_may_be_the_mean_number_of_steps():
    server = begin(world())
    given = [replace(report, numbers={**report.numbers, "steps": 10.0}) for report in reports(server)]
    found = joined(Normalised(effective="steps"), server, given)
    close(found, {name: t + 7.5 for name, t in server.tensors.items()})


def test_momentum_of_the_server_by_hand():
    server = begin(world())
    first, rule = server.tensors, Normalised(momentum=0.5)
    for _ in range(2):
        server = server.next(joined(rule, server, reports(server)))
    close(server.tensors, {name: t + 1.875 + (1.875 + 0.5 * 1.875) for name, t in first.items()})


def test_order_and_grouping_of_reports_do_not_matter():
    server = begin(world())
    one, two = (Normalised().begin(server) for _ in range(2))
    first, second = reports(server)
    one.add(second)
    two.add(first)
    one.combine(two.sums())
    close(one.result(), joined(Normalised(), server, [first, second]))


def test_buffers_are_plain_means():
    server = begin(world(**NORMED))
    found = joined(Normalised(), server, reports(server))
    for name in server.network.buffers:
        old = server.tensors[name]
        expected = old.double() + 0.25 * 1 + 0.75 * 2
        assert found[name].dtype == old.dtype
        assert torch.allclose(found[name].double(), expected if old.is_floating_point() else expected.round()), name


def test_a_cut_is_refused_with_the_reason():
    with pytest.raises(InputError, match="fednova cannot run under a cut: its normaliser counts steps"):
        study_of("fednova", cut={"name": "prefix"})


def test_its_merge_under_a_method_without_normalisers_is_refused(tmp_path):
    """A composition that makes no sense gets a sentence, not a KeyError in the first round."""
    with pytest.raises(FedloomError, match="normalise"):
        run("fedavg", tmp_path, merge={"name": "normalised"})


def test_a_step_that_the_proximal_term_takes_back_is_a_sentence(tmp_path):
    """eta mu = 2: two steps amount to none, and nothing can be divided by that."""
    with pytest.raises(FedloomError, match="mu"):
        run("fednova", tmp_path, method={"mu": 20.0}, train={"lr": 0.1, "steps": 2})


def test_voting_by_class_is_done_or_refused():
    """`merge.by_class` must not be taken and then ignored."""
    try:
        rule = Normalised(by_class=True)
    except (TypeError, InputError):
        return
    server = begin(world())
    first, second = reports(server)
    found = joined(
        rule, server, [replace(first, classes=torch.tensor([0])), replace(second, classes=torch.tensor([1]))]
    )
    bias = "classifier.3.bias"
    assert torch.equal(found[bias][2:], server.tensors[bias][2:]), "nobody voted for classes 2 to 9"
