"""Clients that break, are too slow or go mad, in this process and in workers elsewhere."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import torch

from fedloom.runs.world import World

plain_jobs, plain_elsewhere = World.jobs.func, World.elsewhere


def mad(value):
    return torch.full_like(value, torch.nan) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def faulty(world):
    """What clients can be asked for; the first three fail, each in its own way."""
    jobs = dict(plain_jobs(world))
    work = jobs["work"]

    def harmed(client, task):
        if client.id == 0:
            raise RuntimeError("broken device")
        if client.id == 1:
            raise TimeoutError("too slow")
        report = yield from work(client, task)
        if client.id == 2:
            return replace(report, tensors={n: mad(v) for n, v in report.tensors.items()}, weight=float("nan"))
        return report

    return {**jobs, "work": harmed}


class Faulty(World):
    """A world of such clients."""

    jobs = property(faulty)


def faulty_world(build):
    world = build()
    return Faulty(**{field.name: getattr(world, field.name) for field in fields(World)})


def elsewhere(world):
    """What builds such a world in another process."""
    return partial(faulty_world, plain_elsewhere(world))
