"""The graphs trainer on a CUDA made of the CPU: who may share a machine, and whose failure a failure is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedloom.engine.graphs import Graphs
from fedloom.engine.reference import Reference
from fedloom.engine.states import States
from fedloom.engine.worker import perform
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD
from fedloom.readings import Accuracy
from fedloom.steps import Descent
from fedloom.types import Fit, Measure, Report, Task, Train
from tests.contract.cuda import pretend
from tests.core.small import Place, Plain, client_of, images_of, network_of

NETWORK = network_of(Plain, torch.float64)
IMAGES = images_of(dtype=torch.float64)
STEP = Descent(CrossEntropy(), SGD())


@pytest.fixture
def graphs(monkeypatch):
    pretend(monkeypatch)
    return Graphs(NETWORK)


def fit_of(client=0, rate=0.1, step=STEP):
    rows = range(5 * client, 5 * client + 5)
    one = client_of(rows, NETWORK, IMAGES, client=client, train=Train(lr=rate, batch_size=5, steps=2))
    return Fit(NETWORK.initial(0), step, one.plan(), one.fixed())


def test_clients_with_rates_of_their_own_learn_at_them(graphs):
    fits = [fit_of(client, 0.1 * (client + 1)) for client in range(10)]
    fits += [replace(fit, fixed=dict(fits[0].fixed)) for fit in fits[1:9]]  # enough of one rate to be stacked
    for found, true in zip(graphs.solve(fits), Reference(NETWORK).solve(fits), strict=True):
        for name, tensor in true.tensors.items():
            torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Choosy:
    """An objective that does not like some models."""

    def __call__(self, model, tensors, batch, fixed):
        if tensors["last.bias"].shape[-1] != 3 or "spoilt" in fixed:
            raise ValueError("not this one")
        return CrossEntropy()(model, tensors, batch, fixed)


def test_what_an_objective_raises_is_one_clients_failure(graphs):
    good, bad = fit_of(0, step=Descent(Choosy(), SGD())), fit_of(1, step=Descent(Choosy(), SGD()))
    bad = replace(bad, fixed={**bad.fixed, "spoilt": torch.zeros(())})
    (true,), (found, failed) = Reference(NETWORK).solve([good]), graphs.solve([good, bad])
    torch.testing.assert_close(found.tensors, true.tensors, rtol=0, atol=0)
    assert isinstance(failed, ValueError)


@dataclass(frozen=True)
class Broken(Accuracy):
    """A reading that cannot be made."""

    def __call__(self, model, tensors, batch):
        raise KeyError("no such thing")


def test_what_a_reading_raises_is_an_answer_however_often_it_is_asked(graphs):
    part = client_of(range(6), NETWORK, IMAGES).train
    for _ in range(4):
        (answer,) = graphs.solve([Measure(NETWORK.initial(0), Broken(), part)])
        assert isinstance(answer, KeyError)


def test_equal_pictures_with_other_labels_are_other_data(graphs):
    other = replace(IMAGES, y=(IMAGES.y + 1) % 3)
    for images in (IMAGES, other, IMAGES):
        one = client_of(range(5), NETWORK, images, train=Train(lr=0.1, batch_size=5, steps=2))
        fit = Fit(NETWORK.initial(0), STEP, one.plan(), one.fixed())
        measures = [Measure(fit.tensors, Accuracy(), one.train)] * 4
        for found, true in zip(graphs.solve([fit, *measures]), Reference(NETWORK).solve([fit, *measures]), strict=True):
            torch.testing.assert_close(*(getattr(each, "tensors", each) for each in (found, true)), rtol=0, atol=1e-12)


def test_what_a_client_keeps_does_not_keep_its_neighbours(graphs):
    """A stack's tensors share memory; a state lives longer than the stack."""

    def work(client, task):
        fit = yield Fit(NETWORK.initial(0), STEP, client.plan(), client.fixed())
        client.state["own"] = fit.tensors
        return Report(fit.tensors)

    place, states = Place(NETWORK, IMAGES, [range(5)] * 8, {"work": work}), States()
    place.trainer = graphs
    tasks = [(Task(client, 0, train=Train(lr=0.1, batch_size=5)), {}) for client in range(8)]
    for outcome in perform(place, tasks):
        shared = outcome.state["own"]["last.weight"]
        assert shared.untyped_storage().nbytes() == 8 * shared.nbytes
        states.propose(outcome.client, (0, 0), outcome.state)
        kept = states.load(outcome.client, (0, 0))["own"]["last.weight"]
        assert kept.untyped_storage().nbytes() == kept.nbytes
        assert torch.equal(kept, shared)


def test_a_closed_trainer_holds_no_machine(graphs):
    graphs.solve([fit_of()])
    assert graphs._machines
    graphs.close()
    assert not graphs._machines
