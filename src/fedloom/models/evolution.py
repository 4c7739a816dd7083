"""The three supernets of the evolution-strategies paper (our `fedes`), for MNIST, CIFAR-10 and FEMNIST.

Gong et al. 2023, Adaptive federated learning algorithm based on evolution strategies (in Chinese), Sci Sin Inform 53,
https://doi.org/10.1360/SSI-2021-0190.

The paper gives channels, neurons, parameter counts and multiply-accumulates, not the pooling. What is built here meets
its MACs exactly: 34,606,080 (published 34.61 M), 187,901,952 (187.9 M), 19,734,912 (19.73 M). Its parameter counts are
met when cut, not rounded, and without batch norm: 369,664 + 5,255,178 (369 k + 5.2 M), 23,238,474 (23.23 M),
9,947,646 (9.94 M); batch norm adds 896, 2,304 and 2,944.

A block is convolution, ReLU, batch norm, in that order, so that |gamma| weighs a channel as the next layer gets it.
Hidden fully connected layers have ReLU alone: neurons are weighed by their activation.

`width` multiplies every count of channels and neurons, rounding up: the paper's networks are for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedloom.models.layers import Width, dense, flat_features, widened
from fedloom.registry import register

__all__ = ["EvoCifar", "EvoMnist", "EvoMobile"]

PAPER = "Gong et al. 2023, Adaptive federated learning algorithm based on evolution strategies"
CEIL, FLOOR = True, False  # how a pool's output is rounded


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(outputs)]


def _separable(inputs: int, outputs: int) -> list[nn.Module]:
    """Depthwise then pointwise convolution, one ReLU, one batch norm: a block has one gene, so one gamma a channel."""
    depthwise = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
    return [depthwise, nn.Conv2d(inputs, outputs, 1), nn.ReLU(), nn.BatchNorm2d(outputs)]


def _pool(rounding: bool) -> nn.Module:
    return nn.MaxPool2d(2, ceil_mode=rounding)


class Supernet(nn.Module):
    """Blocks of convolutions and pools, then fully connected layers."""

    def __init__(self, features: Sequence[nn.Module], hidden: Sequence[int], shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, classes, size = shape
        self.features = nn.Sequential(*features)
        self.classifier = dense((flat_features(self.features, channels, size), *hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


@register("model", "evo_mnist", paper=PAPER)
class EvoMnist(Supernet):
    """FedES supernet for MNIST: 3x3 convolutions of 64, 128, 256 with pools, fully connected 1024, 1024, classes.

    A pool after each convolution; pools round up, so that 28x28 ends as 4x4 and the fully connected part gets
    4,096 inputs.
    """

    def __init__(self, channels: int, classes: int, size: int, width: Width = 1.0) -> None:
        a, b, c, *hidden = widened((64, 128, 256, 1024, 1024), width)
        features = [*_block(channels, a), _pool(CEIL), *_block(a, b), _pool(CEIL), *_block(b, c), _pool(CEIL)]
        super().__init__(features, hidden, (channels, classes, size))


@register("model", "evo_cifar", paper=PAPER)
class EvoCifar(Supernet):
    """FedES supernet for CIFAR-10: 3x3 convolutions of 64, 192, 384, 256, 256, fully connected 4096, 1024, classes.

    Pools after the first, second and fifth convolution: 32x32 ends as 4x4, 4,096 inputs to the fully connected part.
    """

    def __init__(self, channels: int, classes: int, size: int, width: Width = 1.0) -> None:
        a, b, c, d, e, *hidden = widened((64, 192, 384, 256, 256, 4096, 1024), width)
        features = [*_block(channels, a), _pool(FLOOR), *_block(a, b), _pool(FLOOR), *_block(b, c), *_block(c, d)]
        super().__init__([*features, *_block(d, e), _pool(FLOOR)], hidden, (channels, classes, size))


@register("model", "evo_mobile", paper=PAPER)
class EvoMobile(Supernet):
    """FedES supernet for FEMNIST, MobileNet-like: 64, 128, 256, 512, 512 channels, fully connected 1024, 1024, classes.

    The first convolution is a whole one, the others are depthwise-separable without a non-linearity inside. Pools after
    the first three round up: 28x28 ends as 4x4, 8,192 inputs to the fully connected part.
    """

    def __init__(self, channels: int, classes: int, size: int, width: Width = 1.0) -> None:
        a, b, c, d, e, *hidden = widened((64, 128, 256, 512, 512, 1024, 1024), width)
        features = [*_block(channels, a), _pool(CEIL), *_separable(a, b), _pool(CEIL), *_separable(b, c), _pool(CEIL)]
        super().__init__([*features, *_separable(c, d), *_separable(d, e)], hidden, (channels, classes, size))
