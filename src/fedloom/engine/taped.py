"""The taped trainer (CPU): a step is recorded once as the tensor operations it comes to, and played back after that.

A fifth or more of an eager step of a small network is bookkeeping: modules are called, a graph for the gradients is
built, walked backwards and thrown away, always the same. A *tape* is what is left without it: forward, backward and
update as one straight row of operations on the tensors that the step gets. They are the reference's operations in its
order, so the result is the reference's to the last bit, and nobody can tell who was played and who was not.

A kind of step (the step itself, and the layout of all that it reads) is recorded once it has come often. A tape is
trusted when it has given the step's own bits on another batch. A step that looks at values, as `item` does, that draws
with Python's or NumPy's own generator, or whose tape does not give its bits, stays with the reference, and the log says
so once. What a step counts in Python no tape can know: a method with such a step leaves `taped` out of its `trainers`.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.engine.reference import Advance, Reference
from fedloom.engine.undrawn import undrawn
from fedloom.network import Network
from fedloom.recent import Recent
from fedloom.types import Batch, Fit, Step, Tensors

__all__ = ["Taped"]

log = logging.getLogger("fedloom.engine")
PATIENCE = 16  # steps of a kind before it is recorded: to record and to try a tape costs about as much
KEPT = 64  # kinds of fits whose tapes are kept
Values = list[Any]  # what a step reads: tensors, slots, fixed and a list of batches
aten = torch.ops.aten
# What takes a tensor's values out of PyTorch without an operation that a recorder would see.
LOOKS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.untyped_storage}


class Untapable(Exception):
    """A step that is more than a row of operations on tensors."""


class Unseen(TorchFunctionMode):
    """Refuses steps that look at values in a way that reaches no kernel."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let all else through."""
        if func in LOOKS:
            raise Untapable(f"Tensor.{func.__name__} depends on values")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what reaches the kernels, below autograd, while it is done."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports torch's compiler, a second and more

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.held = fx.Graph(), dict[str, Tensor]()
        self.before: list[tuple[Tensor, int, Tensor]] = []  # what the step itself holds, its version, its values
        self.nodes = {id(tensor): self.graph.placeholder(f"given{number}") for number, tensor in enumerate(given)}
        self.alive = list(given)  # an id names a tensor only while that lives

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do one operation and write it down."""
        kwargs = kwargs or {}
        if _by_value(func, args):
            raise Untapable(f"{func} depends on values")
        if func is not aten.lift_fresh.default:
            fx.node.map_aggregate((args, kwargs), self._noted)
        result = func(*args, **kwargs)
        if func is aten.detach.default:  # the same memory under another name, which is autograd's business
            self._name(result, self._node(args[0]))
            return result
        if func is aten.lift_fresh.default:  # a tensor made of numbers: the step may write to it, the tape's own stays
            self._name(result, self.graph.call_function(aten.clone.default, (self._holding(result.clone()),)))
            return result
        if func is aten.t.default and (before := self._node(args[0])).target is aten.t.default:  # turned back
            self._name(result, before.args[0])
            return result
        node = self.graph.call_function(func, *fx.node.map_aggregate((args, kwargs), self._node))
        if isinstance(result, Tensor):
            self._name(result, node)
        else:
            for place, each in enumerate(result or ()):
                self._name(each, self.graph.call_function(operator.getitem, (node, place)))
        return result

    def _name(self, tensor: Tensor, node: Any) -> None:
        if id(tensor) not in self.nodes:  # else it was changed in place and is still itself
            self.nodes[id(tensor)] = node
            self.alive.append(tensor)

    def _node(self, value: Any) -> Any:
        """Who made this tensor; one that nobody made is held by the step itself and stays as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.nodes:
            self._name(value, self._holding(value))
        return self.nodes[id(value)]

    def _noted(self, value: Any) -> Any:
        """Remember what a tensor is that nobody made: the step may change it."""
        if isinstance(value, Tensor) and id(value) not in self.nodes:
            self.before.append((value, value._version, value.clone()))
            self._node(value)
        return value

    def undo(self) -> bool:
        """Give the tensors that the step itself holds their values back; whether it changed any."""
        changed = [(tensor, values) for tensor, version, values in self.before if tensor._version != version]
        for tensor, values in changed:
            tensor.copy_(values)
        return bool(changed)

    def _holding(self, tensor: Tensor) -> fx.Node:
        name = f"held{len(self.held)}"
        self.held[name] = tensor
        return self.graph.get_attr(name)

    def tape(self, result: Tensor) -> Callable[..., Tensor]:
        """All of it as one function of the given tensors, which lets go of every tensor after its last use."""
        self.graph.output(self._node(result))
        self.graph.eliminate_dead_code(lambda node: node.target is not operator.getitem)
        play: Callable[..., Tensor] = fx.GraphModule(self.held, self.graph).forward
        return play


def _by_value(func: Any, args: Sequence[Any]) -> bool:
    """Whether what an operation gives is no tensor, or one whose shape values decide."""
    if func is aten.index.Tensor:  # by numbers the shape is theirs, by a mask it is counted
        return any(each is not None and each.dtype == torch.bool for each in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


class Tape:
    """One kind of step on its way from seen to recorded to trusted."""

    def __init__(self) -> None:
        self.seen = 0
        self.play: Callable[..., Tensor] | None = None
        self.trusted = self.refused = False


class Taped(Reference):
    """Steps that come often are played from tape; all else is the reference's."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._tapes = Recent[object, dict[object, Tape]](KEPT)
        self._said: set[str] = set()

    def close(self) -> None:
        """Forget the tapes."""
        self._tapes.clear()

    def _advance(self, fit: Fit, tensors: Tensors, slots: dict[str, Tensors]) -> Advance:
        """Steps of a fit by their tapes, as far as there are any."""
        live, values = super()._advance(fit, tensors, slots), [tensors, slots, dict(fit.fixed)]
        try:
            tapes = self._tapes.setdefault((fit.steps, _layout(values)), defaultdict(Tape))
        except TypeError as error:
            self._say(f"{type(fit.step).__name__} runs step by step: {error}")
            return live
        given = [tensor.detach() for tensor in _leaves(values)]

        def advance(variant: int, batches: Sequence[Batch]) -> Tensor:
            tape = tapes[variant, *((each.x.shape, each.y.shape) for each in batches)]
            if tape.trusted and tape.play is not None:
                return tape.play(*given, *(part for each in batches for part in (each.x, each.y)))
            tape.seen += 1
            if tape.refused or tape.seen <= PATIENCE:
                return live(variant, batches)
            seen = [*values, list(batches)]
            before, copies = torch.default_generator.get_state(), _copied(seen)
            losses = live(variant, batches)
            after = torch.default_generator.get_state()
            torch.default_generator.set_state(before)
            self._try(tape, fit.steps[variant], copies, [*_leaves(seen), losses, after])
            torch.default_generator.set_state(after)
            return losses

        return advance

    def _try(self, tape: Tape, step: Step, values: Values, truth: Sequence[Tensor]) -> None:
        """Record a step on values of its own, or see whether its tape makes of them what the step made."""
        leaves = list(_leaves(values))
        try:
            if tape.play is None:
                tape.play = self._recorded(step, values, leaves)
                return
            found = [leaf.detach() for leaf in leaves]
            losses = tape.play(*found)
            tape.trusted = all(map(_equal, [*found, losses, torch.default_generator.get_state()], truth))
            why = "its tape gives other bits on another batch"
        except Exception as error:  # noqa: BLE001 (whatever a step does that cannot be written down or played)
            why = (str(error) or type(error).__name__).splitlines()[0]
        if not tape.trusted:
            tape.refused, tape.play = True, None
            self._say(f"{type(step).__name__} runs step by step: {why}")

    def _recorded(self, step: Step, values: Values, leaves: Sequence[Tensor]) -> Callable[..., Tensor]:
        """The tape of a step, which leaves no trace of having been recorded."""
        tensors, slots, fixed, batches = values
        with Recorder(leaves) as recorder, undrawn(), Unseen():
            try:
                losses = step(self._training, tensors, slots, fixed, batches)
            finally:
                changes = recorder.undo()
        if changes:
            raise Untapable("it changes a tensor that it keeps for itself")
        play: Callable[..., Tensor] = recorder.tape(losses)
        return play

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("taped: %s", text)


def _leaves(value: Any) -> Iterator[Tensor]:
    """All tensors in what a step reads, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Batch):
        yield from (value.x, value.y)
    elif isinstance(value, list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)


def _copied(value: Any) -> Any:
    """Equal values in other memory, every tensor another one, even where one is there twice."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Batch):
        return Batch(value.x.clone(), value.y.clone())
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return {name: _copied(each) for name, each in value.items()} if isinstance(value, Mapping) else value


def _layout(value: Any) -> object:
    """What must be alike for a tape to fit: names, types, shapes, strides, who wants a gradient; and plain values."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, list):
        return tuple(map(_layout, value))
    return tuple((name, _layout(each)) for name, each in value.items()) if isinstance(value, Mapping) else value


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but any nan for any other."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
