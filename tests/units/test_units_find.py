"""Groups found in networks of every kind, and the proof that keeps a wrong group whole."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from unit_nets import IMAGE, NETS, VECTOR

from fedloom.errors import InputError
from fedloom.units import find, find_units
from fedloom.units.graph import Graph, read_graph

SIZES = {
    "plain": {"0": 6, "4": 8, "8": 9},
    "mlp": {"0": 10, "3": 7},
    "residual": {"stem": 6, "same.conv1": 6, "wider.conv1": 8, "wider.conv2": 8, "again.conv1": 8},
    "dense": {"stem": 4, "conv1": 5, "conv2": 6},
    "mobile": {"stem": 5, "expand": 8, "squeeze": 3},
    "encoder": {"up": 12},
    "encoder by hand": {"embed": 8, "up": 12},
    "stream": {"embed": 8, "up": 12},
    "group norm": {"0": 6, "2": 2},
    "group norms": {"stem": 4, "conv1": 6, "last": 7},
    "group norm of one block": {"stem": 4, "conv1": 6, "last": 7},
    "group norm of two": {"after": 5},
    "fixed view": {"conv1": 5},
    "halves": {"hidden": 9},
    "tied": {"last": 5},
    "exits": {"one": 5, "two": 7},
    "cosine": {"inner": 9},
    "grouped": {"after": 5},
    "words": {"embed": 6},
    "recurrent": {"hidden": 7},
    "transposed": {"0": 6, "2": 8},
}


@pytest.mark.parametrize("name", NETS)
def test_groups(net, name):
    assert net(name).units.sizes == SIZES[name]
    assert list(net(name).units.sizes) == list(SIZES[name])


@pytest.mark.parametrize(
    ("name", "group", "reason"),
    [
        ("encoder", "embed", "MultiheadAttention"),
        ("encoder by hand", "attention", "does not run"),
        ("group norm of two", "one", "'norm' normalises its units together with others"),
        ("group norm of two", "two", "'norm' normalises its units together with others"),
        ("fixed view", "conv2", "does not run"),
        ("halves", "gated", "does not run"),
        ("tied", "first", "'first.weight' is shared with 'second.weight'"),
        ("cosine", "last", "the output is made of them by what is not a layer"),
        ("grouped", "blocks", "grouped convolution"),
        ("recurrent", "embed", "cannot be followed"),
    ],
)
def test_whole_groups_say_why(net, name, group, reason):
    assert reason in net(name).units.whole[group]


def test_whole_groups_are_logged_once(caplog):
    build, example = NETS["fixed view"]
    with caplog.at_level(logging.WARNING, logger="fedloom.units"):
        find_units(build(), example)
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == [
        "units of 'conv2' are kept whole"
    ]


def test_output_tensors(net):
    assert net("plain").units.output == {"10.weight", "10.bias"}
    assert net("exits").units.output == {"early.weight", "early.bias", "late.weight", "late.bias"}
    assert net("cosine").units.output == frozenset(), "as many rows as classes, but they are not the classes"
    assert all(axis.dim != 0 for name in net("plain").units.output for axis in net("plain").units.axes.get(name, ()))


class Scaled(nn.Module):
    """What follows the head goes class by class: a norm, a temperature, probabilities; and an exit beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.early = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.norm, self.slope = nn.BatchNorm1d(3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        return torch.stack([(self.norm(self.head(h)) * self.slope).softmax(1), self.early(h)])


def test_what_goes_class_by_class_belongs_to_the_output():
    own = {"slope", *(f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var"))}
    layers = {"head.weight", "head.bias", "early.weight", "early.bias"}
    assert find_units(Scaled(), VECTOR).output == own | layers


class WrongValue(nn.Module):
    """Runs at every width, but divides by a number of channels that a sub-model does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.softmax(self.second(torch.relu(self.first(x))), 1))


def test_proof_compares_values():
    units = find_units(WrongValue(), VECTOR)
    assert units.sizes == {"first": 8}
    assert "off by" in units.whole["second"]


@pytest.mark.parametrize("name", ["plain", "residual", "dense", "mobile", "stream", "words"])
def test_proof_finds_a_wrong_table(monkeypatch, name):
    def wrong(model: nn.Module, example: Tensor) -> Graph:
        graph = read_graph(model, example)
        first, *others = graph.groups
        *spans, last = first.spans
        swapped = replace(last, units=(last.units + 1) % first.size)
        return replace(graph, groups=(replace(first, spans=(*spans, swapped)), *others))

    build, example = NETS[name]
    monkeypatch.setattr(find, "read_graph", wrong)
    assert find_units(build(), example).sizes == dict(list(SIZES[name].items())[1:])


def test_frozen_layers_are_seen():
    module = NETS["plain"][0]().requires_grad_(False)
    assert find_units(module, IMAGE).sizes == SIZES["plain"]


class ZeroBranch(nn.Module):
    """A branch that begins at zero would hide any error in it from a proof on the given parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.share = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.share * torch.softmax(self.inner(x), 1))


def test_proof_randomises_parameters():
    assert find_units(ZeroBranch(), VECTOR).sizes == {}


class Features(nn.Module):
    """Hidden values that are also given out must keep their meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.inner(x))
        return self.head(h), h


def test_given_out_units_are_whole():
    units = find_units(Features(), VECTOR)
    assert units.whole == {"inner": "it is part of the model's output"}
    assert units.output == {"head.weight", "head.bias"}


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).detach()


@pytest.mark.parametrize(("module", "example"), [(Frozen(), VECTOR), (nn.Linear(5, 3), VECTOR)])
def test_untraceable_model_is_an_input_error(module, example):
    with pytest.raises(InputError, match="cannot be traced on an input of shape"):
        find_units(module, example)


def test_finding_changes_nothing():
    module = NETS["residual"][0]().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    find_units(module, IMAGE)
    assert module.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
