"""Stacked clients that differ in everything a plan can differ in are what each would be alone."""

from __future__ import annotations

import pytest
import torch

from fedloom.engine.reference import Reference
from fedloom.engine.stacked import Stacked
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD, Adam
from fedloom.steps import Descent
from fedloom.types import Fit, Train
from tests.core.small import Normed, Plain, client_of, images_of, network_of

OPTIMIZERS = [SGD(), SGD(0.9, 0.1), Adam(), Adam(0.1), Adam(0.1, decoupled=True)]


@pytest.mark.parametrize("model", [Plain, Normed])
@pytest.mark.parametrize("batch", [4, 1000], ids=["short last batches", "every client its own size"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_unequal_plans_under_every_optimiser(optimizer, batch, model, monkeypatch):
    monkeypatch.setattr(Stacked, "most_waste", 100.0)
    together, asked = Stacked._together, []
    monkeypatch.setattr(Stacked, "_together", lambda self, *fits: (asked.append(1), together(self, *fits))[1])
    network, images = network_of(model, torch.float64), images_of(dtype=torch.float64)
    train, step = Train(lr=0.05, batch_size=batch, epochs=3), Descent(CrossEntropy(), optimizer, clip=1.0)
    clients = [client_of(rows, network, images, train=train) for rows in (range(12), range(12, 19), range(20, 25))]
    fits = [Fit(network.initial(0), step, client.plan(), client.fixed()) for client in clients]
    for one, other in zip(Reference(network).solve(fits), Stacked(network).solve(fits), strict=True):
        assert (one.steps, one.samples) == (other.steps, other.samples)
        assert one.loss == pytest.approx(other.loss, abs=1e-12)
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(other.tensors[name], tensor, rtol=0, atol=1e-9)
    assert asked
