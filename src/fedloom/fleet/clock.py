"""The virtual clock: how long a client's task would take on its device.

MACs / speed + bytes down / bandwidth down + bytes up / bandwidth up, times a factor of the moment where the fleet has
`jitter`. A stage takes as long as its slowest client; with a deadline, no longer than that, and whoever would need
longer counts as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp

import numpy as np

from fedloom.types import Outcome

__all__ = ["seconds_of"]


def seconds_of(
    outcome: Outcome, columns: Mapping[str, np.ndarray], luck: Callable[[str, int], np.random.Generator]
) -> float:
    """Virtual seconds between receiving the task and having returned the report; measured ones of a real device.

    A device with jitter s needs exp(s z) times as long, z normal: some rounds find it hot, busy or in a tunnel.

    >>> columns = {"speed": np.array([1e9]), "down": np.array([1e6]), "up": np.array([5e5])}
    >>> task = Outcome(0, 0, 0, "work", download_bytes=10**6, upload_bytes=10**6, macs=10**9)
    >>> seconds_of(task, columns, lambda purpose, client: np.random.default_rng())
    4.0
    """
    if "speed" not in columns:
        return outcome.seconds
    parts = {"speed": outcome.macs, "down": outcome.download_bytes, "up": outcome.upload_bytes}
    plain = float(sum(amount / columns[name][outcome.client] for name, amount in parts.items() if name in columns))
    jitter = columns["jitter"][outcome.client] if "jitter" in columns else 0.0
    return plain * exp(jitter * luck("jitter", outcome.client).standard_normal()) if jitter else plain
