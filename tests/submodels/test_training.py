"""What cut models do in training: scaler, masked classes, untouched elements, weak clients that really are small."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.engine.reference import Eager, Reference
from fedloom.errors import InputError
from fedloom.fleet.outgoing import arrived
from fedloom.network import Network
from fedloom.policies.moments import NormMoments
from fedloom.policies.objective import CrossEntropy, Masked
from fedloom.policies.score import Activation, Gradient, Predictions, Scale
from fedloom.policies.steady import steady
from fedloom.registry import entries
from fedloom.types import Batch, Images, Measure, Samples
from tests.contract.study import rows as metric_rows
from tests.methods.tiny import run
from tests.submodels.federation import FLOAT32, HERE, OWN, Federation, footprint
from tests.submodels.nets import BUILDERS, CLASSES, SIDE, images, network, tensors_of
from tests.submodels.test_cuts import chosen

MIXED = {"name": "mixed", "clients": 3, "capacities": [0.5, 0.3, 0.25]}
CUTTING = ["heterofl", "feddropout", "fedrolex", "feddse", "fedgse", "fjord"]
DECAY = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.05}
MODELS = {"mlp": {"name": "mlp", "hidden": [8, 6]}, "own": {"name": OWN}, "dense": {"name": f"{HERE}:DenseLike"},
          "encoder": {"name": f"{HERE}:Encoder"}, "resnet18": {"name": "resnet18", "width": 0.06}}  # fmt: skip


def model_of(name):
    return {"model": {"hidden": None} | MODELS[name]} | FLOAT32


def test_a_size_that_was_used_keeps_no_model_alive():
    net, x = network("cnn"), images()
    models = [net.units.take(tensors_of("cnn"), chosen("cnn", "prefix", capacity, 0)) for capacity in (0.3, 0.6)]
    small = {name: tensor.clone() for name, tensor in models[0].items()}
    seen = [weakref.ref(tensor) for tensor in small.values()]
    first = net.bound(small, training=False)(x)
    net.bound(models[1], training=False)(x)
    del small
    assert not any(each() is not None for each in seen)
    assert torch.equal(net.bound(models[0], training=False)(x), first)


@pytest.mark.parametrize("name", ["pair", "mlp", "cnn"])
def test_scaler_divides_by_the_share_that_each_layer_kept(name):
    net, x = network(name), images()
    where = chosen(name, "random", 0.3, 2)
    small = net.units.take(tensors_of(name), where)
    plain = net.bound(small, training=True)(x)
    scaled = net.bound(small, training=True, scaler=True)(x)
    assert float((plain - scaled).abs().max()) > 1e-3
    by_hand, module = {}, net.bound(small, training=True)
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            share = len(small[f"{path}.weight"]) / len(tensors_of(name)[f"{path}.weight"])
            by_hand[path] = share
            layer.register_forward_hook(lambda layer, inputs, output, share=share: output / share)
    assert sum(share < 1 for share in by_hand.values()) == len(net.units.sizes), "every layer but the last is cut"
    torch.testing.assert_close(module(x), scaled)
    net._skeletons.clear()  # the hooks of this test must not stay


def test_scaler_of_two_layers_by_hand():
    net, x = network("pair"), images()
    where = {"first": torch.tensor([1]), "second": torch.tensor([0, 2, 5])}
    t = net.units.take(tensors_of("pair"), where)
    h = F.relu(F.conv2d(x, t["first.weight"], t["first.bias"], padding=1) / (1 / 4))
    h = F.relu(F.conv2d(h, t["second.weight"], t["second.bias"], padding=1) / (3 / 6))
    expected = F.linear(h.mean((2, 3)), t["head.weight"], t["head.bias"])
    torch.testing.assert_close(Eager(net, training=True)(t, x, scaler=True), expected)


@pytest.mark.parametrize("name", ["pair", "own net"])
def test_scaler_is_the_identity_on_the_whole_model(name):
    net, x = network(name), images()
    tensors = {key: tensor.clone() for key, tensor in tensors_of(name).items()}
    assert torch.equal(net.bound(tensors, training=True)(x).clone(), net.bound(tensors, training=True, scaler=True)(x))


@pytest.mark.parametrize(
    ("method", "changes"), [("heterofl", {"share": {"name": "fedbn"}}), ("fedckd", {"cut": {"name": "prefix"}})]
)
def test_a_weak_client_that_keeps_tensors_uses_the_units_that_it_trained_them_for(method, changes):
    """Of the rest of the whole model its own tensors are still those that nobody trained."""
    changes |= {"model": {"name": "lenet5_bn", "hidden": None}, "fleet": MIXED, "data": {"validation": 0.2}}
    federation = Federation(method, **changes, **FLOAT32)
    federation.round()
    outcomes = [outcome for outcome in federation.engine.outcomes if outcome.report.where]
    assert outcomes
    for outcome in outcomes:
        task = federation.fleet.task(outcome.client, {"model": federation.method.evaluation(federation.server)})
        client = federation.world.client(arrived(task, federation.network), dict(outcome.state))
        used = federation.answer(federation.method.final(client, client.task))
        assert {name: each.shape for name, each in used.items()} == federation.network.shapes(outcome.report.where)
        whole = {**client.received(), **outcome.state["own"]}
        expected = federation.network.units.take({name: whole[name] for name in used}, outcome.report.where)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in used.items())


def test_scaler_is_off_at_evaluation(tmp_path):
    """Accuracy is read without it: weak or strong, the global model is used as it is."""
    federation = Federation("heterofl", model=MODELS["mlp"], fleet=MIXED)
    federation.round()
    from fedloom.runs.evaluation import evaluate

    _, row = evaluate(federation.method, federation.server, federation.fleet)
    home = federation.fleet.home
    batch = home.test.images.batch(home.test.rows)
    logits = federation.network.bound(federation.server.tensors, training=False)(batch.x)
    assert row["global_accuracy"] == pytest.approx(float((logits.argmax(1) == batch.y).double().mean()))


@pytest.mark.parametrize("name", ["cnn4", "resnet18", "lenet5_bn", "alexnet_bn"])
def test_scaler_changes_little_before_a_batch_norm(name):
    """It only scales the norm's epsilon; variances far above epsilon, as in a net that has seen data."""
    net, x = network(name), images(16)
    where = chosen(name, "prefix", 0.5)
    small = {k: t.clone() for k, t in net.units.take(tensors_of(name), where).items()}
    for key, tensor in small.items():
        if tensor.ndim > 1 and key not in net.units.output:
            tensor.mul_(10)
    plain = net.bound(small, training=True)(x).clone()
    scaled = net.bound(small, training=True, scaler=True)(x)
    assert float((plain - scaled).abs().max() / plain.abs().max()) < 1e-3


def test_scaler_of_a_transposed_convolution():
    """Its outputs lie on axis 1 of its weight."""
    from tests.submodels.nets import Upwards

    net, x = Network(Upwards, (1, 8, 8), CLASSES), images()
    where = {"first": torch.tensor([0, 3]), "up": torch.tensor([0, 1, 4])}
    t = net.units.take(net.initial(0), where)
    h = F.relu(F.conv2d(x, t["first.weight"], t["first.bias"], stride=2, padding=1) / (2 / 8))
    h = F.relu(F.conv_transpose2d(h, t["up.weight"], t["up.bias"], stride=2) / (3 / 5))
    expected = F.linear(h.mean((2, 3)), t["head.weight"], t["head.bias"])
    torch.testing.assert_close(net.bound(t, training=True, scaler=True)(x), expected)


@pytest.mark.parametrize("fill", ["zero", "minus_infinity"])
def test_masked_cross_entropy_by_hand(fill):
    net, x, y = network("pair"), images(6), torch.tensor([1, 4, 4, 7, 1, 7])
    held = torch.zeros(CLASSES, dtype=torch.bool).index_fill_(0, torch.tensor([1, 4, 7]), True)
    tensors = {key: tensor.clone().requires_grad_() for key, tensor in tensors_of("pair").items()}
    model, objective = Eager(net, training=True), Masked(fill=fill, scaler=False)
    grads, losses = model.grad(lambda t: objective(model, t, Batch(x, y), {"held": held}), tensors)
    logits = model(tensors, x)
    if fill == "zero":
        expected = F.cross_entropy(logits * held, y, reduction="none")
    else:
        short = torch.full((CLASSES,), -1).index_copy_(0, torch.tensor([1, 4, 7]), torch.arange(3))
        expected = F.cross_entropy(logits[:, held], short[y], reduction="none")
    torch.testing.assert_close(losses, expected.detach())
    by_hand = torch.autograd.grad(expected.mean(), list(tensors.values()))
    for (name, grad), hand in zip(grads.items(), by_hand, strict=True):
        torch.testing.assert_close(grad, hand, msg=name)
    for name in ("head.weight", "head.bias"):
        assert (grads[name][~held] == 0).all(), "exactly no gradient"
        assert (grads[name][held] != 0).any()


def test_masks_of_all_classes_are_plain_cross_entropy():
    net, x, y = network("pair"), images(6), torch.arange(6)
    model, fixed = Eager(net, training=True), {"held": torch.ones(CLASSES, dtype=torch.bool)}
    plain = CrossEntropy()(model, tensors_of("pair"), Batch(x, y), fixed)
    for fill in ("zero", "minus_infinity"):
        masked = Masked(fill=fill, scaler=False)(model, tensors_of("pair"), Batch(x, y), fixed)
        assert torch.equal(plain[0], masked[0])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", CUTTING)
def test_untouched_elements_never_move(method, model):
    """Not by weight decay, momentum or the merge either, bit for bit; and the touched ones do."""
    federation = Federation(
        method, fleet=MIXED | {"clients": 5}, train=DECAY, partition={"name": "classes:2"}, select={"fraction": 0.6},
        data={"public": 12}, **model_of(model),
    )  # fmt: skip
    network = federation.network
    for _ in range(2):
        before = federation.server.tensors
        after = federation.round().tensors
        reports = [outcome.report for outcome in federation.engine.outcomes]
        assert len(reports) == 3
        touched = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in network.shapes().items()}
        for report in reports:
            for name, mask in footprint(network, report, by_class=True).items():
                touched[name] |= mask
        assert not touched.keys() - before.keys()
        for name, old in before.items():
            assert torch.equal(after[name][~touched[name]], old[~touched[name]]), name
        moved = sum(int((after[name] != before[name]).sum()) for name in before)
        assert 0 < moved <= sum(int(mask.sum()) for mask in touched.values())
        assert any(not mask.all() for mask in touched.values())


def test_rows_of_classes_that_nobody_holds_keep_their_value():
    federation = Federation(
        "heterofl", fleet={"name": "mixed", "clients": 5, "capacities": [1.0, 0.5]}, train=DECAY, model=MODELS["mlp"],
        partition={"name": "classes:2"}, select={"fraction": 0.4},
    )  # fmt: skip
    before = federation.server.tensors
    after = federation.round().tensors
    classes = [outcome.report.classes for outcome in federation.engine.outcomes]
    held = torch.cat(classes).unique()
    unheld = torch.tensor([row for row in range(CLASSES) if row not in held])
    assert len(unheld) >= CLASSES - 4
    for name in federation.network.units.output:
        assert torch.equal(after[name][unheld], before[name][unheld])
        assert (after[name][held] != before[name][held]).any()


def test_a_row_is_the_mean_of_those_who_hold_its_class():
    federation = Federation("heterofl", fleet=MIXED, model=MODELS["mlp"], partition={"name": "classes:4"})
    after = federation.round().tensors
    reports = [outcome.report for outcome in federation.engine.outcomes]
    for row in range(CLASSES):
        votes = [(r.weight, float(r.tensors["classifier.5.bias"][row])) for r in reports if row in r.classes]
        if votes:
            mean = sum(weight * value for weight, value in votes) / sum(weight for weight, _ in votes)
            assert float(after["classifier.5.bias"][row]) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("method", CUTTING)
def test_a_weak_client_trains_a_small_dense_model(method):
    fleet = {"name": "mixed", "clients": 2, "capacities": [1.0, 0.0625]}
    federation = Federation(
        method, fleet=fleet, model={"name": "mlp", "hidden": [32, 16]}, data={"public": 12},
        **({"method": {"widths": [1.0]}} if method == "fjord" else {}),
    )  # fmt: skip
    federation.round()
    strong, weak = federation.engine.fits
    assert {name: tuple(t.shape) for name, t in weak.tensors.items()} == {
        "classifier.1.weight": (2, 64), "classifier.1.bias": (2,), "classifier.3.weight": (1, 2),
        "classifier.3.bias": (1,), "classifier.5.weight": (10, 1), "classifier.5.bias": (10,),
    }  # fmt: skip
    assert all(t.is_contiguous() or t.numel() < 200 for t in weak.tensors.values())
    assert strong.tensors["classifier.1.weight"].shape == (32, 64)
    costs = []
    for outcome, (a, b) in zip(federation.engine.outcomes, ((32, 16), (2, 1)), strict=True):
        samples, whole = outcome.report.numbers["samples"], 64 * 32 + 32 * 16 + 16 * 10
        # FedDSE's weak clients run the whole model over their data once to score its units.
        scored = whole if method == "feddse" and a < 32 else 0
        assert outcome.macs == (3 * (64 * a + a * b + b * 10) + scored) * samples
        assert outcome.entry()["parameters"] == 64 * a + a + a * b + b + b * 10 + 10
        costs.append(outcome.macs / samples - scored)
    assert costs[1] < costs[0] / 10
    strong_bytes, weak_bytes = (outcome.upload_bytes for outcome in federation.engine.outcomes)
    assert weak_bytes < strong_bytes / 5
    down = [outcome.download_bytes for outcome in federation.engine.outcomes]
    if method == "feddse":
        assert down[1] == down[0], "it pulls the whole model"
    else:
        assert down[1] < down[0] / 5


def test_parameters_and_macs_of_resnet18_shrink_with_the_square_of_the_width():
    net = network("resnet18")
    tensors = tensors_of("resnet18")
    half = net.units.take(tensors, chosen("resnet18", "prefix", 0.5))
    assert 0.2 < net.macs(half) / net.macs(tensors) < 0.35


def test_all_shipped_models_are_tested():
    assert entries("model").keys() - {"darts", "narrowed"} <= BUILDERS.keys()


@pytest.mark.parametrize("method", ["heterofl", "feddse"])
def test_dropout_does_not_make_runs_irreproducible(method, tmp_path):
    """What a layer draws, in whatever pass, must come from the run's seed."""
    from tests.methods.tiny import same, server_of

    model = {"model": {"name": f"{HERE}:Forgetful", "hidden": None}}
    runs = []
    for seed in (11, 22):
        torch.manual_seed(seed)
        runs.append(run(method, tmp_path, fleet=MIXED, **model))
    same(*map(server_of, runs))
    assert metric_rows(runs[0]) == metric_rows(runs[1])


class Dropping(nn.Module):
    """Dropout as a layer and as a function, before and behind a norm."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 12), nn.BatchNorm1d(12)
        self.second, self.head = nn.Linear(12, 9), nn.Linear(9, CLASSES)
        self.drop, self.share = nn.Dropout(share), share

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(self.drop(x.flatten(1))))
        return self.head(F.dropout(F.relu(self.second(F.relu(x))), self.share, self.training))


@pytest.mark.parametrize("what", [Activation, Scale, Gradient, Predictions, NormMoments])
def test_units_and_norms_are_looked_at_without_dropout(what):
    read, place = [], Images(images(24), torch.arange(24) % CLASSES, torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    for share in (0.5, 0.0):
        net = Network(partial(Dropping, share), (1, SIDE, SIDE), CLASSES)
        tensors = {name: 3 * tensor for name, tensor in net.initial(3).items()}
        read += Reference(net).solve([Measure(tensors, what(), Samples(place, torch.arange(24)))])
        assert all(layer.training for layer in net.bound(tensors, training=True).modules()), "training drops as ever"
    dropped, whole = read
    assert dropped.keys() == whole.keys()
    assert all(torch.equal(dropped[name], whole[name]) for name in whole)


def test_statistics_that_are_read_without_dropout_are_the_batchs():
    """Not the running ones that evaluation would take."""
    net = Network(partial(Dropping, 0.5), (1, SIDE, SIDE), CLASSES)
    tensors, x = net.initial(3), images(24)
    with steady(net, tensors) as module:
        seen = module(x)
    h = F.batch_norm(F.linear(x.flatten(1), tensors["first.weight"], tensors["first.bias"]), None, None, training=True)
    h = F.relu(F.linear(F.relu(h), tensors["second.weight"], tensors["second.bias"]))
    torch.testing.assert_close(seen, F.linear(h, tensors["head.weight"], tensors["head.bias"]))


@pytest.mark.parametrize("method", ["heterofl", "feddse"])
def test_logits_that_are_not_one_layers_output(method, tmp_path):
    result = run(
        method, tmp_path, fleet=MIXED, model={"name": f"{HERE}:Refined", "hidden": None}, run={"rounds": 1},
        data={"public": 12}, merge={"by_class": False},
    )  # fmt: skip
    assert metric_rows(result)[0]["failures"] == 0
    with pytest.raises(InputError, match=r"no layer of the model has its classes for rows: \{'rough'"):
        run(method, tmp_path, fleet=MIXED, model={"name": f"{HERE}:Refined", "hidden": None})


def test_tied_weights_are_refused(tmp_path):
    with pytest.raises(InputError, match="ties"):
        run("heterofl", tmp_path, fleet=MIXED, model={"name": f"{HERE}:Tied", "hidden": None}, data={"public": 12})
