"""Workplaces that a worker on a cluster can build by itself, and what clients do there."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import torch

from fedloom.types import Report
from tests.core.small import Place, Plain, images_of, network_of

CLIENTS = 40


class Far(Place):
    """A workplace that says how it is built elsewhere."""

    def __init__(self, work, folder):
        super().__init__(network_of(Plain), images_of(), [range(2)] * CLIENTS, {"work": partial(work, Path(folder))})
        self.build = partial(Far, work, str(folder))

    def elsewhere(self):
        return self.build


def number(value):
    return Report(numbers={"value": float(value)})


def echo(folder, client, task):
    return number(10 * task.round + task.client)
    yield


def slow(folder, client, task):
    time.sleep(0.02 if task.client % 3 else 0.1)
    return number(task.client)
    yield


def process(folder, client, task):
    return number(os.getpid())
    yield


def sums(folder, client, task):
    return number(float(client.received()["last.bias"].sum()))
    yield


def broken(folder, client, task):
    raise ValueError("no such thing")
    yield


def counting(folder, client, task):
    """Its state counts its tasks; the process is named, so that one can see who holds what."""
    client.state["count"] = torch.tensor(float(client.state.get("count", 0)) + 1)
    return Report(numbers={"value": float(client.state["count"]), "pid": float(os.getpid())})
    yield


def deadly_once(folder, client, task):
    """Client 5 kills its worker the first time it is asked."""
    if task.client == 5 and not (folder / "happened").exists():
        (folder / "happened").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number(task.client)
    yield


def deadly(folder, client, task):
    """Client 5 kills its worker whenever it is asked."""
    if task.client == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number(task.client)
    yield


def always_deadly(folder, client, task):
    os.kill(os.getpid(), signal.SIGKILL)
    yield


def trained(folder, client, task):
    """As if it had trained: the tensors it got, a little different for every client; some are mad or broken."""
    if task.client % 10 == 7:
        raise RuntimeError("broken device")
    model = client.received()
    tensors = {name: tensor + 0.1 * (task.client + 1) for name, tensor in model.items()}
    if task.client % 10 == 3:
        tensors["last.bias"] = tensors["last.bias"] * torch.nan
    return Report(tensors, weight=1.0 + task.client)
    yield
