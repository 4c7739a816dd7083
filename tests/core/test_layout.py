"""The memory layout on the CPU: chosen by a rule, written into the run, without effect on what a fit means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.bench.engine import Workload, fits_of
from fedloom.engine.reference import Reference
from fedloom.errors import InputError
from fedloom.network import Network
from fedloom.runs.start import resume, run
from fedloom.runs.store import Store
from fedloom.runs.study import resolve


class Viewing(nn.Module):
    """A network that cannot take pictures channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.output = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 64, 10)

    def forward(self, x):
        return self.output(self.convolution(x).view(len(x), -1))


class Flattening(Viewing):
    """The same, the right way."""

    def forward(self, x):
        return self.output(self.convolution(x).flatten(1))


def layout(make, shape=(3, 8, 8), **more):
    return Network(make, shape, 10, layout="auto", **more).channels_last


def test_rule():
    assert layout(Flattening)
    assert not layout(Viewing)
    assert not layout(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    assert not layout(Flattening, dtype=torch.float64)
    assert not Network(Flattening, (3, 8, 8), 10).channels_last


def test_choice_is_written_down_and_kept(tmp_path):
    result = run("fedavg", model="lenet5", rounds=1, clients=2, out=tmp_path, engine="local")
    begun = Store.open(result.folder).begun().engine
    assert (begun.layout, begun.trainer) == ("channels_last", "taped")
    assert resume(result.folder).summary["rounds"] == 1


def test_layouts_agree(tmp_path):
    ends = {}
    for name in ("contiguous", "channels_last"):
        changes = {"engine.layout": name, "engine.precision": "float64", "train.momentum": 0.9}
        result = run("fedavg", model="lenet5_bn", rounds=1, clients=2, out=tmp_path, engine="local", set=changes)
        ends[name] = result.metrics["train_loss"].tolist()
    assert ends["contiguous"] == pytest.approx(ends["channels_last"], abs=1e-9)


def test_what_leaves_a_fit_is_laid_out_as_ever():
    """Also kernels of one channel, whose strides differ though they count as contiguous."""
    network, (fit,) = fits_of(Workload("", "lenet5", (1, 28, 28), (1.0,), 4, 1), "cpu")
    network.channels_last = True
    (fitted,) = Reference(network).solve([fit])
    for name, tensor in fitted.tensors.items():
        assert tensor.stride() == torch.empty(tensor.shape).stride(), name


def test_not_for_a_gpu():
    with pytest.raises(InputError, match="layout"):
        resolve({"engine": {"layout": "channels_last", "device": "cuda"}})
