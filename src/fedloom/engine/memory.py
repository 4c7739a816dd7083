"""Peak memory of this process where the system tells it (Linux; else None), or of a GPU: of a task, and of a run.

And what a training step needs, computed: that is a device's, whatever simulates it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fedloom.network import Network
from fedloom.types import Fit, Tensors

__all__ = ["begin", "highest", "peak", "reset", "resident_peak", "step_bytes"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CPU = torch.device("cpu")
_before: dict[str, int] = {}  # by kind of device, the highest peak of the run up to the last reset


def begin(device: torch.device = CPU) -> None:
    """A run begins: what was used before is none of its peak."""
    _restart(device)
    _before[device.type] = 0


def reset(device: torch.device = CPU) -> None:
    """A task begins: its peak is counted from what is used now."""
    _before[device.type] = highest(device) or 0
    _restart(device)


def peak(device: torch.device = CPU) -> int | None:
    """Largest memory since the last reset, in bytes."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_peak()


def highest(device: torch.device = CPU) -> int | None:
    """Largest memory since the run began, in bytes."""
    return max(peak(device) or 0, _before.get(device.type, 0)) or None


def resident_peak(status: Path = STATUS) -> int | None:
    """Largest resident size of a process since its last reset, in bytes."""
    try:
        text = status.read_text()
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "")
    return int(line.split()[1]) * 1024 if line else None


def _restart(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        CLEAR.write_text("5")
    except OSError:  # not Linux, or not allowed: the peak since the process began is then the best there is
        return


def step_bytes(fit: Fit, moving: Tensors, network: Network) -> int:
    """Bytes of a fit's largest step: its tensors, gradients of those that move, slots and saved activations."""
    step, largest = fit.steps[-1], max(sizes[0] for sizes in fit.plan.sizes)
    slots = [tensor for slot in step.slots(moving).values() for tensor in slot.values()]
    held = sum(tensor.nbytes for tensor in (*fit.tensors.values(), *moving.values(), *slots))
    return held + network.saved_bytes(step.seen(fit.tensors, fit.fixed), largest)
