"""The digit network of FedBN, also used for FedCPN.

Li et al. 2021, FedBN: Federated learning on non-IID features via local batch normalization,
https://arxiv.org/abs/2102.07623, table 'model architecture of the benchmark experiment on Digits'.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.models.layers import convolution, dense, flat_features
from fedloom.registry import register

__all__ = ["DigitCNN"]


@register("model", "digit_cnn", paper="Li et al. 2021, FedBN")
class DigitCNN(nn.Module):
    """FedBN's digit network: 5x5 convolutions of 64, 64, 128 and fully connected 2048, 512, classes, with batch norm.

    Batch norm before every ReLU, none at the output; 2x2 pools after the first two convolutions, all convolutions pad
    by 2. 14,219,210 parameters at 28x28x3 and 10 classes, as in its code.
    """

    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *convolution(channels, 64, 5, padding=2, norm=True),
            nn.MaxPool2d(2),
            *convolution(64, 64, 5, padding=2, norm=True),
            nn.MaxPool2d(2),
            *convolution(64, 128, 5, padding=2, norm=True),
        )
        self.classifier = dense((flat_features(self.features, channels, size), 2048, 512, classes), norm=True)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits
