"""Peak memory while something runs: of this process where the system tells it (Linux; else None), or of a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["peak", "peak_of", "reset"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset() -> None:
    """Start a new peak from what is used now."""
    try:
        CLEAR.write_text("5")
    except OSError:  # not Linux, or not allowed: the peak since the process began is then the best there is
        return


def peak(status: Path = STATUS) -> int | None:
    """Largest resident size since the last reset, in bytes."""
    try:
        text = status.read_text()
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "")
    return int(line.split()[1]) * 1024 if line else None


def peak_of(device: torch.device) -> int | None:
    """The peak of a device, or of this process for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak()
