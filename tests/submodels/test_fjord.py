"""FjORD: every step trains a prefix; the rest of the client's model rests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedloom.engine.reference import Eager
from fedloom.policies.cut import Prefix
from tests.contract.study import rows
from tests.methods.tiny import run
from tests.submodels.federation import FLOAT32, HERE, OWN, Federation, solved

FLEET = {"name": "mixed", "clients": 3, "capacities": [1.0, 0.5, 0.25]}
DECAY = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.05, "batch_size": 8}
WIDTHS = {"method": {"widths": [0.1, 0.25, 0.5, 1.0]}}
MODELS = {"mlp": {"name": "mlp", "hidden": [8, 6]}, "lenet5_bn": {"name": "lenet5_bn"}, "own": {"name": OWN},
          "dense": {"name": f"{HERE}:DenseLike"}, "resnet18": {"name": "resnet18", "width": 0.06},
          "encoder": {"name": f"{HERE}:Encoder"}}  # fmt: skip
every_model = pytest.mark.parametrize("model", MODELS)


def federation(model, **changes):
    return Federation(
        "fjord", fleet=FLEET, **{"train": DECAY, "model": {"hidden": None} | MODELS[model]} | WIDTHS | FLOAT32 | changes
    )


def prefix(network, width):
    return Prefix()(network, width, 0, torch.Generator())


@every_model
def test_a_step_sees_the_prefix_of_its_width(model):
    """Taken out of the client's prefix or out of the server's whole model, it is the same sub-model."""
    made = federation(model)
    for client, capacity in enumerate(FLEET["capacities"]):
        fit = made.first_request(client)
        widths = [width for width in WIDTHS["method"]["widths"] if width < capacity] + [capacity]
        assert len(fit.step) == len(widths)
        for step, width in zip(fit.step, widths, strict=True):
            expected = made.network.units.take(made.server.tensors, prefix(made.network, width))
            for name, seen in step.seen(fit.tensors, fit.fixed).items():
                assert torch.equal(seen, expected[name]), (name, width)


@every_model
def test_what_a_step_does_not_see_rests(model):
    """Not by momentum of other steps, not by weight decay, bit for bit."""
    made = federation(model)
    fit = made.first_request(0)
    last = len(fit.step) - 1
    for variant in range(last):
        # A step of the whole first, so that momentum has somewhere to go.
        steps = fit.plan.steps[:2]
        one = solved(made.world, replace(fit, plan=replace(fit.plan, steps=steps[:1], variants=[last], epoch=1)))
        two = solved(made.world, replace(fit, plan=replace(fit.plan, steps=steps, variants=[last, variant], epoch=1)))
        width = WIDTHS["method"]["widths"][variant]
        where, units = prefix(made.network, width), made.network.units
        ones = {name: torch.ones_like(tensor) for name, tensor in units.take(one.tensors, where).items()}
        inside = units.place(ones, where, {name: torch.zeros_like(tensor) for name, tensor in one.tensors.items()})
        moved = 0
        for name, before in one.tensors.items():
            outside = inside[name] == 0
            assert torch.equal(two.tensors[name][outside], before[outside]), (name, width)
            moved += int((two.tensors[name] != before).sum())
        assert moved > 0


def test_widths_are_drawn_uniformly_from_the_affordable():
    made = federation("mlp", train=DECAY | {"steps": 900})
    for client, count in ((0, 4), (1, 3), (2, 2)):
        drawn = torch.tensor(made.first_request(client).plan.variants).bincount(minlength=count)
        assert len(drawn) == count
        assert ((drawn - 900 / count).square() / (900 / count)).sum() < 25


def test_one_width_is_one_step():
    made = federation("mlp", method={"widths": [1.0]})
    for client in range(3):
        fit = made.first_request(client)
        assert len(fit.step) == 1
        assert set(fit.plan.variants) == {0}


def test_macs_count_the_drawn_widths():
    made = federation("mlp")
    fit = made.first_request(0)
    sizes = [made.network.macs(step.seen(fit.tensors, fit.fixed)) for step in fit.step]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] / 5
    expected = sum(3 * sizes[v] * len(rows[0]) for rows, v in zip(fit.plan.steps, fit.plan.variants, strict=True))
    assert solved(made.world, fit).macs == expected


def test_distillation_counts_all_its_passes():
    """The whole prefix forward and backward, its answer, and the narrow one forward and backward."""
    made = federation("mlp", method={"widths": [0.25, 1.0], "distil": True})
    fit = made.first_request(0)
    narrow = made.network.macs(made.network.units.take(made.server.tensors, prefix(made.network, 0.25)))
    whole = made.network.macs(made.server.tensors)
    one = replace(fit, plan=replace(fit.plan, steps=fit.plan.steps[:1], variants=[0], epoch=1))
    samples = len(fit.plan.steps[0][0])
    assert solved(made.world, one).macs >= 3 * (whole + narrow) * samples


def test_distillation_by_hand():
    from fedloom.methods.fjord import Distilled
    from fedloom.policies.objective import CrossEntropy

    made = federation("mlp", method={"widths": [0.5, 1.0], "distil": True}, objective={"name": "cross_entropy"})
    fit = made.first_request(0)
    assert [type(step.objective) for step in fit.step] == [Distilled, CrossEntropy]
    batch = fit.plan.images.batch(fit.plan.steps[0][0])
    model = Eager(made.network, training=True)
    total, losses = fit.step[0].objective(model, fit.tensors, batch, fit.fixed)
    logits = model(fit.tensors, batch.x).clone()
    small = made.network.units.take(fit.tensors, prefix(made.network, 0.5))
    student = model(small, batch.x)
    ce = torch.nn.functional.cross_entropy(logits, batch.y)
    soft = -(logits.softmax(1) * student.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(total, ce + soft)
    torch.testing.assert_close(losses.mean(), ce)


@pytest.mark.parametrize("objective", [
    {"name": "masked"}, {"name": "masked", "fill": "minus_infinity"}, {"name": "soft", "to": "masked", "hard": 1.0},
])  # fmt: skip
def test_distillation_masks_what_the_objective_masks(objective):
    """A step of distillation adds nothing to what the objective itself does to the rows of absent classes."""
    made = federation(
        "lenet5_bn", method={"widths": [0.5, 1.0], "distil": True}, objective=objective,
        train={"lr": 0.05, "batch_size": 8}, partition={"name": "classes:4"},
    )  # fmt: skip
    client = made.client(0)
    fit = next(made.method.work(client, client.task))
    model, batch = Eager(made.network, training=True), fit.plan.images.batch(fit.plan.steps[0][0])
    distilled = fit.step[0].objective
    (rows,) = (name for name in made.network.units.output if name.endswith("weight"))
    tensors = {name: tensor.clone() for name, tensor in fit.tensors.items()}
    tensors[rows].requires_grad_()
    both, alone = (
        torch.autograd.grad(each(model, tensors, batch, fit.fixed)[0], tensors[rows])[0]
        for each in (distilled, distilled.objective)
    )
    assert both.isfinite().all()
    assert torch.equal(both[~client.held], alone[~client.held])
    assert not torch.equal(both[client.held], alone[client.held])
    if objective["name"] == "masked":
        assert (both[~client.held] == 0).all()


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_nested_averaging_is_element_wise_averaging(model):
    """From the widest to the narrowest, the block of each width over all who hold it: the authors' server."""
    made = federation(model, merge={"by_class": False}, partition={"name": "dirichlet:0.5"})
    before = made.server.tensors
    after = made.round().tensors
    reports = {FLEET["capacities"][o.client]: o.report for o in made.engine.outcomes}
    expected = {name: tensor.clone().double() for name, tensor in before.items()}
    for width in (1.0, 0.5, 0.25):
        shapes = made.network.units.shapes(made.network.units.kept(width))
        holders = [report for capacity, report in reports.items() if capacity >= width]
        weight = sum(report.weight for report in holders)
        for name in made.network.units.parameters:
            block = tuple(slice(size) for size in shapes[name])
            expected[name][block] = sum(r.weight * r.tensors[name][block].double() for r in holders) / weight
    for name in made.network.units.parameters:
        torch.testing.assert_close(after[name].double(), expected[name], rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_it_trains_with_adam(optimizer, tmp_path):
    train = {"optimizer": optimizer, "lr": 0.01, "momentum": 0.0}
    result = run("fjord", tmp_path, fleet=FLEET, train=train, run={"rounds": 1}, **WIDTHS)
    assert rows(result)[0]["failures"] == 0


@pytest.mark.parametrize("width", [0.0, 1.5, -0.5])
def test_widths_outside_zero_to_one_are_refused(width, command):
    told = command("run", "fjord", "--model", "mlp", "--clients", 2, "--rounds", 1, "--engine", "local",
                   "--set", f"method.widths=[{width}, 1.0]").sentence()  # fmt: skip
    assert "width" in told


def test_a_cut_that_the_client_makes_is_refused(command):
    """Its steps narrow a prefix; under a scored cut the client would train the whole model."""
    told = command("run", "fjord", "--model", "mlp", "--clients", 2, "--rounds", 1, "--engine", "local",
                   "--fleet", "low", "--set", "cut.name=scored").sentence()  # fmt: skip
    assert "cut" in told


def test_features_of_a_teacher_that_is_wider_are_refused(command):
    told = command("run", "fjord", "--set", "objective.name=features").sentence()
    assert "fjord trains a narrower model in most steps" in told
