"""DepthFL: the first stages, an exit after each, and exits that teach each other."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
import torch
import torch.nn.functional as F

from fedloom.engine.reference import Eager
from fedloom.errors import InputError
from fedloom.methods.depthfl import ExitsTogether
from fedloom.models.exits import Exits, with_exits
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.merge import Mean
from fedloom.policies.objective import Masked
from fedloom.runs.export import export
from fedloom.types import Batch
from tests.methods.tiny import run, study_of
from tests.submodels.federation import FLOAT32, Federation
from tests.submodels.nets import images

CNN4 = {"model": {"name": "cnn4", "widths": [4, 6, 8, 9], "hidden": None}} | FLOAT32
FOUR = {"clients": 8}
STAGES = 4


def federation(**changes):
    return Federation("depthfl", fleet=FOUR, **CNN4, **changes)


def stage_of(name):
    part, number = name.split(".")[:2]
    return int(number) if part in ("stages", "exits") else 0


@pytest.mark.parametrize("name", ["cnn4", "resnet18", "resnet34"])
def test_names_are_nested_and_shallow_models_compute_their_exits(name):
    fields = {"widths": [4, 6, 8, 9]} if name == "cnn4" else {"width": 0.06}
    module = Exits(build(name, channels=1, classes=10, size=8, **fields), (1, 8, 8), 10)
    whole = tuple(module.state_dict())
    before: set[str] = set()
    for depth in range(1, STAGES + 1):
        names = module.names(depth)
        assert before < set(names)
        assert {stage_of(each) for each in names} == set(range(depth))
        assert set(names) == {each for each in whole if stage_of(each) < depth}
        shallow = module.without(frozenset(whole) - set(names))
        assert tuple(shallow.state_dict()) == names
        module.eval()
        shallow.train()
        for layer in module.modules():
            layer.training = False
        shallow.training = True
        with torch.no_grad():
            stacked = shallow(images())
            h, by_hand = module.stem(images()), []
            for stage, leave in list(zip(module.stages, module.exits, strict=True))[:depth]:
                h = stage(h)
                by_hand.append(leave(h))
        assert torch.equal(stacked, torch.stack(by_hand))
        before = set(names)
    assert before == set(whole)
    assert module.names(STAGES) == whole
    module.eval()
    torch.testing.assert_close(module(images()), stacked.mean(0))


def test_clients_get_depths_in_blocks_and_stages_are_counted():
    made = federation()
    before = made.server.tensors
    joined = Mean(weights="equal").begin(made.server)
    after = made.round().tensors
    depths = [1 + client * 4 // 8 for client in range(8)]
    for task, outcome in zip(made.engine.tasks, made.engine.outcomes, strict=True):
        names = {name for name in before if stage_of(name) < depths[task.client]}
        assert task.tensors["model"].keys() == outcome.report.tensors.keys() == names
        joined.add(outcome.report)
    for name in joined.total:
        assert int(joined.count(name)) == sum(depth > stage_of(name) for depth in depths), name
    weight = {o.client: o.report.weight for o in made.engine.outcomes}
    name = "stages.2.0.weight"
    holders = [o for o in made.engine.outcomes if depths[o.client] > 2]
    mean = sum(weight[o.client] * o.report.tensors[name].double() for o in holders)
    torch.testing.assert_close(
        after[name].double(), mean / sum(weight[o.client] for o in holders), rtol=1e-6, atol=1e-7
    )


def test_stages_that_nobody_trained_keep_their_value():
    made = federation(train={"weight_decay": 0.1})
    made.method = replace(made.method, select=lambda fleet, server: [0, 1])
    before, after = made.server.tensors, made.round().tensors
    assert {o.client for o in made.engine.outcomes} == {0, 1}
    for name, old in before.items():
        if stage_of(name) > 0:
            assert torch.equal(after[name], old), name
    assert not torch.equal(after["stages.0.0.weight"], before["stages.0.0.weight"])


def test_shallow_clients_cost_less():
    made = federation()
    made.round()
    costs = [outcome.macs / outcome.report.numbers["samples"] for outcome in made.engine.outcomes]
    parameters = [outcome.entry()["parameters"] for outcome in made.engine.outcomes]
    for each in (costs, parameters, [o.upload_bytes // 100 for o in made.engine.outcomes]):
        assert each[0] < each[2] < each[4] < each[6]
    assert costs[::2] == costs[1::2], "two clients a depth"


@pytest.mark.parametrize(("capacities", "depths"), [([1.0, 0.75, 0.5, 0.25], [4, 3, 2, 1]),
                                                    ([0.99, 0.5, 0.0625, 0.76], [4, 2, 1, 4])])  # fmt: skip
def test_depth_may_follow_the_capacity(capacities, depths):
    made = Federation(
        "depthfl", method={"depth": "capacity"}, fleet={"name": "mixed", "clients": 4, "capacities": capacities}, **CNN4
    )
    made.round()
    found = [1 + max(map(stage_of, outcome.report.tensors)) for outcome in made.engine.outcomes]
    assert found == depths


class Said:
    """A model that gives prepared logits."""

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, tensors, x, *, scaler=False):
        return self.logits


def test_divergence_is_zero_when_exits_agree():
    logits = torch.randn(1, 5, 10, generator=torch.Generator().manual_seed(0)).expand(3, 5, 10)
    y = torch.arange(5)
    total, losses = ExitsTogether()(Said(logits), {}, Batch(y, y), {"beta": torch.tensor(1000.0)})
    torch.testing.assert_close(total, 3 * F.cross_entropy(logits[0], y))
    torch.testing.assert_close(losses, F.cross_entropy(logits[0], y, reduction="none"))


def test_the_objective_by_hand():
    logits = torch.randn(3, 5, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    y, beta = torch.arange(5), torch.tensor(0.3)
    total, losses = ExitsTogether()(Said(logits), {}, Batch(y, y), {"beta": beta})
    expected = sum(F.cross_entropy(each, y) for each in logits)
    for i in range(3):
        for j in range(3):
            if i != j:
                target = logits[j].detach().softmax(1)
                pull = F.kl_div(logits[i].log_softmax(1), target, reduction="batchmean")
                expected = expected + beta / 2 * pull
    torch.testing.assert_close(total, expected)
    one, two = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (total, expected))
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(losses, F.cross_entropy(logits[-1], y, reduction="none").detach())


@pytest.mark.parametrize("fill", ["zero", "minus_infinity"])
def test_masked_exits_by_hand(fill):
    """Every exit's logits are masked before they are compared with labels and with each other."""
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    held = torch.tensor([True, False, True, False, True])
    y, fixed = torch.tensor([0, 2, 4, 4]), {"beta": torch.tensor(0.3), "held": held}
    total, losses = ExitsTogether(Masked(fill=fill))(Said(logits), {}, Batch(y, y), fixed)
    seen, labels = (logits * held, y) if fill == "zero" else (logits[..., held], y // 2)
    plain, by_sample = ExitsTogether()(Said(seen), {}, Batch(labels, labels), fixed)
    torch.testing.assert_close(total, plain)
    torch.testing.assert_close(losses, by_sample)
    got, expected = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (total, plain))
    torch.testing.assert_close(got, expected)
    assert (got[..., ~held] == 0).all()


@pytest.mark.parametrize("share", ["all", "static"])
def test_masked_clients_leave_absent_output_rows_alone(share):
    made = federation(objective={"name": "masked"}, share={"name": share}, partition={"name": "classes:2"})
    before, held = made.server.tensors, made.client(7).held
    made.round()
    (last,) = [outcome.report.tensors for outcome in made.engine.outcomes if outcome.client == 7]
    rows = [name for name in last if name.startswith("exits.") and name.endswith("weight") and len(last[name]) == 10]
    assert len(rows) == STAGES
    for name in rows:
        assert torch.equal(last[name][~held], before[name][~held]), name
        assert not torch.equal(last[name][held], before[name][held]), name


def test_a_single_exit_has_no_teacher():
    logits, y = torch.randn(1, 5, 10), torch.arange(5)
    total, _ = ExitsTogether()(Said(logits), {}, Batch(y, y), {"beta": torch.tensor(float("nan"))})
    torch.testing.assert_close(total, F.cross_entropy(logits[0], y))


@pytest.mark.parametrize(("round", "beta"), [(0, exp(-5)), (150, exp(-5 / 4)), (299, exp(-5 / 90_000)), (300, 1.0),
                                             (301, 1.0), (5000, 1.0)])  # fmt: skip
def test_beta_rises_to_one(round, beta):
    made = federation()
    fit = made.first_request(7, round)
    assert float(fit.fixed["beta"]) == pytest.approx(beta, rel=1e-6)


def test_the_ramp_is_a_setting():
    made = Federation("depthfl", method={"ramp": 10}, fleet=FOUR, **CNN4)
    assert float(made.first_request(0, 10).fixed["beta"]) == 1
    assert float(made.first_request(0, 5).fixed["beta"]) == pytest.approx(exp(-5 / 4), rel=1e-6)


def test_the_global_model_says_the_mean_of_all_exits():
    network = Network(
        with_exits(lambda: build("cnn4", channels=1, classes=10, size=8, widths=[4, 6, 8, 9]), (1, 8, 8), 10),
        (1, 8, 8), 10,
    )  # fmt: skip
    logits = Eager(network, training=False)(network.initial(0), images())
    assert logits.shape == (4, 10)
    assert Eager(network, training=True)(network.initial(0), images()).shape == (4, 4, 10)


@pytest.mark.parametrize("name", ["lenet5", "mlp", "alexnet"])
def test_models_without_stages_are_refused(name, command):
    with pytest.raises(InputError, match="has no sequence of stages"):
        Exits(build(name, channels=1, classes=10, size=8), (1, 8, 8), 10)
    told = command("run", "depthfl", "--model", name, "--clients", 2, "--rounds", 1).sentence()
    assert "has no sequence of stages to put exits after; use resnet18, resnet34, cnn4" in told


def test_a_cut_of_units_is_refused(command):
    told = command("run", "depthfl", "--model", "cnn4", "--set", "cut.name=prefix").sentence()
    assert "depthfl cuts in depth" in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": {"name": "cross_entropy"}}, "objective 'cross_entropy' is about the answers of one"),
        ({"objective": {"name": "masked", "scaler": True}}, "depthfl narrows no layer and has nothing to scale"),
        ({"objective": {"name": "features"}}, "objective 'features' is about the answers of one"),
        ({"start": {"name": "adaptive"}}, "depthfl has several exits, and start 'adaptive' learns by one"),
    ],
)
def test_what_knows_a_single_exit_is_refused(changes, said):
    with pytest.raises(InputError, match=said):
        study_of("depthfl", **CNN4, **changes)


def test_candidates_tell_the_loss_of_all_exits_together(tmp_path):
    result = run("depthfl", tmp_path, fleet={"clients": 4}, select={"name": "powd", "fraction": 0.5}, **CNN4)
    told = [entry for entry in result.rows("clients") if entry["job"] == "loss"]
    assert len(told) == 8
    assert not [entry["reason"] for entry in told if entry["failed"]]


def test_static_batch_norm_under_depths():
    made = federation(share={"name": "static"})
    made.round()
    assert all(not outcome.report.tensors.keys() & made.network.buffers for outcome in made.engine.outcomes)
    filled = made.method.evaluated(made.server, made.fleet).tensors
    means = [name for name in filled if name.endswith("running_mean")]
    assert means
    assert all(filled[name].abs().sum() > 0 for name in means)


def test_an_exported_model_fits_the_line_that_builds_it(tmp_path):
    result = run("depthfl", tmp_path, fleet={"clients": 4}, run={"rounds": 1}, **CNN4)
    line = export(result.folder, tmp_path / "model.pt")
    import fedloom.models.resolve

    module = eval(line, {"fedloom": fedloom})
    module.load_state_dict(torch.load(tmp_path / "model.pt"))


def test_its_loss_is_not_offered_to_models_without_exits():
    with pytest.raises(InputError, match="unknown objective 'exits'"):
        study_of("fjord", objective={"name": "exits"})
