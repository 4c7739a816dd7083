"""AlexNet for images of any size, plain and with batch norm.

Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks, https://arxiv.org/abs/1404.5997: the
one-column AlexNet (64, 192, 384, 256, 256 channels) that all PyTorch code means by that name.

Where we differ: no dropout and no local response normalisation (FedBN's AlexNet has neither; dropout would draw from a
global generator inside a training step). Above 96x96 the stem is the original one (11x11 with stride 4, 5x5, pools of
3x3 with stride 2) and 224x224 ends as 6x6, as in the paper. Up to 96x96 all convolutions are 3x3 with padding 1 and the
pools 2x2, the first convolution with stride 2 (stride 1 below 16x16): 8x8 ends as 1x1, 32x32 as 2x2, 64x64 as 4x4.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor, nn

from fedloom.models.layers import Positive, convolution, dense, flat_features
from fedloom.registry import register

__all__ = ["AlexNet", "AlexNetBN"]

PAPER = "Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks"


def _features(channels: int, size: int, *, norm: bool = False) -> nn.Sequential:
    large = size > 96
    if large:
        stem = convolution(channels, 64, 11, stride=4, padding=2, norm=norm)
        second = convolution(64, 192, 5, padding=2, norm=norm)
    else:
        stem = convolution(channels, 64, 3, stride=2 if size >= 16 else 1, padding=1, norm=norm)
        second = convolution(64, 192, 3, padding=1, norm=norm)
    window = 3 if large else 2
    return nn.Sequential(
        *stem,
        nn.MaxPool2d(window, stride=2),
        *second,
        nn.MaxPool2d(window, stride=2),
        *convolution(192, 384, 3, padding=1, norm=norm),
        *convolution(384, 256, 3, padding=1, norm=norm),
        *convolution(256, 256, 3, padding=1, norm=norm),
        nn.MaxPool2d(window, stride=2),
    )


@register("model", "alexnet", paper=PAPER)
class AlexNet(nn.Module):
    """AlexNet: five convolutions and three fully connected layers (4096, 4096, classes), stem by image size.

    61,100,840 parameters at 224x224x3 and 1,000 classes, as published; 23,272,266 at 32x32x3 and 10. See the module for
    paddings and departures.
    """

    def __init__(
        self, channels: int, classes: int, size: int, hidden: Annotated[Positive, "neurons of the hidden layers"] = 4096
    ) -> None:
        super().__init__()
        self.features = _features(channels, size)
        self.classifier = dense((flat_features(self.features, channels, size), hidden, hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


@register("model", "alexnet_bn", paper=PAPER)
class AlexNetBN(nn.Module):
    """AlexNet with batch norm after each convolution and each hidden fully connected layer.

    As FedBN's AlexNet (Li et al. 2021, https://arxiv.org/abs/2102.07623): batch norm stands before the ReLU. It pools
    to 6x6 whatever the image; here the stem fits the image instead.
    """

    def __init__(
        self, channels: int, classes: int, size: int, hidden: Annotated[Positive, "neurons of the hidden layers"] = 4096
    ) -> None:
        super().__init__()
        self.features = _features(channels, size, norm=True)
        self.classifier = dense((flat_features(self.features, channels, size), hidden, hidden, classes), norm=True)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits
