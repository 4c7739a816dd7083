"""Several runs at the same time, each in a process of its own that ends with this one.

A run in such a process uses one core (engine `auto` then means `local`), so on a CPU it gives the same bits as alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedloom.engine.processes import end_with
from fedloom.errors import FedloomError, InputError, Interrupted, RunError
from fedloom.runs.experiment import Watch
from fedloom.runs.signals import Signals

__all__ = ["cores", "run_all", "run_each"]

GIBIBYTE = 2**30
AGAIN = "Repeat the command to go on"
Go = Callable[[Watch], None]  # one run, told whom to show its rounds to
Begin = Callable[[], Watch]  # called when a run begins
Ended = tuple[int, FedloomError | None]  # number of a run, and why it failed if it did


class _Running(NamedTuple):
    number: int
    process: Any
    watch: Watch


def cores() -> int:
    """How many processes this machine can usefully run: its cores, less if memory is short."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sys.platform == "linux":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        count = min(count, max(1, free // GIBIBYTE))
    return count


def run_each(runs: Sequence[Go], watches: Sequence[Begin], folder: Path) -> Iterator[Ended]:
    """One run after another, in this process; each may use all cores."""
    for number, (go, begin) in enumerate(zip(runs, watches, strict=True)):
        try:
            go(begin())
            yield number, None
        except Interrupted as stop:
            raise Interrupted(folder, stop.exit_code - 128, AGAIN) from None
        except InputError:
            raise
        except FedloomError as error:
            yield number, error


def run_all(
    runs: Sequence[Go], watches: Sequence[Begin], jobs: int, folder: Path, fork: bool = True
) -> Iterator[Ended]:
    """Runs in processes, `jobs` at a time, as they end; on a signal all make themselves safe first."""
    waiting = deque(enumerate(zip(runs, watches, strict=True)))
    running: dict[Any, _Running] = {}
    context: Any = multiprocessing.get_context("fork" if fork and sys.platform == "linux" else "spawn")
    with Signals() as signals:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    number, (go, begin) = waiting.popleft()
                    pipe, theirs = context.Pipe(duplex=False)
                    process = context.Process(target=_serve, args=(go, theirs, os.getpid()))
                    watch = begin()
                    process.start()
                    running[pipe] = _Running(number, process, watch)
                    theirs.close()
                for pipe in wait(list(running)):
                    ended = _heard(pipe, running[pipe])
                    if ended:
                        number, process, _ = running.pop(pipe)
                        process.join()
                        yield number, *ended
        except KeyboardInterrupt:
            stopped = signals.received[-1] if signals.received else signal.SIGINT
            raise Interrupted(folder, stopped, AGAIN) from None
        finally:
            for each in running.values():
                each.process.terminate()
            for each in running.values():
                each.process.join()


def _heard(pipe: Any, run: _Running) -> tuple[FedloomError | None] | None:
    """Pass a round on to whoever watches; what a run ended with, once it has."""
    try:
        kind, content = pipe.recv()
    except EOFError:
        return (RunError("its process died"),)
    if kind == "round":
        run.watch(content)
        return None
    if kind == "input":
        raise InputError(content)
    return (RunError(content) if kind == "failed" else None,)


def _serve(go: Go, pipe: Connection, parent: int) -> None:
    """The life of such a process. A group of its own: Ctrl-C reaches the parent alone, which then tells everyone."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    # The parent's pool of threads did not survive the fork; an operation that waited for it would wait for ever.
    torch.set_num_threads(1)
    try:
        go(lambda row: pipe.send(("round", dict(row))))
        pipe.send(("done", ""))
    except (Interrupted, KeyboardInterrupt):
        pass
    except InputError as error:
        pipe.send(("input", str(error)))
    except FedloomError as error:
        pipe.send(("failed", str(error)))
