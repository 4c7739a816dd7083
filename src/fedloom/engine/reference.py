"""The reference trainer: one request after another, one eager step after another. The others must match it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.client import batches_of
from fedloom.errors import ClientError
from fedloom.network import SIZES, Network
from fedloom.recent import Recent
from fedloom.seeds import seeded
from fedloom.types import Batch, Fit, Fitted, Measure, Points, Request, Tensors
from fedloom.units import tapped

__all__ = ["Eager", "Reference"]

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
        trained = {name: each.requires_grad_() for name, each in tensors.items() if self._trainable(name, each)}
        slots, losses = fit.steps[0].slots(trained), list[Tensor]()
        advance = self._advance(fit, tensors, slots)
        with seeded(plan.seed, self.network.device), torch.no_grad():
            for number, (rows, variant) in enumerate(zip(plan.steps, plan.variants, strict=True)):
                if fit.until is not None and perf_counter() > fit.until:
                    raise TimeoutError(f"its time was up after {number} of {len(plan.steps)} steps")
                batches = [plan.images.batch(row) for row in rows]
                losses.append(advance(variant, batches))
        # Looked at once, after the last step: nothing in the loop waits for the device.
        all_losses, first = torch.cat(losses).double(), torch.cat(losses[: plan.epoch]).double()
        loss, squared = torch.stack([all_losses.mean(), first.square().mean()]).tolist()
        # What leaves the trainer is laid out as ever: it gives the same bits wherever it travelled.
        done = {
            name: self._copied(tensor.detach(), torch.contiguous_format) if tensor.ndim == 4 else tensor.detach()
            for name, tensor in tensors.items()
        }
        seconds = perf_counter() - start
        macs, forward = self._cost(fit)
        return Fitted(done, len(plan.steps), len(all_losses), loss, squared, macs, seconds, self._memory(fit), forward)

    def _advance(self, fit: Fit, tensors: Tensors, slots: dict[str, Tensors]) -> Advance:
        """How a step of this fit is done."""
        steps = fit.steps
        return lambda variant, batches: steps[variant](self._training, tensors, slots, fit.fixed, batches)

    def _copied(self, tensor: Tensor, layout: torch.memory_format = torch.channels_last) -> Tensor:
        """A copy, kernels turned to this layout (`contiguous` would leave those of one channel as they are)."""
        turned = self.network.channels_last and tensor.ndim == 4
        return tensor.clone(memory_format=layout if turned else torch.preserve_format)

    def _trainable(self, name: str, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and name not in self.network.buffers

    def _cost(self, fit: Fit) -> tuple[int, int]:
        """Multiply-accumulates of all passes, a backward one costing two forward ones; and of one sample forward."""
        forward = [self.network.macs(step.seen(fit.tensors, fit.fixed)) for step in fit.steps]
        once = [forward[variant] * sizes[0] for sizes, variant in zip(fit.plan.sizes, fit.plan.variants, strict=True)]
        total = sum(3 * macs * fit.steps[variant].passes for macs, variant in zip(once, fit.plan.variants, strict=True))
        return round(total), round(sum(once) / sum(sizes[0] for sizes in fit.plan.sizes))

    def _memory(self, fit: Fit) -> int:
        """Bytes of the largest step, once a signature: the tensors, their gradients, slots and saved activations."""
        steps, largest = fit.steps, max(sizes[0] for sizes in fit.plan.sizes)
        key = (largest, len(steps), tuple(tensor.shape for tensor in fit.tensors.values()))
        if key not in self._memories:
            trained = {name: tensor for name, tensor in fit.tensors.items() if self._trainable(name, tensor)}
            slots = [tensor for slot in steps[-1].slots(trained).values() for tensor in slot.values()]
            held = sum(tensor.nbytes for tensor in (*fit.tensors.values(), *trained.values(), *slots))
            seen = steps[-1].seen(fit.tensors, fit.fixed)
            self._memories[key] = held + self.network.saved_bytes(seen, largest)
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
