"""The reference trainer: one request after another, one eager step after another. The others must match it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.batches import batches_of
from fedloom.engine.memory import step_bytes
from fedloom.errors import ClientError
from fedloom.network import SIZES, Network
from fedloom.recent import Recent
from fedloom.seeds import seeded
from fedloom.types import Batch, Fit, Fitted, Measure, Points, Request, Tensors
from fedloom.units import tapped

__all__ = ["Eager", "Reference", "told", "trained"]

T = TypeVar("T")
Advance = Callable[[int, Sequence[Batch]], Tensor]  # the number of the step, its batches: the samples' losses


class Eager:
    """The network as steps and readings use it, with PyTorch's ordinary autograd."""

    def __init__(self, network: Network, *, training: bool, channels_last: bool = False) -> None:
        self.network, self.training, self.channels_last = network, training, channels_last

    def __call__(self, tensors: Tensors, x: Tensor, *, scaler: bool = False) -> Tensor:
        """The logits."""
        return self.read(tensors, x, scaler=scaler)[0]

    def read(
        self, tensors: Tensors, x: Tensor, points: Points = (), *, scaler: bool = False, still: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """The logits, and what passed the points, in their order."""
        module = self.network.bound(tensors, training=self.training and not still, scaler=scaler)
        half, kind = self.network.half, self.network.device.type
        if self.channels_last or half:
            x = x.contiguous(memory_format=torch.channels_last)
        precision = torch.autocast(kind, torch.bfloat16, cache_enabled=False) if half else nullcontext()
        with tapped(module, points) as seen, precision:
            logits = module(x)
        read: list[Tensor] = [logits, *(seen[point] for point in points)]
        if half:
            read = [each.to(self.network.dtype) for each in read]
        return read[0], read[1:]

    def grad(self, loss: Callable[[Tensors], tuple[Tensor, T]], tensors: Tensors) -> tuple[Tensors, T]:
        """Gradients by every tensor that asks for one; zeros where the loss does not depend on it."""
        leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        with torch.enable_grad():
            total, rest = loss(tensors)
        grads = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads, strict=True)), rest


def trained(tensors: Tensors, network: Network) -> Tensors:
    """Those of a fit's tensors that training changes by gradients, which they ask for from now on."""
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point() and name not in network.buffers]
    return {name: tensors[name].requires_grad_() for name in names}


def told(losses: list[Tensor], epoch: int) -> tuple[float, float]:
    """Mean of the samples' losses over all steps, and of their squares over those of the first epoch.

    Looked at once, after the last step: nothing in the loop waits for the device.
    """
    every, first = torch.cat(losses).double(), torch.cat(losses[:epoch]).double()
    loss, squared = torch.stack([every.mean(), first.square().mean()]).tolist()
    return loss, squared


class Reference:
    """Eager, obviously right."""

    window = 1  # how many clients' requests it wants to see at once

    def __init__(self, network: Network) -> None:
        self.network = network
        self._memories = Recent[tuple[object, ...], int](SIZES)
        layout = {"channels_last": network.channels_last}
        self._training, self._still = (Eager(network, training=training, **layout) for training in (True, False))

    def close(self) -> None:
        """Let go of what was made for the run."""

    def solve(self, requests: Sequence[Request]) -> list[Fitted | Tensors | Exception]:
        """One answer a request; a request that fails is answered by its exception."""
        answers: list[Fitted | Tensors | Exception] = []
        for request in requests:
            try:
                answers.append(self._fit(request) if isinstance(request, Fit) else self._measure(request))
            except Exception as error:  # noqa: BLE001 (a client's failure is a value)
                answers.append(error)
        return answers

    def _fit(self, fit: Fit) -> Fitted:
        start, plan = perf_counter(), fit.plan
        tensors = {name: self._copied(tensor.detach()) for name, tensor in fit.tensors.items()}
        slots, losses = fit.steps[0].slots(trained(tensors, self.network)), list[Tensor]()
        advance = self._advance(fit, tensors, slots)
        with seeded(plan.seed, self.network.device), torch.no_grad():
            for number, (rows, variant) in enumerate(zip(plan.steps, plan.variants, strict=True)):
                if fit.until is not None and perf_counter() > fit.until:
                    raise TimeoutError(f"its time was up after {number} of {len(plan.steps)} steps")
                batches = [plan.images.batch(row) for row in rows]
                losses.append(advance(variant, batches))
        # What leaves the trainer is laid out as ever: it gives the same bits wherever it travelled.
        done = {
            name: self._copied(tensor.detach(), torch.contiguous_format) if tensor.ndim == 4 else tensor.detach()
            for name, tensor in tensors.items()
        }
        return self._fitted(fit, done, *told(losses, plan.epoch), perf_counter() - start)

    def _fitted(self, fit: Fit, tensors: Tensors, loss: float, squared: float, seconds: float) -> Fitted:
        """The answer to a fit."""
        steps, samples = len(fit.plan.steps), sum(sizes[0] for sizes in fit.plan.sizes)
        macs, forward = self._cost(fit)
        return Fitted(tensors, steps, samples, loss, squared, macs, seconds, self._memory(fit), forward)

    def _advance(self, fit: Fit, tensors: Tensors, slots: dict[str, Tensors]) -> Advance:
        """How a step of this fit is done."""
        steps = fit.steps
        return lambda variant, batches: steps[variant](self._training, tensors, slots, fit.fixed, batches)

    def _copied(self, tensor: Tensor, layout: torch.memory_format = torch.channels_last) -> Tensor:
        """A copy, kernels turned to this layout (`contiguous` would leave those of one channel as they are)."""
        turned = self.network.channels_last and tensor.ndim == 4
        return tensor.clone(memory_format=layout if turned else torch.preserve_format)

    def _cost(self, fit: Fit) -> tuple[int, int]:
        """Multiply-accumulates of all passes, a backward one costing two forward ones; and of one sample forward."""
        forward = [self.network.macs(step.seen(fit.tensors, fit.fixed)) for step in fit.steps]
        once = [forward[variant] * sizes[0] for sizes, variant in zip(fit.plan.sizes, fit.plan.variants, strict=True)]
        total = sum(3 * macs * fit.steps[variant].passes for macs, variant in zip(once, fit.plan.variants, strict=True))
        return round(total), round(sum(once) / sum(sizes[0] for sizes in fit.plan.sizes))

    def _memory(self, fit: Fit) -> int:
        """Bytes of the largest step, computed once a signature."""
        key = (max(fit.plan.sizes), len(fit.steps), tuple(tensor.shape for tensor in fit.tensors.values()))
        if key not in self._memories:
            own = {name: tensor.detach() for name, tensor in fit.tensors.items()}
            self._memories[key] = step_bytes(fit, trained(own, self.network), self.network)
        return self._memories[key]

    @torch.no_grad()
    def _measure(self, measure: Measure) -> Tensors:
        if not len(measure.samples):
            raise ClientError("there are no samples to measure on")
        model = self._training if measure.what.training else self._still
        # Copied: training mode writes running statistics, and a measure leaves its tensors alone.
        tensors = {name: self._copied(tensor) for name, tensor in measure.tensors.items()}
        sums: Tensors = {}
        with seeded(0, self.network.device):  # dropout in training mode
            for rows in batches_of(measure.samples.rows, measure.batch_size):
                read = measure.what(model, tensors, measure.samples.images.batch(rows))
                sums = {name: sums[name] + value for name, value in read.items()} if sums else read
        return sums
