"""Per-FedAvg: its step against exact formulas, its bounds, and the model a client really uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedloom.engine.reference import Eager, Reference
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.perfedavg import MetaStep, PerFedAvg
from fedloom.policies.merge import Mean
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD, Adam
from fedloom.steps import Descent
from fedloom.types import Batch, Fit, Plan, Task, Train
from tests.core.small import Normed, Plain, client_of, images_of, network_of
from tests.methods.tiny import gradient, run, same, server_of, world

SIZE = 5


@dataclass(frozen=True)
class Quadratic:
    """w' A w / 2 + b' w, with A and b brought by the batch."""

    def __call__(self, model, tensors, batch, fixed):
        w = tensors["w"]
        return w @ batch.x @ w / 2 + batch.y @ w, torch.zeros(1)


def one_step(step, matrices, b, w):
    model = Eager(network_of(Plain), training=True)
    tensors = {"w": w.clone().requires_grad_()}
    batches = [Batch(matrix, b) for matrix in matrices]
    with torch.no_grad():
        step(model, tensors, step.slots(tensors), {"lr": torch.tensor(0.3, dtype=torch.float64)}, batches)
    return tensors["w"].detach()


def numbers(seed=0):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(3, SIZE, SIZE, dtype=torch.float64, generator=generator)
    b, w = torch.randn(2, SIZE, dtype=torch.float64, generator=generator)
    return raw + raw.transpose(1, 2), b, w


@pytest.mark.parametrize("delta", [1.0, 1e-2, 1e-4])
def test_hessian_free_is_exact_on_a_quadratic(delta):
    (first, second, third), b, w = numbers()
    alpha = 0.1
    inner = w - alpha * (first @ w + b)
    v = second @ inner + b
    exact = w - 0.3 * (v - alpha * third @ v)
    found = one_step(MetaStep(Quadratic(), SGD(), alpha, delta), (first, second, third), b, w)
    assert torch.allclose(found, exact, rtol=0, atol=1e-9)


def test_first_order_leaves_the_hessian_out():
    (first, second, _), b, w = numbers(1)
    exact = w - 0.3 * (second @ (w - 0.1 * (first @ w + b)) + b)
    assert torch.allclose(one_step(MetaStep(Quadratic(), SGD(), 0.1, None), (first, second), b, w), exact, atol=1e-12)


def test_both_are_one_on_a_linear_loss():
    _, b, w = numbers(2)
    flat = torch.zeros(3, SIZE, SIZE, dtype=torch.float64)
    first_order = one_step(MetaStep(Quadratic(), SGD(), 0.1, None), flat[:2], b, w)
    hessian_free = one_step(MetaStep(Quadratic(), SGD(), 0.1, 1e-3), flat, b, w)
    assert torch.allclose(first_order, hessian_free, rtol=0, atol=1e-12)


@pytest.mark.parametrize("delta", [None, 1e-3])
@pytest.mark.parametrize("optimizer", [SGD(0.9, 0.01), Adam()])
def test_without_an_inner_step_it_is_descent_on_the_second_batch(delta, optimizer):
    network = network_of(Normed)
    client = client_of(range(40), network, train=Train(batch_size=8))
    plan = client.plan((client.train,) * (2 if delta is None else 3))
    seconds = replace(plan, steps=[(rows[1],) for rows in plan.steps])
    trainer, tensors, fixed = Reference(network), network.initial(0), client.fixed()
    meta, plain = trainer.solve([
        Fit(tensors, MetaStep(CrossEntropy(), optimizer, 0.0, delta), plan, fixed),
        Fit(tensors, Descent(CrossEntropy(), optimizer), seconds, fixed),
    ])  # fmt: skip
    same(meta.tensors, plain.tensors)


def test_statistics_of_norms_follow_the_outer_pass_alone():
    network = network_of(Normed)
    images = images_of()
    rows = [torch.arange(start, start + 4) for start in (0, 4, 8)]
    tensors, fixed = network.initial(0), {"lr": network.scalar(0.1)}
    step = MetaStep(CrossEntropy(), SGD(), 0.1, 1e-3)
    (fit,) = Reference(network).solve([Fit(tensors, step, Plan(images, [tuple(rows)], [0], 1, 0), fixed)])
    counters = [name for name in network.buffers if name.endswith("num_batches_tracked")]
    assert counters
    assert all(int(fit.tensors[name]) == 1 for name in counters)


def test_batches_of_a_step_share_no_sample():
    place = world("perfedavg", method={"hessian": "hessian_free"}, train={"batch_size": 2})
    steps = place.method.plan(place.client(place_task(place), {})).steps
    assert len(steps) > 1
    for rows in steps:
        assert len(rows) == 3
        assert len(torch.cat(rows)) == len(set(torch.cat(rows).tolist()))


def place_task(place):
    train = Train(**place.study.train.model_dump(include=set(Train.__dataclass_fields__)))
    return Task(0, 0, train=train, tensors={"model": place.network.initial(1)})


def test_one_client_one_round_by_hand(tmp_path):
    changes = {"fleet": {"clients": 1}, "partition": {"name": "iid"}, "run": {"rounds": 1}}
    result = run("perfedavg", tmp_path, **changes, method={"inner_rate": 0.05})
    place = world("perfedavg", **changes, method={"inner_rate": 0.05})
    tensors, client = place.network.initial(1), place.client(place_task(place), {})
    for rows in place.method.plan(client).steps:
        first, second = (client.train.images.batch(part) for part in rows)
        inner = gradient(place, tensors, first.x, first.y)
        outer = gradient(place, {n: t - 0.05 * inner[n] for n, t in tensors.items()}, second.x, second.y)
        tensors = {n: t - place.study.train.lr * outer[n] for n, t in tensors.items()}
    for name, tensor in server_of(result).items():
        assert torch.allclose(tensor, tensors[name], rtol=0, atol=1e-12)


def finished(method, place, task):
    generator, trainer = method.final(place.client(task, {}), task), Reference(place.network)
    request, answers = next(generator, None), 0
    while request is not None:
        try:
            request, answers = generator.send(trainer.solve([request])[0]), answers + 1
        except StopIteration as stop:
            return stop.value, answers + 1
    raise AssertionError("it asked for nothing")


def test_a_client_uses_the_model_after_its_own_step():
    place = world("perfedavg")
    task, method = place_task(place), PerFedAvg(inner_rate=0.2)
    own, asked = finished(method, place, task)
    assert asked == 1
    client = place.client(task, {})
    (rows,) = client.plan(train=replace(task.train, steps=1), purpose="final").steps[0]
    batch, start = client.train.images.batch(rows), place.network.initial(1)
    slope = gradient(place, start, batch.x, batch.y)
    for name, tensor in start.items():
        assert torch.allclose(own[name], tensor - 0.2 * slope[name], rtol=0, atol=1e-12)


def test_without_steps_a_client_uses_the_common_model():
    place = world("perfedavg")
    task = place_task(place)
    ends = []
    for method in (PerFedAvg(steps=0), FedAvg(merge=Mean("equal"))):
        with pytest.raises(StopIteration) as stop:
            next(method.final(place.client(task, {}), task))
        ends.append(stop.value.value)
    same(*ends)
