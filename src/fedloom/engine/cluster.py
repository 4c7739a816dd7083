"""Ray itself: whether it is there, how a cluster is joined, and what it says."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from fedloom.errors import InputError

__all__ = ["connect", "first_line", "library"]


def library() -> ModuleType:
    """Ray itself, or a sentence that names the extra."""
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise InputError("engine 'ray' needs the library Ray: pip install 'fedloom[ray]'") from None
    return ray


def connect(address: str) -> bool:
    """Join a cluster, or start one on this machine; whether it is ours to end. One that is joined already is used."""
    ray = library()
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": os.cpu_count()}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise InputError(
            f"engine.address is '{address}', but no Ray cluster answers there: {first_line(error)}; start one with "
            "'ray start --head', or use engine.address=local"
        ) from error
    return True


def first_line(error: BaseException) -> str:
    """An error's first line; Ray's go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
