"""Memory of a training step, computed."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch

from fedloom.engine.reference import Reference
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD
from fedloom.steps import Descent
from fedloom.types import Fit, Images, Plan


def network_of(model: str, **fields: object) -> Network:
    return Network(partial(build, model, channels=1, classes=10, size=8, **fields), (1, 8, 8), 10)


def test_a_perceptron_saves_its_hidden_activations():
    network = network_of("mlp", hidden=[16])
    assert network.saved_bytes(network.initial(0), 4) == 4 * 16 * 4  # samples, units, bytes


@pytest.mark.parametrize("batch", [1, 8])
def test_activations_shrink_with_the_width(batch):
    network = Network(partial(build, "resnet18", channels=3, classes=10, size=32), (3, 32, 32), 10)
    tensors, kept = network.initial(0), network.units.kept(0.25)
    small = network.units.take(tensors, {group: torch.arange(number) for group, number in kept.items()})
    assert network.saved_bytes(small, batch) == pytest.approx(network.saved_bytes(tensors, batch) / 4, rel=0.01)


@pytest.mark.parametrize(("optimizer", "copies"), [(SGD(), 2), (SGD(momentum=0.9), 3)])
def test_a_fit_tells_tensors_gradients_slots_and_activations(optimizer, copies):
    network = network_of("mlp", hidden=[16])
    half = torch.full((1, 1, 1), 0.5)
    images = Images(torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.zeros(6, dtype=torch.long), half, half)
    plan = Plan(images, [(torch.arange(4),), (torch.arange(2),)], [0, 0], 2, 0)
    tensors = network.initial(0)
    fit = Fit(tensors, Descent(CrossEntropy(), optimizer), plan, {"lr": torch.tensor(0.1)})
    (fitted,) = Reference(network).solve([fit])
    assert fitted.step_memory == copies * sum(t.nbytes for t in tensors.values()) + 4 * 16 * 4


def test_training_does_not_import_the_compiler():
    """It costs a second or two and 100 MB a process; counting operations or touching the meta device would bring it."""
    code = (
        "import sys, tempfile, fedloom\n"
        "with tempfile.TemporaryDirectory() as out:\n"
        "    fedloom.run('fedavg', clients=2, rounds=1, engine='local', out=out, set={'data.limit': 60})\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
