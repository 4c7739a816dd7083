"""Tensor values as they travel: dense (a plain tensor), sparse, ternary. Each decodes exactly and knows its bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sparse", "Ternary", "Value", "dense", "mask_of", "numbers_of"]


@dataclass(frozen=True, eq=False)
class Sparse:
    """The non-zero (or the kept) elements of a tensor, with a bitmap or with positions, whichever is smaller.

    With `partial`, the sender says nothing about the elements that are missing: they do not vote in a merge.
    Without it, they are zeros.
    """

    shape: tuple[int, ...]
    values: Tensor
    places: Tensor  # uint8 bitmap, or int32 / int64 positions
    partial: bool = False

    @classmethod
    def of(cls, tensor: Tensor, kept: Tensor | None = None, *, partial: bool = False) -> Sparse:
        """Encode a tensor; `kept` says which elements travel (default: those that are not zero)."""
        chosen = (tensor.detach() != 0) if kept is None else kept
        return cls.at(tensor, chosen.reshape(-1).nonzero().squeeze(1), partial=partial)

    @classmethod
    def at(cls, tensor: Tensor, positions: Tensor, *, partial: bool = False) -> Sparse:
        """Encode the elements at these positions, which rise; a GPU need not be asked how many they are."""
        flat = tensor.detach().reshape(-1)
        places = positions.to(torch.int32 if flat.numel() < 2**31 else torch.int64)
        if -(-flat.numel() // 8) <= places.nbytes:
            places = _pack_bits(torch.zeros_like(flat, dtype=torch.uint8).index_fill_(0, positions, 1), 8)
        return cls(tuple(tensor.shape), flat[positions], places, partial)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensor's elements."""
        return self.values.dtype

    @property
    def mask(self) -> Tensor:
        """Which elements travelled, in the tensor's shape."""
        size = torch.Size(self.shape).numel()
        if self.places.dtype == torch.uint8:
            return _unpack_bits(self.places, 8, size).bool().reshape(self.shape)
        flat = torch.zeros(size, dtype=torch.bool, device=self.places.device)
        return flat.index_fill_(0, self.places.long(), True).reshape(self.shape)

    def decode(self) -> Tensor:
        """The tensor, zeros where nothing travelled."""
        # By the number of each element's value, 0 for none: writing by a mask would ask a GPU how many it has.
        chosen, count = self.mask.reshape(-1), len(self.values)
        which, values = chosen.cumsum(0) * chosen, torch.cat([self.values.new_zeros(1), self.values])
        if which.device.type == "cpu" and int(chosen.sum()) != count:
            raise ValueError(f"a sparse tensor has {int(chosen.sum())} places and {count} values")
        return values[which.clamp(max=count)].reshape(self.shape)

    def numel(self) -> int:
        """How many elements travel."""
        return self.values.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of values and places together."""
        return self.values.nbytes + self.places.nbytes


@dataclass(frozen=True, eq=False)
class Ternary:
    """A tensor of the values -scale, 0 and scale: two bits an element and one number."""

    shape: tuple[int, ...]
    packed: Tensor
    scale: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensor's elements."""
        return self.scale.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Ternary:
        """Encode a tensor that is ternary already; anything else would not decode exactly and is refused."""
        value = cls.trusted(tensor)
        if not torch.equal(value.decode(), tensor):
            raise ValueError("a ternary tensor holds -s, 0 and s only; round it before encoding")
        return value

    @classmethod
    def trusted(cls, tensor: Tensor) -> Ternary:
        """Encode what the caller made ternary itself: no look at it, for which a GPU would be waited for."""
        flat = tensor.detach().reshape(-1)
        scale = flat.abs().max() if flat.numel() else flat.new_zeros(())
        return cls(tuple(tensor.shape), _pack_bits((flat.sign() + 1).to(torch.uint8), 4), scale.reshape(1))

    def decode(self) -> Tensor:
        """The tensor, exactly as it was encoded."""
        codes = _unpack_bits(self.packed, 4, torch.Size(self.shape).numel())
        return ((codes.to(self.scale.dtype) - 1) * self.scale).reshape(self.shape)

    def numel(self) -> int:
        """How many elements travel."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scale together."""
        return self.packed.nbytes + self.scale.nbytes


Value = Tensor | Sparse | Ternary


def dense(value: Value) -> Tensor:
    """The plain tensor behind any encoding."""
    return value if isinstance(value, Tensor) else value.decode()


def numbers_of(value: Value) -> Tensor:
    """The numbers that an encoding holds; what decoding adds to them are zeros and signs."""
    if isinstance(value, Tensor):
        return value
    return value.values if isinstance(value, Sparse) else value.scale


def mask_of(value: Value) -> Tensor | None:
    """Which elements vote in a merge; None means all of them."""
    return value.mask if isinstance(value, Sparse) and value.partial else None


def _pack_bits(codes: Tensor, per_byte: int) -> Tensor:
    """Small integers, `per_byte` of them to a byte, first in the lowest bits."""
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte)).reshape(-1, per_byte)
    weights = 2 ** (torch.arange(per_byte, device=codes.device) * (8 // per_byte))
    return (padded.to(torch.int32) * weights).sum(1).to(torch.uint8)


def _unpack_bits(packed: Tensor, per_byte: int, size: int) -> Tensor:
    width = 8 // per_byte
    shifts = torch.arange(per_byte, device=packed.device) * width
    codes: Tensor = (packed.to(torch.int32)[:, None] >> shifts) & (2**width - 1)
    return codes.reshape(-1)[:size]
