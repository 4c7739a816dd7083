"""Multi-layer perceptron, the smallest network there is here (McMahan et al. 2017 call theirs 2NN)."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor, nn

from fedloom.models.layers import Positive, dense
from fedloom.registry import register

__all__ = ["MLP"]


@register("model", "mlp", paper="McMahan et al. 2017, Communication-efficient learning of deep networks")
class MLP(nn.Module):
    """Multi-layer perceptron with ReLU on the flattened image.

    McMahan's 2NN is hidden = (200, 200): 199,210 parameters at 28x28x1 and 10 classes. The default is smaller, for the
    embedded digits.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        size: int,
        hidden: Annotated[tuple[Positive, ...], "neurons of each hidden layer"] = (64,),
    ) -> None:
        super().__init__()
        self.classifier = dense((channels * size * size, *hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(x)
        return logits
