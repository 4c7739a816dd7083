"""Networks to cut: the shipped ones at small settings, and some that the package does not have."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from examples.own_net import OwnNet
from torch import Tensor, nn

from fedloom.models.exits import Exits
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.registry import entries

SIDE, CLASSES = 8, 10
SMALL: dict[str, dict[str, Any]] = {
    "alexnet": {"hidden": 20},
    "alexnet_bn": {"hidden": 20},
    "cnn4": {"widths": [4, 6, 8, 9]},
    "mlp": {"hidden": [9, 7]},
    "resnet18": {"width": 0.1},
    "resnet34": {"width": 0.1},
}


class DenseLike(nn.Module):
    """Every layer reads the concatenation of all earlier ones, through a norm of its own."""

    def __init__(self, channels: int = 1, classes: int = CLASSES, growth: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 6, 3, padding=1)
        widths = [6, 6 + growth, 6 + 2 * growth]
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.layers = nn.ModuleList(nn.Conv2d(width, growth, 3, padding=1) for width in widths)
        self.last = nn.BatchNorm2d(6 + 3 * growth)
        self.head = nn.Linear((6 + 3 * growth) * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return self.head(F.adaptive_avg_pool2d(F.relu(self.last(x)), 2).flatten(1))


class Encoder(nn.Module):
    """A pre-norm transformer encoder over the rows of a grey image; the width of a head is read off the weights."""

    def __init__(self, classes: int = CLASSES, size: int = SIDE) -> None:
        super().__init__()
        self.embed = nn.Linear(size, 12)
        self.place = nn.Parameter(torch.zeros(1, size, 12))
        self.norm1 = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2)) + self.place
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


class Pair(nn.Module):
    """Two convolutions without norms."""

    def __init__(self, channels: int = 1, classes: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3, padding=1)
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))).mean((2, 3)))


class Forgetful(nn.Module):
    """Dropout between two layers."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 12), nn.Linear(12, classes)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.relu(self.first(x.flatten(1)))))


class Cosine(nn.Module):
    """A classifier by angles to vectors that the model itself owns, behind so many layers."""

    def __init__(self, classes: int = CLASSES, hidden: tuple[int, ...] = (16, 12)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, (64, *hidden), hidden))
        self.weight = nn.Parameter(torch.randn(classes, hidden[-1]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return 5 * F.linear(F.normalize(x), F.normalize(self.weight))


class Refined(nn.Module):
    """A last layer that corrects the logits, so that no layer alone is the output."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.inner, self.rough = nn.Linear(64, 12), nn.Linear(12, classes)
        self.fine = nn.Linear(classes, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.rough(F.relu(self.inner(x.flatten(1))))
        return logits + self.fine(F.relu(logits))


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.inner, self.first, self.second = nn.Linear(64, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.second.weight = self.first.weight
        self.head = nn.Linear(9, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(F.relu(self.inner(x.flatten(1))))))))


class Upwards(nn.Module):
    """A transposed convolution: its weight has the inputs on axis 0."""

    def __init__(self, channels: int = 1, classes: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 5, 2, stride=2)
        self.head = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(F.relu(self.first(x)))).mean((2, 3)))


class Untraceable(nn.Module):
    """What it computes hangs on its parameters in no way that can be followed."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().sum() != 0:  # the graph is read on random inputs
            raise RuntimeError("only zeros, please")
        return self.head(x.flatten(1))


def with_exits(channels: int, classes: int, size: int) -> nn.Module:
    """A small cnn4 that already has exits, as FedAvg would be given it."""
    model = build("cnn4", channels=channels, classes=classes, size=size, widths=[4, 6, 8])
    return Exits(model, (channels, size, size), classes)


BUILDERS = {
    name: partial(build, name, channels=1, classes=CLASSES, size=SIDE, **SMALL.get(name, {}))
    for name in sorted(entries("model").keys() - {"darts", "narrowed"})  # made of what a search found
} | {"own net": partial(OwnNet, 1, CLASSES), "dense": DenseLike, "encoder": Encoder, "pair": Pair}  # fmt: skip
NETS = list(BUILDERS)
LARGE = {"alexnet", "alexnet_bn", "digit_cnn", "evo_cifar", "evo_mnist", "evo_mobile"}  # millions of parameters
NORM_FREE = [name for name in NETS if name != "encoder"]  # or batch norm, which evaluates unit by unit


@cache
def network(name: str) -> Network:
    return Network(BUILDERS[name], (1, SIDE, SIDE), CLASSES)


@cache
def tensors_of(name: str) -> dict[str, Tensor]:
    """Random parameters and statistics: an untrained norm would hide errors."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for key, tensor in network(name).initial(0).items():
        if not tensor.is_floating_point() or tensor.ndim > 1:
            tensors[key] = tensor
        else:
            tensors[key] = torch.rand(tensor.shape, generator=generator) + 0.5
    return tensors


def images(count: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
