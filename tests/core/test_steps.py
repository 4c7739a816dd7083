"""Optimisers against torch.optim, and the reference trainer against a loop written by hand."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedloom.engine.reference import Eager, Reference
from fedloom.engine.stacked import stack_fixed
from fedloom.engine.worker import perform
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD, Adam, optimizer_of
from fedloom.readings import Accuracy
from fedloom.steps import Descent, clip_
from fedloom.types import Batch, Fit, Measure, Report, Samples, Task, Train
from tests.core.small import SIDE, Normed, Place, Plain, client_of, images_of, network_of

SHAPES = ((3, 4), (5,), (), (2, 1, 3))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("ours", "theirs"), [
    (SGD(), lambda p: torch.optim.SGD(p, 0.1)),
    (SGD(weight_decay=0.3), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
    (SGD(0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    (SGD(0.9, 0.3), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.3)),
    (Adam(), lambda p: torch.optim.Adam(p, 0.1)),
    (Adam(0.3), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.3)),
    (Adam(0.3, decoupled=True), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
    (Adam(0.3, True, 0.5, 0.7, 1e-3), lambda p: torch.optim.AdamW(p, 0.1, (0.5, 0.7), 1e-3, weight_decay=0.3)),
])  # fmt: skip
def test_optimisers_are_those_of_torch(ours, theirs):
    generator = torch.Generator().manual_seed(0)
    tensors = {str(i): torch.randn(shape, generator=generator, dtype=torch.float64) for i, shape in enumerate(SHAPES)}
    copies = [nn.Parameter(tensor.clone()) for tensor in tensors.values()]
    slots, other, rate = ours.slots(tensors), theirs(copies), torch.tensor(0.1, dtype=torch.float64)
    for _ in range(7):
        grads = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        for parameter, grad in zip(copies, grads, strict=True):
            parameter.grad = grad.clone()
        ours.update(tensors, slots, dict(zip(tensors, grads, strict=True)), rate)
        other.step()
        for tensor, parameter in zip(tensors.values(), copies, strict=True):
            assert torch.allclose(tensor, parameter.detach(), rtol=0, atol=1e-12)


def test_only_tensors_with_a_gradient_move():
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    optimizer = SGD(0.9, 0.1)
    optimizer.update(tensors, optimizer.slots(tensors), {"a": torch.ones(2)}, torch.tensor(0.1))
    assert torch.equal(tensors["b"], torch.ones(2))
    assert not torch.equal(tensors["a"], torch.ones(2))


@pytest.mark.parametrize("limit", [0.01, 1.0, 3.7, 1e6])
def test_clipping_is_that_of_torch(limit):
    generator = torch.Generator().manual_seed(1)
    grads = {str(i): torch.randn(shape, generator=generator, dtype=torch.float64) for i, shape in enumerate(SHAPES)}
    copies = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    for parameter, grad in zip(copies, grads.values(), strict=True):
        parameter.grad = grad.clone()
    nn.utils.clip_grad_norm_(copies, limit)
    clip_(grads, limit)
    for grad, parameter in zip(grads.values(), copies, strict=True):
        assert torch.allclose(grad, parameter.grad, rtol=0, atol=1e-12)


def test_names_of_optimisers():
    assert optimizer_of(Train(momentum=0.5, weight_decay=0.1)) == SGD(0.5, 0.1)
    assert optimizer_of(Train(optimizer="adam", weight_decay=0.1)) == Adam(0.1)
    assert optimizer_of(Train(optimizer="adamw", weight_decay=0.1)) == Adam(0.1, decoupled=True)


def by_hand(module, images, steps, train):
    """SGD as anybody would write it."""
    module.train()
    buffers = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for (rows,) in steps:
        x = images.x[rows].float().div(255).sub(images.mean).div(images.std)
        module.zero_grad()
        F.cross_entropy(module(x), images.y[rows]).backward()
        if train.clip:
            nn.utils.clip_grad_norm_(module.parameters(), train.clip)
        with torch.no_grad():
            for parameter, buffer in zip(module.parameters(), buffers, strict=True):
                grad = parameter.grad + train.weight_decay * parameter if train.weight_decay else parameter.grad
                buffer.mul_(train.momentum).add_(grad)
                parameter -= train.lr * buffer
    return module.state_dict()


@pytest.mark.parametrize(
    "train", [Train(epochs=2, batch_size=16), Train(epochs=2, batch_size=16, momentum=0.9, clip=0.5)]
)
def test_reference_trainer_is_a_plain_loop_bit_for_bit(train):
    network, images = network_of(Normed), images_of(75)
    client = client_of(range(75), network, images, train=train)
    plan, tensors = client.plan(), network.initial(3)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    (fit,) = Reference(network).solve([Fit(tensors, Descent.of(CrossEntropy(), train), plan, {"lr": client.rate})])
    module = copy.deepcopy(network.module)
    module.load_state_dict(before)
    expected = by_hand(module, images, plan.steps, train)
    assert fit.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(fit.tensors[name], tensor), name
        assert torch.equal(tensors[name], before[name]), f"{name} was changed in place"
    assert int(fit.tensors["norm.num_batches_tracked"]) == fit.steps == len(plan.steps) == 10
    assert not torch.equal(fit.tensors["norm.running_mean"], before["norm.running_mean"])
    assert fit.samples == 150
    assert not any(tensor.requires_grad for tensor in fit.tensors.values())


def test_a_fit_tells_its_losses():
    network, images = network_of(Plain, torch.float64), images_of(10, torch.float64)
    train = Train(lr=0.1, batch_size=4, epochs=2)
    client = client_of(range(10), network, images, train=train)
    plan, tensors, losses = client.plan(), network.initial(0), []
    (fit,) = Reference(network).solve([Fit(tensors, Descent.of(CrossEntropy(), train), plan, {"lr": client.rate})])
    weight, bias = (tensors[name].clone() for name in ("last.weight", "last.bias"))
    for (rows,) in plan.steps:
        weight.requires_grad_(), bias.requires_grad_()
        batch = images.batch(rows)
        each = F.cross_entropy(batch.x.flatten(1) @ weight.T + bias, batch.y, reduction="none")
        gw, gb = torch.autograd.grad(each.mean(), [weight, bias])
        weight, bias = (weight - 0.1 * gw).detach(), (bias - 0.1 * gb).detach()
        losses.append(each.detach())
    assert fit.loss == pytest.approx(float(torch.cat(losses).mean()), abs=1e-12)
    assert fit.squared_loss == pytest.approx(float(torch.cat(losses[:3]).square().mean()), abs=1e-12)
    assert fit.macs == 3 * (SIDE * SIDE * 3) * 20


class Added(nn.Module):
    """Two parameters that enter as a sum: autograd hands out one gradient tensor for both."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.full((3,), 1.0)), nn.Parameter(torch.full((3,), 2.0))
        self.last = nn.Linear(SIDE * SIDE, 3)

    def forward(self, x):
        return self.last(x.flatten(1)) + (self.one + self.two)


@pytest.mark.parametrize(
    "train",
    [Train(lr=0.5, clip=0.01), Train(lr=0.5, weight_decay=0.3), Train(lr=0.5, optimizer="adam", weight_decay=0.3)],
)
def test_parameters_that_share_a_gradient_tensor_are_updated_once_each(train):
    network, images = network_of(Added, torch.float64), images_of(16, torch.float64)
    client = client_of(range(16), network, images, train=train)
    (fit,) = Reference(network).solve(
        [Fit(network.initial(0), Descent.of(CrossEntropy(), train), client.plan(), {"lr": client.rate})]
    )
    module = copy.deepcopy(network.module).double()
    module.load_state_dict(network.initial(0))
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    other = kinds[train.optimizer](module.parameters(), train.lr, weight_decay=train.weight_decay)
    batch = images.batch(client.plan().steps[0][0])
    F.cross_entropy(module(batch.x), batch.y).backward()
    if train.clip:
        nn.utils.clip_grad_norm_(module.parameters(), train.clip)
    other.step()
    for name, tensor in module.state_dict().items():
        assert torch.allclose(fit.tensors[name], tensor, rtol=0, atol=1e-12), name


class Dropped(Plain):
    def forward(self, x):
        return self.last(F.dropout(x.flatten(1), 0.5, self.training))


def test_what_a_step_draws_depends_on_the_plan_alone():
    network, client = network_of(Dropped), client_of(range(30), network_of(Dropped), train=Train(batch_size=8))
    fit = Fit(network.initial(0), Descent.of(CrossEntropy(), Train()), client.plan(), {"lr": client.rate})
    trainer, state = Reference(network), torch.get_rng_state()
    (one,) = trainer.solve([fit])
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    (two,) = trainer.solve([fit])
    assert torch.equal(one.tensors["last.weight"], two.tensors["last.weight"])


def test_measuring_changes_nothing_even_in_training_mode():
    """A client measures the tensors it received; in this process they are the server's own."""
    network, images = network_of(Normed), images_of(40)
    tensors = network.initial(0)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for training in (False, True):
        Reference(network).solve([Measure(tensors, Accuracy(training=training), Samples(images, torch.arange(40)), 16)])
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name


def test_measured_sums_do_not_depend_on_the_batch_size():
    network, images = network_of(Normed, torch.float64), images_of(41, torch.float64)
    samples, tensors = Samples(images, torch.arange(41)), network.initial(0)
    one, two = Reference(network).solve([Measure(tensors, Accuracy(), samples, size) for size in (7, 500)])
    assert torch.equal(one["right"], two["right"])
    assert torch.equal(one["samples"], torch.bincount(images.y, minlength=3).double())
    assert torch.allclose(one["loss"], two["loss"], rtol=0, atol=1e-12)


def test_a_request_that_fails_does_not_take_others_with_it():
    network, images = network_of(Plain), images_of(8)
    good, empty = Samples(images, torch.arange(8)), Samples(images, torch.arange(0))
    failed, fine = Reference(network).solve([Measure(network.initial(0), Accuracy(), each) for each in (empty, good)])
    assert isinstance(failed, Exception)
    assert float(fine["samples"].sum()) == 8


def in_a_row(network, client, fit, samples):
    for _ in range(50):
        yield fit
        time.sleep(0.02)


def at_once(network, client, fit, samples):
    yield tuple(fit for _ in range(50))


def looking(network, client, fit, samples):
    yield Measure(network.initial(0), Accuracy(), samples)


@pytest.mark.parametrize("asks", [in_a_row, at_once, looking])
def test_a_deadline_is_of_the_whole_task(asks, monkeypatch):
    network, images = network_of(Plain), images_of()
    plain = Reference._measure
    monkeypatch.setattr(Reference, "_measure", lambda self, measure: (time.sleep(0.25), plain(self, measure))[1])

    def work(client, task):
        fit = Fit(network.initial(0), Slow(CrossEntropy(), SGD()), client.plan(), client.fixed())
        yield from asks(network, client, fit, client.train)
        return Report()

    place = Place(network, images, [range(6)], {"work": work})
    place.deadline = 0.2
    begin = time.perf_counter()
    (outcome,) = perform(place, [(Task(0, 0), {})])
    assert (outcome.failure.kind, outcome.failure.message) == ("late", "not done after 0.2 s")
    assert time.perf_counter() - begin < 1.0  # all of it would take longer


class Slow(Descent):
    """A step of 20 ms."""

    def __call__(self, *given):
        time.sleep(0.02)
        return super().__call__(*given)


def test_a_deadline_is_checked_between_steps():
    network = network_of(Plain)
    client = client_of(range(60), network, train=Train(batch_size=1))
    fit = Fit(network.initial(0), Descent.of(CrossEntropy(), Train()), client.plan(), {"lr": client.rate})
    (late,) = Reference(network).solve([replace(fit, until=time.perf_counter())])
    assert isinstance(late, TimeoutError)


def test_a_stack_has_a_rate_of_its_own():
    """A captured step's rate is overwritten in every round; the network's number must stay what it is."""
    network = network_of(Plain)
    client = client_of(range(8), network)
    fit = Fit(network.initial(0), Descent.of(CrossEntropy(), Train()), client.plan(), {"lr": network.scalar(0.25)})
    fixed, _ = stack_fixed([fit, fit])
    fixed["lr"].fill_(7.0)
    assert float(network.scalar(0.25)) == 0.25


def test_gradients_by_tensors_that_the_loss_does_not_touch_are_zero():
    network = network_of(Normed)
    tensors = {name: tensor.clone() for name, tensor in network.initial(0).items()}
    for name in ("first.weight", "last.bias"):
        tensors[name].requires_grad_()
    model = Eager(network, training=True)
    grads, rest = model.grad(lambda seen: ((seen["last.bias"] ** 2).sum(), "rest"), tensors)
    assert rest == "rest"
    assert torch.equal(grads["last.bias"], 2 * tensors["last.bias"].detach())
    assert torch.equal(grads["first.weight"], torch.zeros(4, 1, 3, 3))


def test_cross_entropy_gives_every_samples_loss():
    network, images = network_of(Plain), images_of(5)
    batch: Batch = images.batch(torch.arange(5))
    mean, each = CrossEntropy()(Eager(network, training=True), network.initial(0), batch, {})
    assert each.shape == (5,)
    assert torch.allclose(mean, each.mean())


def test_multiply_accumulates_do_not_depend_on_the_precision():
    """3 x 3 convolutions on 6 x 6 and 4 x 4 positions, batch norm for nothing, a linear layer."""
    expected = 36 * 4 * 9 + 16 * 5 * 4 * 9 + 5 * 3
    for dtype in (torch.float32, torch.float64):
        network = network_of(Normed, dtype)
        assert network.macs(network.initial(0)) == expected
