"""Small networks of every kind that the unit table has to understand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE = torch.zeros(2, 3, 8, 8)
VECTOR = torch.zeros(2, 6)
SEQUENCE = torch.zeros(2, 5, 7)


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.PReLU(8),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 2 * 2, 9),
        nn.ReLU(),
        nn.Linear(9, 4),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.ReLU(), nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 4))


class Residual(nn.Module):
    """A stem, an identity block, a projection block."""

    class Block(nn.Module):
        def __init__(self, wide_in: int, wide_out: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(wide_out)
            self.conv2 = nn.Conv2d(wide_out, wide_out, 3, 1, 1, bias=False)
            self.norm2 = nn.BatchNorm2d(wide_out)
            self.project = nn.Conv2d(wide_in, wide_out, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
            return F.relu(h + self.project(x))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.same = self.Block(6, 6, 1)
        self.wider = self.Block(6, 8, 2)
        self.again = self.Block(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.wider(self.same(F.relu(self.stem(x)))))
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """Every layer reads the concatenation of all earlier ones; the last sum splits a group in two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv1 = nn.Conv2d(4, 5, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(9)
        self.conv2 = nn.Conv2d(9, 6, 3, padding=1)
        self.mix = nn.Conv2d(15, 15, 1)
        self.head = nn.Linear(15 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.conv1(F.relu(self.norm1(x)))], 1)
        x = torch.cat([x, self.conv2(F.relu(self.norm2(x)))], 1)
        return self.head(F.avg_pool2d(F.relu(x + self.mix(x)), 2).flatten(1))


class Mobile(nn.Module):
    """Depthwise separable convolutions, squeeze and excitation, a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.expand = nn.Conv2d(5, 8, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.BatchNorm2d(8)
        self.squeeze = nn.Conv2d(8, 3, 1)
        self.excite = nn.Conv2d(3, 8, 1)
        self.shrink = nn.Conv2d(8, 5, 1)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        h = F.relu(self.norm(self.depthwise(F.relu(self.expand(x)))))
        h = h * torch.sigmoid(self.excite(F.relu(self.squeeze(h.mean((2, 3), keepdim=True)))))
        return self.head((x + self.shrink(h)).mean((2, 3)))


class Encoder(nn.Module):
    """A pre-norm transformer encoder on embedded vectors, with torch's own attention or one written by hand."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 8)
        self.place = nn.Parameter(torch.zeros(1, 5, 8))
        self.norm1 = nn.LayerNorm(8)
        self.fused = fused
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if fused else nn.Linear(8, 24)
        self.out = nn.Identity() if fused else nn.Linear(8, 8)
        self.norm2 = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 4)

    def attend(self, x: Tensor) -> Tensor:
        if self.fused:
            return self.attention(x, x, x, need_weights=False)[0]
        batch, length, _ = x.shape
        q, k, v = self.attention(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        x = x + self.attend(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


class Stream(nn.Module):
    """A residual stream under layer norms with a parameter outside of layers: all of it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 8)
        self.place = nn.Parameter(torch.zeros(1, 5, 8))
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class GroupNormed(nn.Module):
    """A residual path whose group norms have blocks of four and of two channels."""

    def __init__(self, blocks: int = 7) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.conv1, self.norm1 = nn.Conv2d(16, 12, 3, padding=1), nn.GroupNorm(6, 12)
        self.conv2, self.norm2 = nn.Conv2d(12, 16, 3, padding=1), nn.GroupNorm(8, 16)
        self.last, self.norm3 = nn.Conv2d(16, 7, 3, padding=1), nn.GroupNorm(blocks, 7)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))
        return self.head(torch.relu(self.norm3(self.last(x))).mean((2, 3)))


class GroupNormedJoint(nn.Module):
    """A group norm over what two layers give, one of whose blocks holds channels of both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 12)
        self.after, self.head = nn.Conv2d(12, 5, 3), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(torch.cat([self.one(x), self.two(x)], 1)))
        return self.head(torch.relu(self.after(x)).mean((2, 3)))


class FixedView(nn.Module):
    """The number of channels is written into the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(5, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv2(F.relu(self.conv1(x)))).view(-1, 4 * 64))


class Halves(nn.Module):
    """A gate written as a split into equal halves."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 9)
        self.gated = nn.Linear(9, 8)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.gated(F.relu(self.hidden(x))).chunk(2, 1)
        return self.head(value * torch.sigmoid(gate))


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 9)
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(9, 9)
        self.second.weight = self.first.weight
        self.last = nn.Linear(9, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(F.relu(self.inner(x))))))
        return self.head(F.relu(self.last(x)))


class Exits(nn.Module):
    """Two outputs, each from a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 5)
        self.two = nn.Linear(5, 7)
        self.early = nn.Linear(5, 3)
        self.late = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.one(x))
        return self.early(x), F.log_softmax(self.late(F.relu(self.two(x))), 1)


class Cosine(nn.Module):
    """A classifier by angles to vectors that the model itself owns; as many hidden units as classes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 9), nn.Linear(9, 4)
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.last(F.relu(self.inner(x))))
        return F.linear(F.normalize(h), F.normalize(self.weight))


class Grouped(nn.Module):
    """A grouped convolution between two plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, 6, 1)
        self.blocks = nn.Conv2d(6, 6, 3, groups=2)
        self.after = nn.Conv2d(6, 5, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.after(F.relu(self.blocks(F.relu(self.before(x)))))).mean((2, 3)))


class Words(nn.Module):
    """Token numbers in, an embedding that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)).mean(1))


class Shifted(nn.Module):
    """A buffer that no state dict carries."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(6), persistent=False)
        self.inner = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.inner(x + self.shift)))


class Recurrent(nn.Module):
    """A recurrent layer, which cannot be cut, before a layer that can."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.memory = nn.GRU(6, 8, batch_first=True)
        self.hidden = nn.Linear(8, 7)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.memory(self.embed(x))[0][:, -1])))


def transposed() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(7, 6, 3, padding=1),
        nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        nn.ConvTranspose1d(6, 8, 2, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 10, 4),
    )


TOKENS = torch.zeros(2, 5, dtype=torch.long)
NETS = {
    "plain": (plain, IMAGE),
    "mlp": (mlp, VECTOR),
    "residual": (Residual, IMAGE),
    "dense": (Dense, IMAGE),
    "mobile": (Mobile, IMAGE),
    "encoder": (lambda: Encoder(fused=True), SEQUENCE),
    "encoder by hand": (lambda: Encoder(fused=False), SEQUENCE),
    "stream": (Stream, SEQUENCE),
    "group norm": (group_norm, IMAGE),
    "group norms": (GroupNormed, IMAGE),
    "group norm of one block": (lambda: GroupNormed(1), IMAGE),
    "group norm of two": (GroupNormedJoint, IMAGE),
    "fixed view": (FixedView, IMAGE),
    "halves": (Halves, VECTOR),
    "tied": (Tied, VECTOR),
    "exits": (Exits, VECTOR),
    "cosine": (Cosine, VECTOR),
    "grouped": (Grouped, IMAGE),
    "words": (Words, TOKENS),
    "recurrent": (Recurrent, TOKENS),
    "transposed": (transposed, SEQUENCE.transpose(1, 2)),
}
