"""Peak memory of this process while something runs, where the system tells it (Linux); None elsewhere."""

from __future__ import annotations

from pathlib import Path

__all__ = ["peak", "reset"]

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
