"""Two plain convolutional networks: McMahan's and the four-block one of HeteroFL and its successors.

McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data,
https://arxiv.org/abs/1602.05629. Diao et al. 2021, HeteroFL, https://arxiv.org/abs/2010.01264.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from fedloom.models.layers import Positive, convolution, dense, flat_features
from fedloom.registry import register

__all__ = ["CNN", "CNN4"]


@register("model", "cnn", paper="McMahan et al. 2017, Communication-efficient learning of deep networks")
class CNN(nn.Module):
    """McMahan's CNN: 5x5 convolutions of 32 and 64 channels, each with a 2x2 pool, and a hidden layer of 512.

    Convolutions pad by 2: that is how the paper's 1,663,370 parameters at 28x28x1 and 10 classes come out. For CIFAR
    the paper takes TensorFlow's tutorial network instead; here it is the same network on other images.
    """

    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *convolution(channels, 32, 5, padding=2),
            nn.MaxPool2d(2),
            *convolution(32, 64, 5, padding=2),
            nn.MaxPool2d(2),
        )
        self.classifier = dense((flat_features(self.features, channels, size), 512, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


@register("model", "cnn4", paper="Diao et al. 2021, HeteroFL")
class CNN4(nn.Module):
    """Four blocks of convolution, batch norm, ReLU and pool (64, 128, 256, 512 channels) and one linear layer.

    As in HeteroFL's code the last block's pool is the mean over all positions, so the linear layer does not depend on
    the image size; the other blocks halve their map. 1,556,874 parameters with one channel and 10 classes.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        size: int,
        widths: Annotated[tuple[Positive, ...], "channels of each block", Field(min_length=1)] = (64, 128, 256, 512),
    ) -> None:
        super().__init__()
        inputs = (channels, *widths[:-1])
        blocks = [convolution(*pair, 3, padding=1, norm=True) for pair in zip(inputs, widths, strict=True)]
        pools = [nn.MaxPool2d(2) for _ in widths[:-1]] + [nn.AdaptiveAvgPool2d(1)]
        self.stages = nn.Sequential(*(nn.Sequential(*block, pool) for block, pool in zip(blocks, pools, strict=True)))
        self.classifier = dense((flat_features(self.stages, channels, size), classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.stages(x))
        return logits
