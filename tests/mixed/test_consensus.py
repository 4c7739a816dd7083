"""FedMD, DS-FL and FedDF: answers, their means and steps by hand, and the cases in which nothing is learnt."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

from fedloom import wire
from fedloom.engine.local import Local
from fedloom.engine.reference import Reference
from fedloom.errors import InputError
from fedloom.methods.dsfl import sharpened
from fedloom.models.resolve import build
from fedloom.policies.consensus import Agree, Answers, absolute, cross_entropy, divergence, drawn, lesson, numbered
from fedloom.runs.world import World, world_of
from fedloom.types import Measure, Task, Train
from tests.contract.study import final
from tests.distillation.test_ring import models
from tests.methods.tiny import begin, close, descend, far, run, same, server_of, study_of, world

ALL = {"data": {"public": 30}}
ALONE = ALL | {"fleet": {"clients": 1}, "partition": {"name": "iid"}}
AT_ONCE = {"public_epochs": 0, "private_epochs": 0}  # FedMD without its transfer learning
logits = st.lists(st.floats(-9, 9), min_size=3, max_size=3).map(lambda row: torch.tensor([row], dtype=torch.float64))


def says(place: World, tensors, x):
    """The logits, with nothing of fedloom but the module."""
    data, model = place.dataset, place.study.model
    module = build(model.name, channels=data.channels, classes=data.classes, size=data.size, **model.fields)
    return functional_call(module, tensors, (x,))


def public(place: World):
    return place.public.images.batch(place.public.rows).x


def consensus(result):
    (path,) = (result.folder / "checkpoints").glob("server*")
    return wire.load(path)["memory"]["consensus"]


def moved(tensors, loss, optimizer, clip=None):
    """The tensors after one step of an optimiser of PyTorch's."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    loss(leaves).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(list(leaves.values()), clip)
    optimizer(list(leaves.values())).step()
    return {name: tensor.detach() for name, tensor in leaves.items()}


def test_distances_by_hand():
    own, aim = torch.tensor([[1.0, -2.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
    assert float(absolute(own, aim)) == pytest.approx((1 + 3) / 2)
    normal = log(exp(1) + exp(-2))
    assert float(cross_entropy(own, torch.tensor([[0.25, 0.75]]))) == pytest.approx(
        -0.25 * (1 - normal) - 0.75 * (-2 - normal)
    )
    likely = [1 / (1 + exp(1)), exp(1) / (1 + exp(1))]
    expected = sum(p * (log(p) - (value - normal)) for p, value in zip(likely, (1, -2), strict=True))
    assert float(divergence(own, aim)) == pytest.approx(expected)


@given(logits, logits)
def test_divergence_is_never_negative_and_zero_for_oneself(own, aim):
    assert float(divergence(own, aim)) >= -1e-12
    assert float(divergence(own, own)) == pytest.approx(0, abs=1e-12)


def test_sharpening_by_hand():
    mean = torch.tensor([[0.5, 0.3, 0.2], [1 / 3, 1 / 3, 1 / 3]]).double()
    weights = [exp(5), exp(3), exp(2)]
    expected = torch.tensor([[each / sum(weights) for each in weights], [1 / 3] * 3]).double()
    torch.testing.assert_close(sharpened(mean, 0.1), expected)


@given(logits)
def test_sharpening_keeps_the_order(row):
    mean = row.softmax(-1)
    sharp = sharpened(mean, 0.1)
    assert float(sharp[0, mean.argmax()]) == pytest.approx(float(sharp.max()))
    assert float(sharp.sum()) == pytest.approx(1)


@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_answers_are_a_table_by_number(batch_size):
    place = world("fedmd", **ALL)
    tensors, samples = begin(place).tensors, numbered(place.public)
    some = replace(samples, rows=samples.rows[[4, 9, 2]])
    (read,) = Reference(place.network).solve([Measure(tensors, Answers(30), some, batch_size)])
    expected = torch.zeros(30, 10, dtype=torch.float64)
    expected[[4, 9, 2]] = says(place, tensors, public(place))[[4, 9, 2]]
    torch.testing.assert_close(read["logits"], expected, rtol=0, atol=1e-12)


def test_a_rounds_images_are_the_same_for_all_and_others_in_the_next():
    place = world("fedmd", **ALL)
    seen = {
        (client, round): drawn(place.client(Task(client, round), {}), 12, round).numbers.tolist()
        for client in (0, 2)
        for round in (0, 1)
    }
    assert seen[0, 0] == seen[2, 0] != seen[0, 1] == seen[2, 1]
    assert len(set(seen[0, 0])) == 12
    samples, numbers, total = drawn(place.client(Task(0, 0), {}), 99, 0)
    assert numbers.tolist() == list(range(total)) == list(range(30))
    assert samples.images.y[samples.rows].tolist() == list(range(30))


def test_fedmd_by_hand(tmp_path):
    """Two rounds: train, mean of logits; then an Adam step towards it, and training again."""
    study = ALL | {"fleet": {"clients": 2}}
    first, second = (run("fedmd", tmp_path, method=AT_ONCE, run={"rounds": n}, **study) for n in (1, 2))
    place = world("fedmd", method=AT_ONCE, **study)
    own = {client: descend(place, begin(place).tensors, client, 0)[0] for client in range(2)}
    for client in range(2):
        close(models(first)[client], own[client])
    mean = (says(place, own[0], public(place)) + says(place, own[1], public(place))) / 2
    torch.testing.assert_close(consensus(first)["answers"], mean, rtol=0, atol=1e-12)
    for client in range(2):
        digested = moved(
            own[client], lambda tensors: (says(place, tensors, public(place)) - mean).abs().mean(),
            lambda leaves: torch.optim.Adam(leaves, lr=1e-3),
        )  # fmt: skip
        close(models(second)[client], descend(place, digested, client, 1)[0], 1e-8)


def test_fedmd_begins_with_public_labels_and_then_its_own(tmp_path):
    """Batches as large as the data: epochs are steps."""
    study = ALONE | {"train": {"batch_size": 200}, "run": {"rounds": 1}}
    result = run("fedmd", tmp_path, method={"public_epochs": 2, "private_epochs": 3}, **study)
    place = world("fedmd", **study)
    tensors = begin(place).tensors
    mine = place.client(Task(0, 0), {}).train
    for samples, steps in ((place.public, 2), (mine, 3 + 1)):
        batch = samples.images.batch(samples.rows)
        for _ in range(steps):
            tensors = moved(
                tensors, lambda tensors, batch=batch: F.cross_entropy(says(place, tensors, batch.x), batch.y),
                lambda leaves: torch.optim.SGD(leaves, lr=0.1),
            )  # fmt: skip
    close(models(result)[0], tensors)


@pytest.mark.parametrize("aggregate", ["era", "sa"])
def test_dsfl_by_hand(aggregate, tmp_path):
    """Mean of probabilities, sharpened; the server's step towards it, and then the clients'."""
    study = ALL | {
        "fleet": {"clients": 2},
        "train": {"batch_size": 40},
        "method": {"aggregate": aggregate, "epochs": 1},
    }
    first, second = (run("dsfl", tmp_path, run={"rounds": n}, **study) for n in (1, 2))
    place = world("dsfl", **study)
    own = [descend(place, begin(place).tensors, client, 0)[0] for client in range(2)]
    mean = sum(says(place, tensors, public(place)).softmax(-1) for tensors in own) / 2
    aim = (mean / 0.1).softmax(-1) if aggregate == "era" else mean
    torch.testing.assert_close(consensus(first)["answers"], aim, rtol=0, atol=1e-12)

    def learnt(tensors):
        return moved(
            tensors, lambda tensors: F.cross_entropy(says(place, tensors, public(place)), aim),
            lambda leaves: torch.optim.SGD(leaves, lr=0.1),
        )  # fmt: skip

    close(server_of(first), learnt(begin(place).tensors))
    for client in range(2):
        close(models(second)[client], descend(place, learnt(own[client]), client, 1)[0])


def test_feddf_by_hand(tmp_path):
    """The mean of both by samples, then a clipped Adam step towards their mean logits."""
    study = ALL | {"fleet": {"clients": 2}, "run": {"rounds": 1}}
    result = run("feddf", tmp_path, method={"steps": 1, "clip": 0.01, "lr": 0.01}, **study)
    place = world("feddf", **study)
    trained = [descend(place, begin(place).tensors, client, 0)[0] for client in range(2)]
    sizes = [len(place.split.train[client]) for client in range(2)]
    student = {
        name: (sizes[0] * trained[0][name] + sizes[1] * trained[1][name]) / sum(sizes) for name in trained[0]
    }  # fmt: skip
    mean = sum(says(place, tensors, public(place)) for tensors in trained) / 2

    def apart(tensors):
        said = says(place, tensors, public(place)).log_softmax(-1)
        return F.kl_div(said, mean.log_softmax(-1), log_target=True, reduction="batchmean")

    expected = moved(student, apart, lambda leaves: torch.optim.Adam(leaves, lr=0.01), clip=0.01)
    assert far(expected, student) > 1e-3
    close(server_of(result), expected, 1e-8)


def test_a_student_that_is_its_only_teacher_stays(tmp_path, monkeypatch):
    """Loss 0, no step. One step: of rounding in its gradient Adam would make steps of full size in a few more."""
    fits, solve = [], Local.solve
    monkeypatch.setattr(Local, "solve", lambda self, asked: fits.append(solve(self, asked)) or fits[-1])
    distilled = run("feddf", tmp_path, method={"steps": 1}, run={"rounds": 1}, **ALONE)
    (loss,) = [each.loss for answers in fits for each in answers if hasattr(each, "loss")]
    assert loss == pytest.approx(0, abs=1e-14)
    close(server_of(distilled), server_of(run("fedavg", tmp_path, run={"rounds": 1}, **ALONE)), 1e-10)


def test_nor_does_it_drift_in_many_plain_steps():
    place, train = world("feddf", **ALONE), Train(0.1, 8, 10)
    home, tensors = replace(place.home(), task=Task(-1, 0, train=train)), begin(place).tensors
    table = says(place, tensors, public(place))
    (fit,) = place.trainer.solve([lesson(home, tensors, table, numbered(home.public), Agree(divergence), train)])
    assert fit.loss == pytest.approx(0, abs=1e-14)
    close(fit.tensors, tensors)


def test_alone_there_is_nothing_to_learn_from_oneself(tmp_path):
    study = ALONE | {"run": {"rounds": 3}}
    close(
        models(run("dsfl", tmp_path, method={"aggregate": "sa"}, **study))[0],
        models(run("local", tmp_path, **study))[0],
    )


@pytest.mark.parametrize(("method", "own"), [("fedmd", AT_ONCE), ("dsfl", {}), ("feddf", {"steps": 5})])
def test_order_does_not_matter_and_labels_are_not_looked_at(method, own, tmp_path, monkeypatch):
    study = {"method": own, "model": {"name": ["mlp", "lenet5"], "hidden": None}, "run": {"rounds": 2}} | ALL
    plain, forward, given = final(run(method, tmp_path, **study)), Local.run, World.public.func
    monkeypatch.setattr(Local, "run", lambda self, tasks: forward(self, reversed(list(tasks))))
    turned = final(run(method, tmp_path, **study))
    for name, tensor in plain.items():
        assert torch.allclose(tensor.double(), turned[name].double(), rtol=0, atol=1e-7, equal_nan=True), name
    monkeypatch.setattr(Local, "run", forward)

    def unlabelled(self):
        samples = given(self)
        return replace(samples, images=replace(samples.images, y=torch.zeros_like(samples.images.y)))

    blind = cached_property(unlabelled)
    blind.__set_name__(World, "public")
    monkeypatch.setattr(World, "public", blind)
    world_of.cache_clear()
    same(plain, final(run(method, tmp_path, **study)))
    world_of.cache_clear()


@pytest.mark.parametrize("method", ["fedmd", "dsfl"])
def test_answers_are_what_travels(method, tmp_path):
    """250 numbers of eight bytes up, and down once there are some; whatever the size of the model."""
    spent = []
    for hidden in (8, 300):
        own = {"samples": 25} | (AT_ONCE if method == "fedmd" else {})
        result = run(method, tmp_path, method=own, model={"hidden": [hidden]}, **ALL)
        work = [row for row in result.rows("clients") if row["job"] == "work"]
        for row in work:
            assert row["parameters"] == 250
            assert row["forward_macs"] == 64 * hidden + 10 * hidden
            assert 0 < row["upload_bytes"] - 250 * 8 < 600
            assert 0 < row["download_bytes"] - (250 * 8 if row["round"] else 0) < 1000
        asked = [row for row in result.rows("clients") if row["job"] == "evaluate"]
        assert all(row["download_bytes"] < 1000 for row in asked), "nothing travels to be evaluated"
        spent.append(result.summary["upload_bytes"])
    assert abs(spent[0] - spent[1]) < 200


@pytest.mark.parametrize(
    "slot",
    [
        {"cut": {"name": "prefix"}},
        {"share": {"name": "fedbn"}},
        {"filter": {"name": "clip"}},
        {"merge": {"weights": "equal"}},
    ],
)
@pytest.mark.parametrize("method", ["fedmd", "dsfl"])
def test_slots_about_tensors_are_refused(method, slot):
    with pytest.raises(InputError, match=f"{method} sends answers on public images and no models"):
        study_of(method, **slot)


@pytest.mark.parametrize(
    "slot",
    [
        {"cut": {"name": "prefix"}},
        {"share": {"name": "fedbn"}},
        {"merge": {"by_class": True}},
        {"merge": {"name": "momentum"}},
    ],
)
def test_feddf_takes_whole_models(slot):
    with pytest.raises(InputError, match=r"feddf .* whole models"):
        study_of("feddf", **slot)


@pytest.mark.parametrize("method", ["fedmd", "dsfl", "feddf"])
def test_no_public_images_no_run(method):
    with pytest.raises(InputError, match="needs public data"):
        world(method).check()


DIGESTING = {"public_epochs": 3, "private_epochs": 3, "digest_epochs": 10, "digest_batch": 32, "digest_lr": 5e-3}


@pytest.mark.parametrize(("method", "own", "without"), [
    ("fedmd", DIGESTING, ("fedmd", DIGESTING | {"digest_lr": 1e-12})), ("dsfl", {}, ("local", {})),
    ("feddf", {"steps": 60}, ("local", {})),
])  # fmt: skip
def test_knowledge_travels_between_different_models(method, own, without, tmp_path):
    """Three classes a client; tested on all ten. Without the others' answers nobody knows more than its three."""
    study = {
        "data": {"limit": 600, "public": 200, "validation": 0.0}, "partition": {"name": "classes:3"},
        "fleet": {"clients": 4}, "evaluate": {"on": "all", "every": 8}, "run": {"rounds": 8}, "train": {"lr": 0.1},
        "engine": {"precision": "float32"},
    }  # fmt: skip
    pair = [{"name": "mlp", "hidden": [32]}, {"name": "mlp", "hidden": [64, 32]}]
    mixed = {"name": pair, "hidden": None}
    name, settings = without
    alone = run(name, tmp_path, method=settings, model=mixed if name == method else {}, **study)
    together = run(method, tmp_path, method=own, model=mixed, **study)
    assert alone.summary["local_accuracy"] < 0.31
    assert together.summary["local_accuracy"] > alone.summary["local_accuracy"] + 0.1
