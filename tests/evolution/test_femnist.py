"""FEMNIST in LEAF's layout under the MobileNet-like supernet: a writer a client, separable blocks cut as one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fedloom.runs import start
from fedloom.runs.study import resolve
from fedloom.runs.world import dataset_of, world_of
from tests.methods.tiny import server_of


@pytest.fixture
def leaf(tmp_path, monkeypatch):
    """Three writers with some of the 62 classes each, as LEAF writes them."""
    generator = np.random.default_rng(0)
    for part, each in (("train", 24), ("test", 6)):
        content = {"users": [], "num_samples": [], "user_data": {}}
        for number in range(3):
            labels = generator.integers(20 * number, 20 * number + 20, each)
            pixels = np.clip(labels[:, None] / 62 + 0.1 * generator.random((each, 784)), 0, 1)
            content["users"].append(f"f{number:04d}_{number:02d}")
            content["num_samples"].append(each)
            content["user_data"][content["users"][-1]] = {"x": pixels.round(3).tolist(), "y": labels.tolist()}
        folder = tmp_path / "femnist" / part
        folder.mkdir(parents=True)
        (folder / f"all_data_0_niid_0_keep_0_{part}_9.json").write_text(json.dumps(content))
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    for cache in (world_of, dataset_of):
        cache.cache_clear()
    yield tmp_path
    for cache in (world_of, dataset_of):
        cache.cache_clear()


def test_femnist_with_the_mobile_supernet(leaf):
    sections = {
        "method": {"name": "fedes", "first": 0.2, "sigma": 0.05},
        "data": {"name": "femnist", "validation": 0.2}, "model": {"name": "evo_mobile"},
        "partition": {"name": "writer"}, "fleet": {"clients": 3}, "train": {"lr": 0.01, "batch_size": 8},
        "engine": {"name": "local"}, "run": {"rounds": 1, "out": str(leaf / "runs")},
    }  # fmt: skip
    study = resolve(sections)
    place = world_of(study.model_dump_json())
    assert (place.dataset.classes, tuple(place.dataset.x.shape[1:])) == (62, (1, 28, 28))
    for client in range(3):  # one writer each, training and test
        rows = np.concatenate([place.split.train[client], place.split.test[client]])
        assert len(np.unique(place.dataset.groups[rows])) == 1
    assert list(place.network.units.sizes.values()) == [64, 128, 256, 512, 512, 1024, 1024]
    result = start.start(study)
    assert result.summary["failures"] == 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in server_of(result).values())
    whole = sum(tensor.numel() for tensor in server_of(result).values())
    assert result.summary["last_parameters"] < 0.1 * whole
    assert result.summary["last_forward_macs"] < 19_734_912 / 4
