"""Scores of units against values computed layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F
from unit_nets import NETS, VECTOR, Shifted

from fedloom.units import activations, find_units, gradients


def test_activations_of_a_plain_network_by_hand(net):
    case = net("plain")
    got = activations(case.units, case.module, case.tensors, case.x)
    first = case.module[:4](case.x)
    second = case.module[4:7](first)
    third = case.module[7:10](second)
    torch.testing.assert_close(got["0"], first.abs().mean((2, 3)).sum(0))
    torch.testing.assert_close(got["4"], second.abs().mean((2, 3)).sum(0))
    torch.testing.assert_close(got["8"], third.abs().sum(0))


def test_activations_are_averaged_over_the_points_of_a_stream(net):
    case = net("residual")
    got = activations(case.units, case.module, case.tensors, case.x)
    stem = F.relu(case.module.stem(case.x))
    same = case.module.same(stem)
    # `same` is read by two layers (convolution and projection) and is one point.
    expected = (stem.abs().mean((2, 3)).sum(0) + same.abs().mean((2, 3)).sum(0)) / 2
    torch.testing.assert_close(got["stem"], expected)


def test_activations_through_concatenations(net):
    case = net("dense")
    model = case.module
    got = activations(case.units, model, case.tensors, case.x)
    stem = model.stem(case.x)
    one = F.relu(model.norm1(stem))
    two = torch.cat([stem, model.conv1(one)], 1)
    three = torch.cat([two, model.conv2(F.relu(model.norm2(two)))], 1)
    last = F.avg_pool2d(F.relu(three + model.mix(three)), 2)
    points = [one, F.relu(model.norm2(two)), three, last]
    expected = sum(point[:, :4].abs().mean((2, 3)).sum(0) for point in points) / 4
    torch.testing.assert_close(got["stem"], expected)
    expected = sum(point[:, 9:].abs().mean((2, 3)).sum(0) for point in points[2:]) / 2
    torch.testing.assert_close(got["conv2"], expected)


def test_gradients_of_a_plain_network_by_hand(net):
    case = net("plain")
    y = torch.tensor([1, 3])
    got = gradients(case.units, case.module, case.tensors, case.x, y, loss=F.cross_entropy)
    first = case.module[:4](case.x)
    second = case.module[4:7](first)
    third = case.module[7:10](second)
    slopes = torch.autograd.grad(F.cross_entropy(case.module[10](third), y), [first, second, third])
    torch.testing.assert_close(got["0"], slopes[0].sum(0).abs().sum((1, 2)))
    torch.testing.assert_close(got["4"], slopes[1].sum(0).abs().sum((1, 2)))
    torch.testing.assert_close(got["8"], slopes[2].sum(0).abs())


def test_gradients_are_summed_over_the_points_of_a_stream(net):
    case = net("residual")
    y = torch.tensor([1, 3])
    got = gradients(case.units, case.module, case.tensors, case.x, y, loss=F.cross_entropy)
    stem = F.relu(case.module.stem(case.x))
    same = case.module.same(stem)
    last = case.module.again(case.module.wider(same))
    slopes = torch.autograd.grad(F.cross_entropy(case.module.head(last.mean((2, 3))), y), [stem, same])
    torch.testing.assert_close(got["stem"], sum(slope.sum(0).abs().sum((1, 2)) for slope in slopes))


@pytest.mark.parametrize("name", NETS)
def test_every_group_is_scored_and_nothing_changes(net, name):
    case = net(name)
    case.module.train()
    before = {key: tensor.clone() for key, tensor in case.tensors.items()}
    seen = activations(case.units, case.module, case.tensors, case.x)
    slopes = gradients(case.units, case.module, case.tensors, case.x, case.x, loss=lambda out, _: total(out))
    for scores in (seen, slopes):
        assert {group: len(score) for group, score in scores.items()} == case.units.sizes
        assert all(score.isfinite().all() for score in scores.values())
        assert all((score >= 0).all() for score in scores.values())
    assert all(torch.equal(tensor, before[key]) for key, tensor in case.tensors.items())
    assert not any(layer._forward_pre_hooks for layer in case.module.modules())


def test_buffers_outside_the_state_dict_come_to_where_the_model_runs():
    """The template stays on the host; on the meta device, as on a GPU, a buffer left there would be refused."""
    module = Shifted()
    units, x = find_units(module, VECTOR), VECTOR.to("meta")
    tensors = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
    slopes = gradients(units, module, tensors, x, torch.zeros(2, dtype=torch.long, device="meta"), loss=F.cross_entropy)
    for scores in (activations(units, module, tensors, x), slopes):
        assert {group: (len(score), score.device.type) for group, score in scores.items()} == {"inner": (5, "meta")}
    assert module.shift.device.type == "cpu"


def test_cutting_a_silent_unit_changes_nothing(net):
    case = net("mlp")
    case.tensors["1.weight"][3] = 0
    case.tensors["1.bias"][3] = -1
    assert activations(case.units, case.module, case.tensors, case.x)["0"][3] == 0
    silent = functional_call(case.module, case.tensors, (case.x,))
    case.tensors["3.weight"][:, 3] = 0
    torch.testing.assert_close(functional_call(case.module, case.tensors, (case.x,)), silent)


def total(output):
    return sum(part.square().sum() for part in (output if isinstance(output, tuple) else (output,)))
