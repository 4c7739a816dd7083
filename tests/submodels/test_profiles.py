"""Which units clients' data excite, under the model of a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedloom
from fedloom.errors import InputError
from fedloom.report.plots import draw_profiles
from fedloom.runs.profiles import profiles
from fedloom.runs.world import world_of
from fedloom.types import Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    settings = {"data.limit": 200, "model.hidden": [6, 5]}
    out = tmp_path_factory.mktemp("profiles")
    return fedloom.run("fedavg", set=settings, clients=3, rounds=1, out=out, model="mlp", engine="local").folder


def test_they_are_the_means_of_the_activations(folder):
    found = profiles(folder, [0, 2])
    assert list(found) == [0, 2]
    world = world_of((folder / "study.json").read_text(), folder / "split.npz")
    part = world.client(Task(2, 1), {}).train
    model = load_file(folder / "model.safetensors")
    hidden = part.images.batch(part.rows).x.flatten(1)
    for (group, values), (weight, bias) in zip(
        found[2].items(), [("classifier.1.weight", "classifier.1.bias"), ("classifier.3.weight", "classifier.3.bias")],
        strict=True,
    ):  # fmt: skip
        hidden = torch.relu(hidden @ model[weight].T + model[bias])
        np.testing.assert_allclose(values, hidden.mean(0).numpy(), rtol=1e-5, err_msg=group)


def test_the_picture(folder, tmp_path):
    assert draw_profiles(profiles(folder, [0, 1, 2]), tmp_path / "picture.png").stat().st_size > 10_000


def test_a_client_that_is_not_there(folder):
    with pytest.raises(InputError, match=r"client 7 is not in .* allowed: 0 to 2"):
        profiles(folder, [0, 7])
