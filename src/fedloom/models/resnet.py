"""ResNet-18 and ResNet-34 for small images.

He et al. 2016, Deep residual learning for image recognition, https://arxiv.org/abs/1512.03385.

Where we differ: the usual CIFAR stem (one 3x3 convolution, no pool) instead of 7x7 with stride 2 and a pool, so stages
work at sides n, n/2, n/4, n/8. Blocks are post-activation as in the paper; where the shape changes the shortcut is a
1x1 convolution with batch norm (the paper's option B). Weights start as PyTorch's layers do.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.models.layers import Width, dense, widened
from fedloom.registry import register

__all__ = ["BasicBlock", "ResNet18", "ResNet34"]

PAPER = "He et al. 2016, Deep residual learning for image recognition"


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm; the input is added before the last ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first, second = _convolution(inputs, outputs, 3, stride), _convolution(outputs, outputs, 3)
        same = stride == 1 and inputs == outputs
        self.body = nn.Sequential(*first, nn.ReLU(), *second)
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.activation(self.body(x) + self.shortcut(x))
        return summed


def _stem_and_stages(channels: int, depths: tuple[int, ...], width: float) -> tuple[nn.Sequential, nn.Sequential, int]:
    widths = widened([64 * 2**stage for stage in range(len(depths))], width)
    stem = nn.Sequential(*_convolution(channels, widths[0], 3), nn.ReLU())
    stages = []
    inputs = widths[0]
    for stage, (outputs, depth) in enumerate(zip(widths, depths, strict=True)):
        first = BasicBlock(inputs, outputs, stride=1 if stage == 0 else 2)
        stages.append(nn.Sequential(first, *(BasicBlock(outputs, outputs, stride=1) for _ in range(depth - 1))))
        inputs = outputs
    return stem, nn.Sequential(*stages), inputs


@register("model", "resnet18", paper=PAPER)
class ResNet18(nn.Module):
    """ResNet-18 with the CIFAR stem: stages of 2, 2, 2, 2 basic blocks of 64, 128, 256, 512 channels.

    11,173,962 parameters with 3 channels and 10 classes. `width` multiplies every channel count, rounding up.
    """

    def __init__(self, channels: int, classes: int, width: Width = 1.0) -> None:
        super().__init__()
        self.stem, self.stages, features = _stem_and_stages(channels, (2, 2, 2, 2), width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = dense((features, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.stages(self.stem(x))))
        return logits


@register("model", "resnet34", paper=PAPER)
class ResNet34(nn.Module):
    """ResNet-34 with the CIFAR stem: stages of 3, 4, 6, 3 basic blocks of 64, 128, 256, 512 channels.

    21,282,122 parameters with 3 channels and 10 classes. `width` multiplies every channel count, rounding up.
    """

    def __init__(self, channels: int, classes: int, width: Width = 1.0) -> None:
        super().__init__()
        self.stem, self.stages, features = _stem_and_stages(channels, (3, 4, 6, 3), width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = dense((features, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.stages(self.stem(x))))
        return logits
