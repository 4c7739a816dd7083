"""Copies between the host and a device, many tensors at a time.

A GPU works behind the host. Whoever looks at one of its numbers waits until it has caught up, and whoever hands it
tensors of ordinary memory waits too. So what is looked at is copied together, and what is handed over is copied
together from pinned memory, which nobody waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["on_host", "to_device", "to_host"]


def to_device(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Tensors of one type and place on a device, by one copy that the host does not wait for."""
    if not tensors:
        return []
    device, flat = torch.device(device), torch.cat([tensor.reshape(-1) for tensor in tensors])
    if device.type == "cuda" and flat.device.type == "cpu":
        flat = flat.pin_memory()
    return _like(flat.to(device, non_blocking=True), tensors)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one type on the host, by one copy."""
    return _like(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu(), tensors) if tensors else []


def on_host(reads: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What was measured, all of one type, on the host, by one copy."""
    found = iter(to_host([tensor for read in reads for tensor in read.values()]))
    return [{name: next(found) for name in read} for read in reads]


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
