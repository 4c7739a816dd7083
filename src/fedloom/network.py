"""A model as a pure function of named tensors, at any width.

The user's module is only a template. Its tensors live outside; a call puts them into a *skeleton*, a copy of the module
without weights whose attributes fit their shapes. So a sub-model of any size runs without a model class of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cached_property
from sys import maxsize

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedloom.copies import to_device
from fedloom.errors import InputError
from fedloom.models.resolve import initialise
from fedloom.recent import Recent
from fedloom.types import Tensors, Where
from fedloom.units import Units, called, find_units, macs, saved_bytes, skeleton

__all__ = ["Network"]

SKELETONS = 1024
SIZES = 4096  # of sub-models whose costs and shapes are remembered
Spot = tuple[dict[str, Tensor | None], str, str]  # where a module keeps a tensor: dict, key, the tensor's name
Skeleton = tuple[nn.Module, list[Spot], bool | None]  # with its mode
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Network:
    """What a model is apart from its weights: how to build, call, cut and cost it."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shape: tuple[int, ...],
        classes: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        half: bool = False,
        layout: str = "contiguous",
    ) -> None:
        self.build, self.shape, self.classes = build, shape, classes
        self.dtype, self.device = dtype, torch.device(device)
        self.half = half  # matrix products and convolutions in bfloat16, channels last; tensors stay as they are
        self.module = initialise(build, 0)
        # Of eleven networks and batch sizes none was slower channels last with one thread in float32: `fedloom bench
        # layout`, docs/benchmarks.md.
        suitable = layout == "auto" and self.device.type == "cpu" and dtype == torch.float32
        self.channels_last = layout == "channels_last" or (suitable and _runs_channels_last(self.module, shape))
        self.names = tuple(self.module.state_dict())
        _refuse_ties(self.module)
        self.buffers = frozenset(name for name, _ in self.module.named_buffers())
        # Sizes that evolve are new in every round. Buffers that a skeleton alone holds may be in a captured step.
        lasting = any(part._non_persistent_buffers_set for part in self.module.modules())
        self._skeletons = Recent[tuple[object, ...], Skeleton](maxsize if lasting else SKELETONS)
        self._held: list[Spot] = []  # where the last call's tensors are
        self._initial: dict[int, Tensors] = {}
        self._scalars = Recent[float, Tensor](64)
        self._masks = Recent[bytes, Tensor](1024)
        self._macs = Recent[tuple[object, ...], int](SIZES)
        self._shapes = {name: tensor.shape for name, tensor in self.module.state_dict().items()}
        self._cut_shapes = Recent[tuple[tuple[str, int], ...], dict[str, torch.Size]](SIZES)

    def initial(self, seed: int) -> Tensors:
        """The weights that this seed gives."""
        if seed not in self._initial:
            # Kept: every client that starts without tensors of its own asks for them in every round.
            self._initial = {seed: self.placed(initialise(self.build, seed))}
        return dict(self._initial[seed])

    def placed(self, module: nn.Module) -> Tensors:
        """A model's weights where this network's are, and of their type."""
        state = module.state_dict()
        return {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in state.items()
        }

    def scalar(self, value: float) -> Tensor:
        """A number where the tensors are; the same tensor for the same number, so that fits can be seen to share it."""
        if value not in self._scalars:
            self._scalars[value] = torch.full((), value, dtype=self.dtype, device=self.device)  # no copy to wait for
        return self._scalars[value]

    def mask(self, chosen: Tensor) -> Tensor:
        """Booleans of the host where the tensors are; the same tensor for the same ones, so that most need no copy."""
        key = chosen.numpy().tobytes()
        if key not in self._masks:
            (self._masks[key],) = to_device([chosen], self.device)
        return self._masks[key]

    @cached_property
    def norms(self) -> frozenset[str]:
        """Names of all tensors that belong to normalisation layers, by the type of the layer."""
        return frozenset(
            f"{path}.{name}" if path else name
            for path, module in self.module.named_modules()
            if isinstance(module, NORMS)
            for name in module.state_dict()
        )

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Paths of the layers, in the order in which an image first reaches them."""
        return called(initialise(self.build, 0).float(), torch.zeros(2, *self.shape))

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """Paths of the fully connected layers, in the order in which an image passes them."""
        return tuple(path for path in self.called if isinstance(self.module.get_submodule(path), nn.Linear))

    @cached_property
    def units(self) -> Units:
        """Units that live and die together, found once from the model's graph."""
        return find_units(initialise(self.build, 0).float(), torch.zeros(2, *self.shape))

    def shapes(self, where: Where | None = None) -> dict[str, torch.Size]:
        """The shape of every tensor, cut to these units."""
        if not where:
            return self._shapes
        key = tuple((group, len(kept)) for group, kept in where.items())
        if key not in self._cut_shapes:
            self._cut_shapes[key] = self.units.shapes(dict(key))
        return self._cut_shapes[key]

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of every tensor."""
        state = self.module.state_dict()
        return {name: self.dtype if each.is_floating_point() else each.dtype for name, each in state.items()}

    def bound(self, tensors: Tensors, *, training: bool, scaler: bool = False) -> nn.Module:
        """A module that computes with exactly these tensors, until the next call."""
        key = (scaler, *(tensor.shape for tensor in tensors.values()))
        if key not in self._skeletons:
            module = skeleton(self._template(tensors), tensors)
            if scaler:
                self._scale(module, tensors)
            places = [place for path, part in module.named_modules() for place in _places(path, part)]
            self._skeletons[key] = module, places, None
        # One skeleton serves both modes: sizes that evolve are many, and a copy takes long.
        module, places, mode = self._skeletons[key]
        if mode != training:
            self._skeletons[key] = module.train(training), places, training
        if places is not self._held:  # a skeleton that waits must not keep a model alive: sizes that evolve are many
            for slot, attribute, _ in self._held:
                slot[attribute] = None
            self._held = places
        for slot, attribute, name in places:
            slot[attribute] = tensors[name]
        return module

    def _template(self, tensors: Tensors) -> nn.Module:
        """The module that has just these tensors: the whole one, or what it says is left without the others."""
        missing = frozenset(self.names) - tensors.keys()  # what a fit trains beside the model does not matter here
        if not missing:
            return self.module
        shallow: nn.Module = self.module.without(missing)  # type: ignore[operator]
        return shallow

    def _scale(self, module: nn.Module, tensors: Tensors) -> None:
        """Let layers divide their outputs by the share of units they kept (HeteroFL's scaler)."""
        for path, layer in module.named_modules():
            name = f"{path}.weight"
            if isinstance(layer, _ConvNd | nn.Linear):
                axis = 1 if getattr(layer, "transposed", False) else 0
                share = tensors[name].shape[axis] / self._shapes[name][axis]
                if share < 1:
                    layer.register_forward_hook(_divided(share))

    def macs(self, tensors: Tensors) -> int:
        """Multiply-accumulates of one sample's forward pass at this size."""
        key = tuple(tensor.shape for tensor in tensors.values())
        if key not in self._macs:
            model = self.bound(self._apart(tensors), training=False)
            self._macs[key] = macs(model, self._sample[None])
        return self._macs[key]

    def saved_bytes(self, tensors: Tensors, batch: int) -> int:
        """Bytes that the forward pass of a batch saves for the backward pass at this size, computed."""
        own = self._apart(tensors)
        return saved_bytes(self.bound(own, training=True), own.values(), self._sample, batch)

    def _apart(self, tensors: Tensors) -> Tensors:
        """The model's own tensors (a fit may train more) to run it with, which leaves them as they are."""
        return {
            name: tensor.clone() if name in self.buffers else tensor.detach().requires_grad_()
            for name, tensor in tensors.items()
            if name in self._shapes
        }

    @cached_property
    def _sample(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def _runs_channels_last(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a network has convolutions over pictures and takes them channels last (one that calls `view` may not)."""
    if len(shape) != 3 or not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # workers are forked later, and threads do not survive that
    try:
        with torch.no_grad():
            trial: nn.Module = deepcopy(module).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
            trial(torch.zeros(2, *shape).contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return False
    finally:
        torch.set_num_threads(threads)
    return True


def _refuse_ties(module: nn.Module) -> None:
    names: dict[int, str] = {}
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in held:
        if id(tensor) in names:
            raise InputError(f"the model ties '{name}' to '{names[id(tensor)]}'; tied tensors are not supported")
        names[id(tensor)] = name


def _divided(share: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda layer, inputs, output: output / share


def _places(path: str, module: nn.Module) -> list[Spot]:
    """Where a module keeps its own tensors: the dict, the key in it, and the tensor's name in the model."""
    slots: tuple[dict[str, Tensor | None], ...] = (module._parameters, module._buffers)  # type: ignore[assignment]
    temporary = module._non_persistent_buffers_set
    return [
        (slot, key, f"{path}.{key}" if path else key)
        for slot in slots
        for key, tensor in slot.items()
        if tensor is not None and key not in temporary
    ]
