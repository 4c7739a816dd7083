"""Distillation objectives: numbers by hand, every trainer, every method."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedloom.engine.reference import Eager, Reference
from fedloom.engine.stacked import Stacked
from fedloom.errors import InputError
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.distil import Features, Soft, lesson
from fedloom.policies.objective import CrossEntropy
from fedloom.steps import Descent
from fedloom.types import Batch, Fit, Task, Train
from tests.contract.study import rows
from tests.methods.tiny import close, far, run, same, server_of, study_of, world

SHAPE = (1, 8, 8)


def network_of(name: str = "lenet5", dtype: torch.dtype = torch.float64) -> Network:
    return Network(lambda: build(name, channels=1, classes=10, size=8), SHAPE, 10, dtype=dtype)


def two(network: Network, seed: int = 0):
    """Student, teacher, and a batch."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, *SHAPE, generator=generator, dtype=network.dtype)
    y = torch.randint(10, (6,), generator=generator)
    return dict(network.initial(1)), dict(network.initial(2)), Batch(x, y)


def fixed_of(network: Network, teacher, strength: float = 1.0):
    return {"teacher": teacher, "strength": network.scalar(strength), "lr": network.scalar(0.1)}


def layers_by_hand(tensors, x, training: bool = True):
    """Outputs of all three linear layers of LeNet-5, with nothing of fedloom but the module."""
    module = build("lenet5", channels=1, classes=10, size=8).double().train(training)
    found: list[torch.Tensor] = []
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda layer, inputs, output: found.append(output))
    functional_call(module, tensors, (x,))
    return found


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_features_by_hand(layers, reduction):
    network = network_of()
    student, teacher, batch = two(network)
    objective = Features(layers=layers, reduction=reduction, hard=0.5)
    total, losses = objective(Eager(network, training=True), student, batch, fixed_of(network, teacher, 0.25))
    own, aim = layers_by_hand(student, batch.x), layers_by_hand(teacher, batch.x)
    gaps = [(one - two).square() for one, two in zip(own[-layers:], aim[-layers:], strict=True)]
    apart = sum(gap.mean() if reduction == "mean" else gap.sum() / len(batch.x) for gap in gaps)
    entropy = F.cross_entropy(own[-1], batch.y, reduction="none")
    assert float(total) == pytest.approx(float(0.5 * entropy.mean() + 0.25 * apart), rel=1e-12)
    assert torch.allclose(losses, entropy)


def test_layers_by_name_are_the_last_ones():
    network = network_of()
    student, teacher, batch = two(network)
    model, fixed = Eager(network, training=True), fixed_of(network, teacher)
    assert network.linears == ("classifier.1", "classifier.3", "classifier.5")
    named = Features(layers=("classifier.3", "classifier.5"))(model, student, batch, fixed)[0]
    assert torch.equal(named, Features(layers=2)(model, student, batch, fixed)[0])


def test_input_of_the_last_layer_is_after_its_non_linearity():
    network = network_of()
    student, _, batch = two(network)
    _, (seen,) = Eager(network, training=False).read(student, batch.x, Features(layers=1, side="input").points(network))
    before = layers_by_hand(student, batch.x)[-2]
    assert torch.allclose(seen, before.relu())
    assert (seen >= 0).all()


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_soft_targets_by_hand(temperature):
    network = network_of()
    student, teacher, batch = two(network)
    total, _ = Soft(temperature=temperature, hard=0.0)(
        Eager(network, training=True), student, batch, fixed_of(network, teacher)
    )
    own, aim = layers_by_hand(student, batch.x)[-1], layers_by_hand(teacher, batch.x)[-1]
    divergence = F.kl_div((own / temperature).log_softmax(1), (aim / temperature).softmax(1), reduction="batchmean")
    assert float(total) == pytest.approx(float(temperature**2 * divergence), rel=1e-10)


def test_high_temperature_is_distance_of_logits():
    """T^2 KL goes to half the mean squared distance of centred logits (Hinton et al., section 2.1)."""
    own, aim = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    apart = Soft(temperature=1e4).distance((own, []), (aim, []), {})
    gap = (own - own.mean(1, keepdim=True)) - (aim - aim.mean(1, keepdim=True))
    assert float(apart) == pytest.approx(float(gap.square().sum(1).mean() / 2 / 7), rel=1e-3)


def test_the_student_passes_once_and_the_teacher_is_left_alone():
    network = network_of("lenet5_bn")
    student, teacher, batch = two(network)
    student, frozen = ({n: t.clone() for n, t in each.items()} for each in (student, teacher))
    model = Eager(network, training=True)
    Features()(model, student, batch, fixed_of(network, teacher))
    once = {n: t.clone() for n, t in network.initial(1).items()}
    CrossEntropy()(model, once, batch, {})
    counters = [name for name in student if name.endswith("num_batches_tracked")]
    assert counters
    same(student, once)
    assert all(int(student[name]) == 1 for name in counters)
    same(teacher, frozen)


def test_gradients_reach_the_student_alone():
    network = network_of()
    student, teacher, batch = two(network)
    for tensor in teacher.values():
        tensor.requires_grad_()
    model = Eager(network, training=True)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in student.items()}
    fixed = fixed_of(network, teacher)
    grads, _ = model.grad(lambda current: Features(hard=0.0)(model, current, batch, fixed), leaves)
    assert any(grad.any() for grad in grads.values())
    assert all(tensor.grad is None for tensor in teacher.values())


@pytest.mark.parametrize(
    ("objective", "model"),
    [(Features(), "lenet5_bn"), (Features(layers=1, side="input"), "mlp"), (Soft(to="masked"), "mlp")],
)
def test_stacked_is_the_reference(objective, model):
    """Clients of unequal sizes and with teachers of their own, in float64."""
    changes = {"model": {"name": model, "hidden": None}, "fleet": {"clients": 4}, "train": {"momentum": 0.9}}
    place = world("fedavg", **changes)
    fits = []
    for number in range(4):
        client = place.client(Task(number, 0, train=Train(lr=0.1, batch_size=16, momentum=0.9, steps=3 + number)), {})
        fixed = client.fixed(**lesson(client, place.network.initial(10 + number), 0.1 * (1 + number)))
        fits.append(Fit(place.network.initial(1), Descent.of(objective, client.task.train), client.plan(), fixed))
    stacked, together = Stacked(place.network), []
    plain = Stacked._together
    stacked._together = lambda *of: together.append(len(of[0])) or plain(stacked, *of)
    stacked.most_waste = 10.0
    for one, other in zip(Reference(place.network).solve(fits), stacked.solve(fits), strict=True):
        close(one.tensors, other.tensors, 1e-9)
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.macs == other.macs
    assert together == [4]


@pytest.mark.parametrize("objective", [Features(), Soft(), Features(to="masked")])
def test_a_step_asks_nothing_of_the_host(objective):
    """On the meta device there are no values: a step that looked at one, or made a tensor elsewhere, would fail."""
    network = network_of("lenet5_bn", torch.float32)
    blank = {name: tensor.to("meta") for name, tensor in network.initial(0).items()}
    for name, tensor in blank.items():
        tensor.requires_grad_(name not in network.buffers)
    batch = Batch(torch.empty(6, *SHAPE, device="meta"), torch.empty(6, dtype=torch.long, device="meta"))
    fixed = {
        "teacher": {name: tensor.detach().clone() for name, tensor in blank.items()},
        "strength": torch.empty((), device="meta"),
        "lr": torch.empty((), device="meta"),
        "held": torch.empty(10, dtype=torch.bool, device="meta"),
    }
    step = Descent.of(objective, Train(momentum=0.9))
    with torch.no_grad():
        slots = step.slots({name: tensor for name, tensor in blank.items() if tensor.requires_grad})
        losses = step(Eager(network, training=True), blank, slots, fixed, [batch])
    assert losses.shape == (6,)


def test_a_teachers_pass_costs_a_third():
    train = Train()
    assert Descent.of(Features(), train).passes == pytest.approx(4 / 3)
    assert Descent.of(CrossEntropy(), train).passes == 1


def test_adapter_where_widths_differ():
    """The student is half as wide; without a map they cannot be compared, with one it is learned."""
    place = world("fedckd", model={"name": "lenet5", "hidden": None})
    network, task = place.network, Task(0, 0, train=Train(lr=0.02, steps=40, momentum=0.9))
    client = place.client(task, {})
    teacher = network.initial(2)
    half = network.units.take(
        network.initial(1), {g: torch.arange((n + 1) // 2) for g, n in network.units.sizes.items()}
    )
    trainer, objective = Reference(network), Features(adapter=True, hard=0.0, reduction="sum")
    fixed = client.fixed(**lesson(client, teacher))
    (failed,) = trainer.solve([Fit(half, Descent.of(Features(), task.train), client.plan(), fixed)])
    assert "objective.adapter" in str(failed)
    maps = objective.adapters(client, half, teacher)
    assert {name: tuple(tensor.shape) for name, tensor in maps.items()} == {"adapter.0": (84, 42)}
    before, batch = {**half, **maps}, place.images.batch(client.train.rows)
    (fit,) = trainer.solve([Fit(before, Descent.of(objective, task.train), client.plan(), fixed)])
    apart = [float(objective(Eager(network, training=True), each, batch, fixed)[0]) for each in (before, fit.tensors)]
    assert apart[1] < 0.5 * apart[0]
    assert far({"map": fit.tensors["adapter.0"]}, {"map": maps["adapter.0"]}) > 1e-3
    client.state["adapter"] = {"adapter.0": fit.tensors["adapter.0"]}
    assert objective.adapters(client, half, teacher)["adapter.0"] is fit.tensors["adapter.0"]


def test_models_without_such_layers_are_refused():
    network = network_of()
    with pytest.raises(InputError, match="4, but the model has 3 fully connected layers"):
        Features(layers=4).points(network)
    with pytest.raises(InputError, match=r"'classifier\.9'"):
        Features(layers=("classifier.9",)).points(network)
    with pytest.raises(InputError, match="but the model has 2 fully connected"):
        world("fedavg", objective={"name": "features", "layers": 7}).check()


@pytest.mark.parametrize("objective", ["features", "soft"])
def test_one_step_from_the_teacher_is_a_plain_step(objective, tmp_path):
    """Under FedAvg the teacher is the received model: at it, the distance has no slope."""
    once = {"train": {"steps": 1}, "run": {"rounds": 1}}
    plain = run("fedavg", tmp_path, **once)
    close(server_of(plain), server_of(run("fedavg", tmp_path, objective={"name": objective}, **once)), 1e-15)
    more = {"train": {"steps": 4}, "run": {"rounds": 1}}
    distilled = run("fedavg", tmp_path, objective={"name": objective}, **more)
    assert far(server_of(run("fedavg", tmp_path, **more)), server_of(distilled)) > 1e-6


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "fedbn", "heterofl", "fednova", "local", "gossip"])
def test_any_method_can_distil(method, tmp_path):
    result = run(method, tmp_path, objective={"name": "features"}, run={"rounds": 1})
    assert result.summary["failures"] == 0
    assert rows(result)[-1]["train_loss"] is not None


def test_a_server_method_refuses_a_ring_and_a_ring_a_star():
    with pytest.raises(InputError, match="fedavg has a server and runs as a star only; got topology 'ring'"):
        study_of("fedavg", topology={"name": "ring"})
    with pytest.raises(InputError, match="fedrkd has no server and cannot run as a star"):
        study_of("fedrkd", topology={"name": "star"})


def test_strength_zero_is_the_hard_loss_alone():
    network = network_of()
    student, teacher, batch = two(network)
    model = Eager(network, training=True)
    total, _ = replace(Features())(model, student, batch, fixed_of(network, teacher, 0.0))
    assert torch.equal(total, CrossEntropy()(model, student, batch, {})[0])
