"""fedloom: federated learning for unequal devices and unequal data."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*globals(), "run"]


def __getattr__(name: str) -> Any:
    # Late, so that `import fedloom` and the command line's help do not wait for torch.
    if name == "run":
        from fedloom.runs.start import run

        return run
    raise AttributeError(f"module 'fedloom' has no attribute '{name}'")
