"""The stacked trainer: clients of equal shape as one batched step.

K clients' tensors are stacked along a new first axis. The objective is mapped over it (`torch.vmap`), one backward pass
of the summed losses gives every client its own gradient, and the optimiser, which works element by element, updates all
of them at once. Clients whose plans differ keep exact by masks: a client that has no batch of the size at hand in this
step computes on a dummy batch and gets its tensors, optimiser memory and buffers back as they were. Batches are stacked
by size and never padded, so batch norm sees what it would have seen alone.

On a GPU the batched step is captured (`engine/graphs.py`); on a CPU it runs as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fedloom.engine.reference import Eager, Reference, told, trained
from fedloom.network import Network
from fedloom.seeds import seeded
from fedloom.steps import Descent
from fedloom.types import Batch, Fit, Fitted, Images, Plan, Request, Tensors

__all__ = ["Stack", "Stacked", "stackable", "timetable", "wasted"]

Beat = tuple[int, Tensor, Tensor | None]  # batch size, rows of all clients (K, size), who takes part (None: all)


def stackable(fit: Fit) -> bool:
    """Whether a fit's step can run for many clients at once: a plain descent with one batch a step."""
    if not isinstance(fit.step, Descent) or fit.step.view is not None or fit.plan.images.own:
        return False
    return all(len(sizes) == 1 for sizes in fit.plan.sizes)


def signature(fit: Fit) -> tuple[object, ...]:
    """What two fits must have in common to share a step: step, shapes, the set of images and the rate."""
    fixed = tuple((name, _shapes(value)) for name, value in fit.fixed.items())
    images = fit.plan.images
    # Augmented copies are another tensor in every fit; what counts is their shape.
    where = (room(images), images.x.shape[1:]) if images.own else (id(images.x), id(images.y))
    return fit.steps, _shapes(fit.tensors), fixed, where, id(fit.fixed.get("lr"))


def room(images: Images) -> int:
    """Places that a copy of these images needs, rounded up so that clients of like size share it."""
    return 1 << (len(images.x) - 1).bit_length()


def _shapes(value: Tensor | Mapping[str, Tensor]) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in value.items())


def timetable(plans: Sequence[Plan]) -> list[Beat]:
    """The batched steps that serve all plans, in order: for each step number, one beat a batch size."""
    beats: list[Beat] = []
    for number in range(max(len(plan.steps) for plan in plans)):
        rows = [plan.steps[number][0] if number < len(plan.steps) else None for plan in plans]
        sizes = [plan.sizes[number][0] if number < len(plan.steps) else 0 for plan in plans]
        for size in sorted({*sizes} - {0}, reverse=True):
            spare = rows[sizes.index(size)]
            stacked = [row if own == size else spare for row, own in zip(rows, sizes, strict=True)]
            active = None if sizes.count(size) == len(plans) else torch.tensor([own == size for own in sizes])
            beats.append((size, torch.stack([row for row in stacked if row is not None]), active))
    return beats


def wasted(plans: Sequence[Plan], beats: Sequence[Beat]) -> float:
    """How many times more samples the batched steps compute than the plans ask for."""
    needed = sum(sizes[0] for plan in plans for sizes in plan.sizes)
    return sum(size * len(plans) for size, _, _ in beats) / max(1, needed)


@dataclass(frozen=True)
class _Joint:
    """What K fits have in common, and what each brings, stacked."""

    step: Descent
    fixed: Mapping[str, Any]
    each: frozenset[str]  # the names in `fixed` that differ between clients and are stacked


class Stack:
    """K clients' tensors, stacked, and one step over all of them."""

    def __init__(self, network: Network, fits: Sequence[Fit], model: Eager | None = None) -> None:
        self.network, self.model = network, model or Eager(network, training=True)
        step = fits[0].step
        if not isinstance(step, Descent):
            raise TypeError("only a descent can be stacked")
        self.tensors = {name: torch.stack([fit.tensors[name].detach() for fit in fits]) for name in fits[0].tensors}
        # A single number, such as how many steps were taken, is each client's own too.
        self.slots = {
            kind: {name: each if each.ndim else each.repeat(len(fits)) for name, each in slot.items()}
            for kind, slot in step.slots(trained(self.tensors, network)).items()
        }
        self.joint = _Joint(step, *stack_fixed(fits))

    def state(self) -> list[Tensor]:
        """Everything that a step changes."""
        return [*self.tensors.values(), *(tensor for slot in self.slots.values() for tensor in slot.values())]

    def advance(self, images: Images, rows: Tensor, active: Tensor | None) -> Tensor:
        """One step of every client that takes part; gives the losses (K, size)."""
        if active is None:
            return self._step(images, rows)
        state = self.state()
        before = [tensor.detach().clone() for tensor in state]
        losses = self._step(images, rows)
        with torch.no_grad():
            for tensor, old in zip(state, before, strict=True):
                mask = active.reshape(-1, *(1,) * (tensor.ndim - 1))
                tensor.copy_(torch.where(mask, tensor, old))
        return losses

    def _step(self, images: Images, rows: Tensor) -> Tensor:
        joint, clients, batch = self.joint, len(rows), images.batch(rows)
        shared = {name: value for name, value in joint.fixed.items() if name not in joint.each}

        def one(tensors: Tensors, own: dict[str, Any], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return joint.step.loss(self.model, tensors, Batch(x, y), {**shared, **own})

        own = {name: joint.fixed[name] for name in joint.each}
        with torch.enable_grad():
            totals, losses = torch.vmap(one, randomness="different")(self.tensors, own, batch.x, batch.y)
            leaves = {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}
            found = torch.autograd.grad(totals.sum(), list(leaves.values()), materialize_grads=True)
        grads = joint.step.moving(dict(zip(leaves, found, strict=True)))
        with torch.no_grad():
            if joint.step.clip is not None:
                _clip_each(grads, joint.step.clip, clients)
            joint.step.optimizer.update(self.tensors, self.slots, grads, joint.fixed["lr"])
        return losses.detach()


def shared_images(fits: Sequence[Fit]) -> Images:
    """The images that all fits draw from, with each client's own mean and deviation: (K, 1, C, 1, 1)."""
    each = [fit.plan.images for fit in fits]
    mean, std = (torch.stack([getattr(images, name) for images in each])[:, None] for name in ("mean", "std"))
    return replace(each[0], mean=mean, std=std)


def stack_fixed(fits: Sequence[Fit]) -> tuple[dict[str, Any], frozenset[str]]:
    """What steps read: the rate as it is, all else stacked."""
    fixed: dict[str, Any] = {}
    for name, value in fits[0].fixed.items():
        if name == "lr":
            fixed[name] = value.clone()  # a captured step's rate is written to, and the tensor given is everybody's
        elif isinstance(value, Tensor):
            fixed[name] = torch.stack([fit.fixed[name] for fit in fits])
        else:
            fixed[name] = {part: torch.stack([fit.fixed[name][part] for fit in fits]) for part in value}
    return fixed, frozenset(fixed) - {"lr"}


def _clip_each(grads: Tensors, limit: float, clients: int) -> None:
    """Each client's gradients scaled together, as `steps.clip_` does for one."""
    norms = torch.stack([grad.reshape(clients, -1).norm(dim=1) for grad in grads.values()]).norm(dim=0)
    scale = (limit / (norms + 1e-6)).clamp(max=1.0)
    grads.update({name: grad * scale.reshape(-1, *(1,) * (grad.ndim - 1)) for name, grad in grads.items()})


class Stacked(Reference):
    """Clients of equal shape as one batched step; whatever cannot be stacked runs as in the reference."""

    window = 256
    most_waste = 2.0  # more computed samples per needed one than this, and clients run one by one

    def solve(self, requests: Sequence[Request]) -> list[Fitted | Tensors | Exception]:
        """One answer a request."""
        answers: dict[int, Fitted | Tensors | Exception] = {}
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, request in enumerate(requests):
            if isinstance(request, Fit) and stackable(request):
                groups.setdefault(signature(request), []).append(number)
        for numbers in groups.values():
            fits = [request for number in numbers if isinstance(request := requests[number], Fit)]
            beats = timetable([fit.plan for fit in fits])
            if len(fits) > 1 and wasted([fit.plan for fit in fits], beats) <= self.most_waste:
                try:
                    answers |= dict(zip(numbers, self._together(fits, beats), strict=True))
                except Exception as error:  # noqa: BLE001 (a failure of one is found by running each alone)
                    del error
        alone = [number for number in range(len(requests)) if number not in answers]
        answers |= dict(zip(alone, super().solve([requests[number] for number in alone]), strict=True))
        return [answers[number] for number in range(len(requests))]

    def _together(self, fits: Sequence[Fit], beats: Sequence[Beat]) -> list[Fitted]:
        begin, images = perf_counter(), shared_images(fits)
        stack = Stack(self.network, fits)
        losses: list[list[Tensor]] = [[] for _ in fits]
        with seeded(fits[0].plan.seed, self.network.device):
            for _, rows, active in beats:
                device = self.network.device
                found = stack.advance(images, rows.to(device), None if active is None else active.to(device))
                for client in range(len(fits)) if active is None else active.nonzero().squeeze(1).tolist():
                    losses[client].append(found[client])
        seconds = (perf_counter() - begin) / len(fits)
        done = [{name: t[client].detach().clone() for name, t in stack.tensors.items()} for client in range(len(fits))]
        return [
            self._fitted(fit, tensors, *told(each, fit.plan.epoch), seconds)
            for fit, tensors, each in zip(fits, done, losses, strict=True)
        ]
