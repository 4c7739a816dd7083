"""A model of one's own: any nn.Module. It is given those of channels, classes and size that its __init__ names.

Run it with: fedloom run fedavg --model examples.mymodel:TwoLayers --set model.width=32
"""

from torch import Tensor, nn


class TwoLayers(nn.Module):
    """Two convolutions and a linear layer; `width` is a setting of its own."""

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.output = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.output(self.features(x))
        return logits
