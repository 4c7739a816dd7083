"""The taped trainer: the reference's bits in every case, and steps that no tape can hold are left to the reference."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.engine import taped
from fedloom.engine.graphs import Graphs
from fedloom.engine.reference import Reference
from fedloom.engine.taped import Taped
from fedloom.network import Network
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD, Adam
from fedloom.readings import Accuracy
from fedloom.steps import Descent
from fedloom.types import Fit, Images, Measure, Plan, Samples
from tests.contract.cuda import pretend


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Recorded the third time, tried the fourth, played from the fifth on."""
    monkeypatch.setattr(taped, "PATIENCE", 2)


@pytest.fixture
def played(monkeypatch):
    """The tapes there are, and how often they were played after they had been trusted."""
    tapes: list[taped.Tape] = []
    begin = taped.Tape.__init__
    monkeypatch.setattr(taped.Tape, "__init__", lambda self: (begin(self), tapes.append(self))[0])
    return tapes


def network(*layers: nn.Module) -> Network:
    return Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *layers, nn.Linear(8, 3)), (1, 4, 4), 3)


def fit(of: Network, step: Any, steps: int = 8, size: int = 6, seed: int = 0, **fixed: Any) -> Fit:
    """Some steps over random images; every fourth batch is short."""
    draw = torch.Generator().manual_seed(seed)
    images = Images(
        torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8, generator=draw),
        torch.randint(0, 3, (40,), generator=draw), torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), 0.25),
    )  # fmt: skip
    rows = [(torch.randperm(40, generator=draw)[: size - 2 * (number % 4 == 3)],) for number in range(steps)]
    plan = Plan(images, rows, [0] * steps, steps, seed)
    start = {name: tensor + 0.01 * seed for name, tensor in of.initial(0).items()}
    return Fit(start, step, plan, {"lr": torch.tensor(0.1), **fixed})


def same(of: Network, fits: list[Fit]) -> bool:
    """Whether one taped trainer gives what the reference gives, fit after fit, to the last bit."""
    ours, truth = Taped(of).solve(fits), Reference(of).solve(fits)
    for one, other in zip(ours, truth, strict=True):
        if isinstance(other, Exception):
            raise other
        assert (one.loss, one.squared_loss, one.steps) == (other.loss, other.squared_loss, other.steps)
        assert all(torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items())
    return True


@pytest.mark.parametrize(
    "step",
    [
        Descent(CrossEntropy(), SGD(0.9, 1e-3), clip=1.0),
        Descent(CrossEntropy(), Adam(1e-3, decoupled=True)),
        (Descent(CrossEntropy(), SGD(0.9)), Descent(CrossEntropy(), SGD(0.9), clip=0.1)),
    ],
)
@pytest.mark.parametrize("layers", [(nn.ReLU(),), (nn.BatchNorm1d(8), nn.ReLU()), (nn.Dropout(0.5),)])
def test_the_same_bits_with_momentum_norms_dropout_and_short_batches(step, layers, played):
    of = network(*layers)
    fits = [fit(of, step, steps=12, seed=seed) for seed in range(3)]
    if isinstance(step, tuple):
        fits = [replace(each, plan=replace(each.plan, variants=[0, 1] * 6)) for each in fits]
    assert same(of, fits)
    assert any(tape.trusted for tape in played)
    assert not any(tape.refused for tape in played)


def test_a_run_of_fits_goes_on_where_the_others_numbers_stood():
    """What a network draws is drawn from the fit's seed, whether it is played, recorded or tried beside."""
    of = network(nn.Dropout(0.5))
    torch.manual_seed(3)
    Taped(of).solve([fit(of, Descent(CrossEntropy(), SGD()))])
    after = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(2))


@dataclass(frozen=True)
class Pulled(CrossEntropy):
    """Towards two anchors, which may be one and the same tensor."""

    def __call__(self, model, tensors, batch, fixed):
        total, losses = super().__call__(model, tensors, batch, fixed)
        name = next(iter(tensors))
        near, far = fixed["near"][name], fixed["far"][name]
        return total + (tensors[name] - near).square().sum() - 0.5 * (tensors[name] - far).square().sum(), losses


def test_two_anchors_that_were_one_when_it_was_recorded():
    of = network(nn.ReLU())
    first, other = of.initial(0), of.initial(1)
    step = Descent(Pulled(), SGD())
    assert same(of, [fit(of, step, near=first, far=first), fit(of, step, near=first, far=other)])


@dataclass(frozen=True)
class Scaled(CrossEntropy):
    """By a plain number among what is fixed."""

    def __call__(self, model, tensors, batch, fixed):
        total, losses = super().__call__(model, tensors, batch, fixed)
        return fixed["scale"] * total, losses


def test_a_plain_number_is_part_of_the_kind(played):
    of, step = network(nn.ReLU()), Descent(Scaled(), SGD())
    assert same(of, [fit(of, step, scale=scale) for scale in (1.0, 2.0, 1.0)])
    assert sum(tape.trusted for tape in played) >= 2


@dataclass(frozen=True)
class Made(CrossEntropy):
    """Makes a tensor of numbers and writes to it."""

    def __call__(self, model, tensors, batch, fixed):
        total, losses = super().__call__(model, tensors, batch, fixed)
        scale = torch.tensor([0.5, 1.0])
        scale += total.detach()
        return total * scale.sum(), losses


def test_what_a_step_makes_of_numbers_is_made_anew(played):
    of = network(nn.ReLU())
    assert same(of, [fit(of, Descent(Made(), SGD()), steps=12)])
    assert any(tape.trusted for tape in played)


@dataclass(frozen=True)
class Looks(CrossEntropy):
    """Decides by a value."""

    how: str = "item"

    def __call__(self, model, tensors, batch, fixed):
        total, losses = super().__call__(model, tensors, batch, fixed)
        seen = {"item": Tensor.item, "tolist": Tensor.tolist, "numpy": lambda t: t.detach().numpy()}
        if self.how in seen:
            return (total if seen[self.how](total) > 0 else 2 * total), losses  # always so: no trial would tell
        if self.how == "mask":
            return total + model(tensors, batch.x)[losses > 1].square().sum(), losses
        return total * (batch.y == 0).nonzero().shape[0], losses


@pytest.mark.parametrize("how", ["item", "tolist", "numpy", "mask", "count"])
def test_a_step_that_looks_at_values_stays_with_the_reference(how, played, caplog):
    of = network(nn.ReLU())
    with caplog.at_level(logging.WARNING, "fedloom.engine"):
        assert same(of, [fit(of, Descent(Looks(how=how), SGD()), steps=12, seed=seed) for seed in range(2)])
    assert [tape.refused for tape in played] == [True] * len(played)
    assert len({record.message for record in caplog.records}) == len(caplog.records) > 0
    assert "depends on values" in caplog.text


class Warming(nn.Module):
    """Says more with every batch that it was trained on, which its state dict does not tell."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += 0.01
        return x * (1 + self.seen)


def test_what_a_module_keeps_for_itself_moves_once_a_step(played, caplog):
    step = Descent(CrossEntropy(), SGD())
    with caplog.at_level(logging.WARNING, "fedloom.engine"):
        (ours,), (truth,) = (
            trainer(of).solve([fit(of, step)])
            for trainer, of in ((Taped, network(Warming())), (Reference, network(Warming())))
        )
    assert all(torch.equal(ours.tensors[name], tensor) for name, tensor in truth.tensors.items())
    assert any(tape.refused for tape in played)
    assert "keeps for itself" in caplog.text


@dataclass(frozen=True)
class Counts(CrossEntropy):
    """Remembers in Python how often it was asked, and is none the less equal to itself."""

    asked: list[int] = field(default_factory=list, compare=False, hash=False)

    def __call__(self, model, tensors, batch, fixed):
        self.asked.append(1)
        total, losses = super().__call__(model, tensors, batch, fixed)
        return total * len(self.asked), losses


def test_a_tape_that_gives_other_bits_is_not_trusted(played, caplog):
    of = network(nn.ReLU())
    with caplog.at_level(logging.WARNING, "fedloom.engine"):
        Taped(of).solve([fit(of, Descent(Counts(), SGD()), steps=12)])
    assert not any(tape.trusted for tape in played)
    assert "other bits" in caplog.text


class Whim(nn.Module):
    """Now and then, by dice of Python or NumPy, twice as much: most often two batches in a row get the same."""

    def __init__(self, dice):
        super().__init__()
        self.dice = dice  # a name: skeletons would get generators of their own

    def forward(self, x):
        return x * (2 if {"python": random, "numpy": np.random}[self.dice].random() < 0.1 else 1)


@pytest.mark.parametrize("trainer", [Taped, Graphs])
@pytest.mark.parametrize("dice", ["python", "numpy"])
def test_a_model_that_throws_dice_in_python_is_not_recorded(trainer, dice, monkeypatch, caplog):
    of = network(Whim(dice))
    fits = [fit(of, Descent(CrossEntropy(), SGD()), steps=12, seed=seed) for seed in range(3)]
    measures = [Measure(each.tensors, Accuracy(), Samples(fits[0].plan.images, torch.arange(20)), 10) for each in fits]
    Reference(of).solve(fits)  # MACs are counted once, by a forward pass
    ends = []
    with caplog.at_level(logging.WARNING, "fedloom.engine"), monkeypatch.context() as patch:
        pretend(patch)
        for kind in (Reference, trainer):
            random.seed(5)
            np.random.seed(5)
            ends.append(kind(of).solve([*fits, *measures]))
    said = [record.message for record in caplog.records if "draws random numbers in Python" in record.message]
    assert len(said) == (1 if trainer is Taped else 2)
    for truth, one in zip(*ends, strict=True):
        for name, tensor in (truth if isinstance(truth, dict) else truth.tensors).items():
            assert torch.equal((one if isinstance(one, dict) else one.tensors)[name], tensor)


@dataclass
class Loose:
    """A step of one's own without a hash."""

    passes = 1
    inner: Any = field(default_factory=lambda: Descent(CrossEntropy(), SGD()))
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, *args):
        return self.inner(*args)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_a_step_without_a_hash_runs_as_ever(played, caplog):
    of = network(nn.ReLU())
    with caplog.at_level(logging.WARNING, "fedloom.engine"):
        assert same(of, [fit(of, Loose())])
    assert not played
    assert "Loose runs step by step: unhashable" in caplog.text


def test_a_failing_client_fails_alone():
    """Labels that do not exist, in the very step that would have been recorded."""
    of, step = network(nn.ReLU()), Descent(CrossEntropy(), SGD())
    good, bad = fit(of, step, steps=2), fit(of, step, steps=2, seed=1)
    bad = replace(bad, plan=replace(bad.plan, images=replace(bad.plan.images, y=bad.plan.images.y + 7)))
    trainer = Taped(of)
    first, failed, *others = trainer.solve([good, bad, good, good, good])
    assert isinstance(failed, IndexError)
    assert all(torch.equal(first.tensors[name], each.tensors[name]) for each in others for name in first.tensors)


def test_few_kinds_are_kept(monkeypatch):
    monkeypatch.setattr(taped, "KEPT", 3)
    of = network(nn.ReLU())
    trainer = Taped(of)
    trainer.solve([fit(of, Descent(CrossEntropy(), SGD(number / 10)), steps=1) for number in range(9)])
    assert len(trainer._tapes) == 3


def test_nothing_of_a_fit_is_held_by_its_tape():
    import gc
    import weakref

    of = network(nn.ReLU())
    one = fit(of, Descent(CrossEntropy(), SGD(0.9)), steps=8)
    trainer = Taped(of)
    (done,) = trainer.solve([one])
    gone = [weakref.ref(tensor) for tensor in (*one.tensors.values(), *done.tensors.values())]
    del one, done
    trainer.solve([fit(of, Descent(CrossEntropy(), SGD(0.9)), steps=1)])  # a skeleton holds the last fit's
    gc.collect()
    assert not any(each() is not None for each in gone)
