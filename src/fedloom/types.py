"""The plain data that methods, policies, engines and trainers exchange. No logic beyond what the data mean.

Tensors have names; a *model* is a dict of them. What travels is a Task (server to client) and a Report (client to
server); what a client half asks of its engine is a Fit or a Measure.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedloom.encoding import Value
from fedloom.wire import travels

if TYPE_CHECKING:
    from fedloom.network import Network

Tensors = dict[str, Tensor]
Where = Mapping[str, Tensor]  # units kept, per group of the model; groups that are not named are whole
Fixed = Mapping[str, Any]  # what a step reads and does not change: tensors, or named sets of tensors
Augmentation = Callable[[Tensor, torch.Generator], Tensor]  # uint8 pictures and a generator to uint8 pictures
Points = tuple[tuple[str, bool], ...]  # places in a model: a layer's path, and whether its output (or its input)
Moment = tuple[int, int]  # (round, stage)
NEVER: Moment = (-1, 0)
T = TypeVar("T")


@travels
@dataclass(frozen=True)
class Named:
    """A method or model by name and settings: what travels instead of code."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@travels
@dataclass(frozen=True)
class Train:
    """How clients train in this round: the study's [train] section with the round's own learning rate."""

    lr: float = 0.05
    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None  # if given, this many steps instead of epochs
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    uneven: float = 0.0  # share of the clients that do less, an amount of their own from `least` up
    least: int = 1  # epochs, or steps

    @property
    def most(self) -> int:
        """Epochs, or steps, of a client that does all."""
        return self.epochs if self.steps is None else self.steps


@travels
@dataclass(frozen=True, eq=False)
class Report:
    """What a client sends back; `where` says which units its tensors are, `classes` which output rows vote."""

    tensors: Mapping[str, Value] = field(default_factory=dict)
    weight: float = 1.0
    numbers: Mapping[str, float] = field(default_factory=dict)
    where: Where | None = None
    classes: Tensor | None = None
    extra: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)  # further parts, such as "control"
    client: int = -1


@travels
@dataclass(frozen=True, eq=False)
class Task:
    """What a client is asked to do. `tensors` holds the parts that travelled ("model", ...), cut to `where`.

    A method names a `base` instead: an engine moves it to a worker once and cuts every client's tensors out of it where
    that is cheapest.
    """

    client: int
    round: int
    stage: int = 0
    job: str = "work"  # the method's own work, or a registered question
    tensors: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    where: Where | None = None
    only: tuple[str, ...] | None = None  # the names of the base's tensors that travel; None: all
    numbers: Mapping[str, float] = field(default_factory=dict)
    inbox: Mapping[int, Report] = field(default_factory=dict)  # serverless: what neighbours sent, by sender
    copies: int = 1  # to how many the report goes: the server, or all neighbours
    train: Train = field(default_factory=Train)
    accepted: Moment = NEVER  # the client's last accepted moment: the version of its state that counts
    method: Named = field(default_factory=lambda: Named(""))
    model: Named = field(default_factory=lambda: Named(""))
    kind: int = 0  # the place of the client's model in the study's list
    base: Mapping[str, Tensors] | None = None  # parts that the round's tasks share; an engine makes `tensors` of it


@travels
@dataclass(frozen=True)
class Failure:
    """A client that raised, was too slow, or returned nonsense."""

    client: int
    round: int
    stage: int
    kind: str  # raised | late | nonsense | lost | dropped
    message: str
    trace: str = ""


@travels
@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a task: a report or a failure, the state it proposes, and what it cost."""

    client: int
    round: int
    stage: int
    job: str
    report: Report | None = None
    failure: Failure | None = None
    state: dict[str, Any] | None = None
    download_bytes: int = 0
    upload_bytes: int = 0
    macs: int = 0
    forward_macs: int = 0  # of one sample through the model that it sent
    seconds: float = 0.0
    peak_memory_bytes: int | None = None  # of the process that did it, or of its GPU, measured
    step_memory_bytes: int = 0  # of one training step at this size, computed
    parameters: int = 0  # numbers in the report's tensors
    finite: bool | None = None  # whether the report's tensors are, if they were looked at where they were made

    def entry(self) -> dict[str, Any]:
        """Its line in the ledger."""
        numbers, apart = dict(self.report.numbers) if self.report else {}, ("report", "failure", "state", "finite")
        return numbers | {name: value for name, value in vars(self).items() if name not in apart}


@dataclass(frozen=True, eq=False)
class Server:
    """The server after `round` rounds. A policy's memory is `memory[slot]`; entries are replaced, never changed."""

    round: int
    tensors: Tensors
    network: Network
    memory: dict[str, Any] = field(default_factory=dict)

    def next(self, tensors: Tensors) -> Server:
        """The server one round later."""
        return replace(self, round=self.round + 1, tensors=tensors)

    def of(self, kind: int) -> Server:
        """The server as clients with this model of the list see it: with its tensors of that model."""
        return replace(self, tensors=self.memory["models"][kind - 1]) if kind else self


_LABELS: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()


@dataclass(frozen=True, eq=False)
class Images:
    """Samples as they lie on the device: uint8 pictures, labels, and the numbers that normalise a channel."""

    x: Tensor
    y: Tensor
    mean: Tensor  # (C, 1, 1), on the scale 0..1; with `origin` one of them each origin
    std: Tensor
    own: bool = False  # made for one fit (augmented copies), not shared by all clients
    origin: Tensor | None = None  # per row whose numbers normalise it, where images of several origins are tested

    @property
    def labels(self) -> Tensor:
        """`y` on the host, copied there once: whoever asks for some labels does not wait for the device."""
        if self.y.device.type == "cpu":
            return self.y
        return _LABELS[self.y] if self.y in _LABELS else _LABELS.setdefault(self.y, self.y.cpu())

    def batch(self, rows: Tensor) -> Batch:
        """The named rows, normalised, in the type of `mean`."""
        rows = rows.to(self.x.device)
        scaled = self.x[rows].to(self.mean.dtype)
        mean, std = self.mean, self.std
        if self.origin is not None:
            of = self.origin[rows]
            mean, std = mean[of], std[of]
        return Batch(scaled.div_(255).sub_(mean).div_(std), self.y[rows])


@dataclass(frozen=True, eq=False)
class Samples:
    """Some rows of a set of images: a client's training, validation or test part; training images are augmented."""

    images: Images
    rows: Tensor
    augment: Augmentation | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class Batch:
    """Pictures and labels of one step."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Plan:
    """A fit's batches, drawn before it starts: per step one or several rows of indices, and the number of its step."""

    images: Images
    steps: Sequence[tuple[Tensor, ...]]
    variants: Sequence[int]
    epoch: int  # how many steps make the first epoch
    seed: int  # for what a step draws itself, such as dropout

    @cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        """Per step, how large its batches are."""
        return [tuple(part.shape[0] for part in step) for step in self.steps]


class Model(Protocol):
    """What a step and a reading may do with the network: call it, differentiate through it, look at it."""

    network: Network

    def __call__(self, tensors: Tensors, x: Tensor, *, scaler: bool = False) -> Tensor:
        """The logits; with `scaler`, outputs of layers that were cut are divided by the share of units they kept."""

    def read(
        self, tensors: Tensors, x: Tensor, points: Points = (), *, scaler: bool = False, still: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """The logits, and what passed these points on the way to them; `still` as in evaluation, changing nothing."""

    def grad(self, loss: Callable[[Tensors], tuple[Tensor, T]], tensors: Tensors) -> tuple[Tensors, T]:
        """Gradients of a scalar by every trainable tensor, and what else the loss returned."""


class Step(Protocol):
    """One update. Changes `tensors` and `slots` (its own memory, such as momentum) in place; both belong to the fit."""

    @property
    def passes(self) -> float:
        """Forward and backward passes over the first batch that the update costs."""

    def seen(self, tensors: Tensors, fixed: Fixed) -> Tensors:
        """The model that these passes run through."""

    def slots(self, tensors: Tensors) -> dict[str, Tensors]:
        """The step's memory at the start of a fit."""

    def __call__(
        self, model: Model, tensors: Tensors, slots: dict[str, Tensors], fixed: Fixed, batches: Sequence[Batch]
    ) -> Tensor:
        """Do the update; return the loss of every sample of the first batch."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Request: train `tensors` by `step` along `plan`. Several steps: the plan's variant number says which.

    Whatever changes between rounds (rate, lambda, a teacher) is a tensor in `fixed`, so that a captured step stays
    valid.
    """

    tensors: Tensors
    step: Step | Sequence[Step]
    plan: Plan
    fixed: Fixed = field(default_factory=dict)
    kind: int = 0  # which of the study's models it is; a client's requests are about its own
    until: float | None = None  # when its client's time is up, by `perf_counter`

    @property
    def steps(self) -> tuple[Step, ...]:
        """Its steps by their number in the plan."""
        return tuple(self.step) if isinstance(self.step, Sequence) else (self.step,)


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a fit gives back."""

    tensors: Tensors
    steps: int
    samples: int
    loss: float  # mean over all samples trained on
    squared_loss: float  # mean of the squared per-sample loss over the first epoch
    macs: int
    seconds: float
    step_memory: int = 0  # bytes, computed: tensors, gradients, the optimiser's memory, saved activations
    forward_macs: int = 0  # of one sample through the model that the steps ran, on average over all samples

    @property
    def numbers(self) -> dict[str, float]:
        """What a report tells of a fit, at no extra cost."""
        return {"loss": self.loss, "squared_loss": self.squared_loss, "steps": self.steps, "samples": self.samples}


class Reading(Protocol):
    """What a Measure reads: sums over batches, finished at the end."""

    @property
    def passes(self) -> int:
        """How many forward passes it costs; one that goes back costs three."""

    @property
    def training(self) -> bool:
        """Whether the model runs in training mode (batch statistics)."""

    def __call__(self, model: Model, tensors: Tensors, batch: Batch) -> Tensors:
        """What is added up over the batches."""


@dataclass(frozen=True, eq=False)
class Measure:
    """Request: read something of `tensors` on `samples` (accuracy, activations, gradients); the sums come back."""

    tensors: Tensors
    what: Reading
    samples: Samples
    batch_size: int = 500
    kind: int = 0


Request = Fit | Measure
Work = Generator[Any, Any, T]  # a client half: yields requests or tuples of them, returns T
