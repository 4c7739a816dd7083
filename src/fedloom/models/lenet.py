"""LeNet-5, plain and with batch norm.

LeCun et al. 1998, Gradient-based learning applied to document recognition, https://doi.org/10.1109/5.726791.

Where we differ: ReLU, max pooling, full connections between the convolutions and a linear output, as in all federated
work, instead of tanh, trained subsampling, a connection table and radial outputs.

Padding: the classic network takes 32x32 and pads nothing. From 28 on the first convolution pads by 2 (the usual way to
feed MNIST, so that 28x28 and 32x32 both end as 16 maps of 5x5); below 28 both convolutions do, so that an 8x8 digit
still ends as 2x2 and 16x16 as 4x4. From 32 on nothing is padded (64x64 ends as 13x13).
"""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.models.layers import convolution, dense, flat_features
from fedloom.registry import register

__all__ = ["LeNet5", "LeNet5BN"]

PAPER = "LeCun et al. 1998, Gradient-based learning applied to document recognition"


def _features(channels: int, size: int, *, norm: bool = False) -> nn.Sequential:
    return nn.Sequential(
        *convolution(channels, 6, 5, padding=0 if size >= 32 else 2, norm=norm),
        nn.MaxPool2d(2),
        *convolution(6, 16, 5, padding=0 if size >= 28 else 2, norm=norm),
        nn.MaxPool2d(2),
    )


@register("model", "lenet5", paper=PAPER)
class LeNet5(nn.Module):
    """LeNet-5: two 5x5 convolutions (6, 16) and three fully connected layers (120, 84, classes).

    61,706 parameters at 28x28x1 or 32x32x1 and 10 classes. Paddings and departures: see the module.
    """

    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        self.features = _features(channels, size)
        self.classifier = dense((flat_features(self.features, channels, size), 120, 84, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


@register("model", "lenet5_bn", paper=PAPER)
class LeNet5BN(nn.Module):
    """LeNet-5 with batch norm after each convolution and each hidden fully connected layer.

    For FedBN in the tables of FedCKD and FedRKD. Batch norm stands before the ReLU, as in FedBN's own networks.
    """

    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        self.features = _features(channels, size, norm=True)
        self.classifier = dense((flat_features(self.features, channels, size), 120, 84, classes), norm=True)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits
