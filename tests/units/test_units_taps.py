"""What passes the layers of a model on an image's way through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from unit_nets import VECTOR

from fedloom.units import tapped


def passed(inplace: bool, point: tuple[str, bool]) -> tuple[Tensor, Tensor, Tensor]:
    """What passes a point of a small network, the logits, and the gradient of both by the first weight."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace), nn.Linear(5, 3))
    with tapped(net, (point,)) as seen:
        logits = net(torch.randn_like(VECTOR))
    (slope,) = torch.autograd.grad(seen[point].pow(3).sum() + logits.sum(), [net[0].weight])
    return seen[point], logits, slope


@pytest.mark.parametrize("point", [("0", True), ("1", False)])
def test_a_non_linearity_in_place_does_not_change_what_was_before_it(point):
    there, beside = passed(True, point), passed(False, point)
    assert bool((there[0] < 0).any())
    assert all(torch.equal(one, other) for one, other in zip(there, beside, strict=True))
