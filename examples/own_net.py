"""A network that the package has never seen: residual, depthwise and concatenated. Its units are found all the same.

Run it with: PYTHONPATH=. fedloom run feddse --model examples.own_net:OwnNet --fleet low
"""

import torch
from torch import Tensor, nn


class OwnNet(nn.Module):
    """A stem, a residual block around a depthwise convolution, and two branches that are concatenated."""

    def __init__(self, channels: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, 2 * width, 1)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.norm = nn.BatchNorm2d(2 * width)
        self.shrink = nn.Conv2d(2 * width, width, 1)
        self.fine = nn.Conv2d(width, width, 3, padding=1)
        self.coarse = nn.Conv2d(width, width // 2, 1)
        self.both_norm = nn.BatchNorm2d(width + width // 2)
        self.mix = nn.Conv2d(width + width // 2, 2 * width, 3, stride=2, padding=1)
        self.mix_norm = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = torch.relu(self.stem_norm(self.stem(x)))
        inner = torch.relu(self.norm(self.depthwise(torch.relu(self.expand(x)))))
        x = torch.relu(x + self.shrink(inner))
        both = torch.relu(self.both_norm(torch.cat([self.fine(x), self.coarse(x)], dim=1)))
        logits: Tensor = self.head(torch.relu(self.mix_norm(self.mix(both))).mean((2, 3)))
        return logits
