"""A CUDA made of the CPU: streams that are in order anyway, and graphs that are tapes over the memory they were given.

What the `graphs` trainer does with fits, batches, masks and memory is then run where there is no GPU. Kernels, streams
that really run side by side and the capture itself are not: `bench/gpu_check.py` is for those.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fedloom.engine.taped import Recorder, Untapable

CPU = torch.device("cpu")


class Stream:
    """Everything happens at once, in order."""

    device = CPU

    def synchronize(self) -> None:
        """Done already."""

    def wait_stream(self, other: object) -> None:
        """It is done already."""


class Recording(Recorder):
    """Refuses as a capture does."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Untapable as error:
            raise RuntimeError(f"operation not permitted when stream is capturing: {error}") from error


class Graph:
    """What was done between begin and end, on the very memory; unlike a capture, recording does it too."""

    def capture_begin(self, pool: object) -> None:
        self.recorder = Recording([])
        self.recorder.__enter__()

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)
        self.play = self.recorder.tape(torch.zeros(()))

    def replay(self) -> None:
        with torch.no_grad():
            self.play()


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this in the place of CUDA."""
    nothing = {name: lambda *args: None for name in ("graph_pool_handle", "synchronize", "empty_cache", "set_stream")}
    with_answers = {"current_stream": Stream, "mem_get_info": lambda device: (1, 1), "stream": nullcontext}
    for name, stand_in in {"Stream": Stream, "CUDAGraph": Graph, **nothing, **with_answers}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
