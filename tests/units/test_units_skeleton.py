"""Skeletons, and multiply-accumulates counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from unit_nets import IMAGE, NETS, SEQUENCE, VECTOR, Shifted

from fedloom.units import macs, skeleton


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("mode", [True, False])
def test_skeleton_trains_at_every_width(net, name, mode):
    case = net(name)
    for capacity in (1, 0.6, 0.01):
        where = {group: torch.arange(kept) for group, kept in case.units.kept(capacity).items()}
        taken = case.units.take(case.tensors, where)
        hollow = skeleton(case.module, taken).train(mode)
        assert all(parameter.is_meta for parameter in hollow.parameters())
        functional_call(hollow, taken, (case.x,))


def test_skeleton_of_the_full_model_computes_the_same(net):
    case = net("mobile")
    expected = case.module(case.x)
    assert torch.equal(functional_call(skeleton(case.module, case.tensors), case.tensors, (case.x,)), expected)


def test_attributes(net):
    case = net("mobile")
    where = {"expand": torch.tensor([1, 2, 6])}
    hollow = skeleton(case.module, case.units.take(case.tensors, where))
    assert (hollow.depthwise.groups, hollow.depthwise.in_channels, hollow.depthwise.out_channels) == (3, 3, 3)
    assert (hollow.shrink.in_channels, hollow.shrink.out_channels) == (3, 5)
    assert hollow.norm.num_features == 3
    assert case.module.depthwise.groups == 8


def test_running_statistics_reach_the_given_tensors(net):
    case = net("residual")
    taken = case.units.take(case.tensors, {"same.conv1": torch.arange(3)})
    before = case.tensors["same.norm1.running_mean"].clone()
    functional_call(skeleton(case.module, taken).train(), taken, (case.x,))
    moved = case.tensors["same.norm1.running_mean"] != before
    assert moved.tolist() == [True] * 3 + [False] * 3


def test_buffers_outside_the_state_dict_keep_their_value():
    module = Shifted()
    tensors = module.state_dict()
    hollow = skeleton(module, tensors)
    assert torch.equal(functional_call(hollow, tensors, (VECTOR,)), module(VECTOR))
    assert hollow.shift.data_ptr() != module.shift.data_ptr()
    assert macs(module, VECTOR) == 6 * 5 + 5 * 3


class Squared(nn.Bilinear):
    """What a bilinear layer makes of an image and itself."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, inputs, outputs)

    def forward(self, x):
        return super().forward(x, x)


@pytest.mark.parametrize(
    ("module", "example", "expected"),
    [
        (nn.Linear(6, 5), VECTOR, 30),
        (nn.Conv2d(3, 4, 3, padding=1), IMAGE, 3 * 4 * 9 * 64),
        (nn.Conv2d(3, 6, 3, stride=2, groups=3), IMAGE, 6 * 9 * 9),
        (nn.TransformerEncoderLayer(7, 1, 12, batch_first=True), SEQUENCE, 5 * (4 * 49 + 2 * 84) + 2 * 25 * 7),
        (nn.LSTM(7, 4, batch_first=True), SEQUENCE, 5 * 4 * 4 * (7 + 4)),
        (nn.GRU(7, 4, 2, batch_first=True), SEQUENCE, 5 * 3 * 4 * (7 + 4 + 4 + 4)),
        (Squared(6, 5), VECTOR, 6 * 6 * 5),
    ],
)
def test_macs_by_hand(module, example, expected):
    assert macs(module.eval(), example) == expected


def test_macs_of_a_sub_model(net):
    case = net("mobile")
    taken = case.units.take(case.tensors, {"expand": torch.tensor([0, 2, 3])})
    layers = 64 * (27 * 5 + 5 * 3 + 9 * 3 + 3 * 5) + 3 * 3 * 2 + 5 * 4
    hollow = skeleton(case.module, taken).eval()
    assert macs(lambda x: functional_call(hollow, taken, (x,)), IMAGE.double()) == layers
