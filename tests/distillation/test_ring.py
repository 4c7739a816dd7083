"""FedRKD: lambda by hand, who learns from whom, what happens to who fails; and gossip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.data.rows import Rows
from fedloom.errors import InputError
from fedloom.methods import fedrkd
from fedloom.methods.fedrkd import strength
from fedloom.methods.gossip import mixed
from fedloom.readings import Accuracy
from fedloom.runs.knowledge import knowledge
from fedloom.runs.world import World
from fedloom.types import Fit, Measure, Report, Task, Train
from tests.contract.study import final, rows
from tests.methods.tiny import close, far, run, same, study_of, world

VALID = {"data": {"validation": 0.2}}


def models(result) -> dict[int, dict[str, torch.Tensor]]:
    """Every participant's own model at the end of a run."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in final(result).items():
        place, _, path = name.partition("/own/")
        if path:
            found.setdefault(int(place.removeprefix("client")), {})[path] = tensor
    return found


@pytest.mark.parametrize(("teacher", "own", "expected"), [
    (0.5, 0.51, 0.0), (0.0, 1.0, 0.0), (0.7, 0.7, 0.1), (0.75, 0.70, 10**-0.5), (0.71, 0.70, 10**-0.9),
    (0.8, 0.7, 1.0), (0.95, 0.1, 1.0),
])  # fmt: skip
def test_lambda_by_hand(teacher, own, expected):
    assert strength(teacher, own) == pytest.approx(expected, abs=1e-12)
    assert strength(teacher, own, 2.5) == pytest.approx(2.5 * expected, abs=1e-12)


def drive(method, client, task, accuracies):
    """Run a client half with these validation accuracies; gives its fits and its report."""
    work, fits, answer = method.work(client, task), [], None
    trainer = world("fedrkd", **VALID).trainer
    while True:
        try:
            asked = work.send(answer)
        except StopIteration as stop:
            return fits, stop.value
        if isinstance(asked, Fit):
            fits.append(asked)
            (answer,) = trainer.solve([asked])
        else:
            assert all(isinstance(each, Measure) and isinstance(each.what, Accuracy) for each in asked)
            assert all(each.samples.rows is client.validation.rows for each in asked)
            right = [accuracies.pop(0) * len(client.validation) for _ in asked]
            answer = tuple({"right": torch.tensor([number], dtype=torch.float64)} for number in right)


def hop(accuracies, **settings):
    place = world("fedrkd", **VALID, **settings)
    task = Task(0, 3, 1, train=Train(lr=0.1, epochs=1), inbox={2: Report(place.network.initial(7))})
    return place, drive(place.method, place.client(task, {}), task, accuracies)


def test_the_hop_uses_the_formula():
    place, ((fit,), report) = hop([0.75, 0.70])
    assert float(fit.fixed["strength"]) == pytest.approx(10**-0.5)
    assert report.numbers["lambda"] == pytest.approx(10**-0.5)
    same(dict(fit.fixed["teacher"]), place.network.initial(7))
    assert fit.step.objective is place.method.objective


def test_lambda_zero_is_plain_local_training():
    """The teacher is worse, or lambda0 is 0: the same as the training alone of the same moment."""
    place, (_, report) = hop([0.5, 0.6])
    alone = Task(0, 3, 1, train=Train(lr=0.1, epochs=1))
    _, plain = drive(place.method, place.client(alone, {}), alone, [])
    same(dict(report.tensors), dict(plain.tensors))
    _, (_, nothing) = hop([0.9, 0.1], method={"lambda0": 0.0})
    same(dict(nothing.tensors), dict(plain.tensors))
    _, (_, taught) = hop([0.9, 0.1])
    assert far(dict(taught.tensors), dict(plain.tensors)) > 1e-6
    assert report.numbers["lambda"] == nothing.numbers["lambda"] == 0


def test_a_ring_of_one_trains_once(tmp_path):
    alone = VALID | {"fleet": {"clients": 1}, "partition": {"name": "iid"}}
    once = run("fedrkd", tmp_path, run={"rounds": 1}, **alone)
    often = run("fedrkd", tmp_path, run={"rounds": 5}, **alone)
    local = run("local", tmp_path, run={"rounds": 1}, **alone)
    same(models(once)[0], models(often)[0])
    same(models(once)[0], models(local)[0])
    assert [row["train_macs"] > 0 for row in rows(often)] == [True, False, False, False, False]


def inboxes(monkeypatch):
    """(round, stage) -> receiver -> senders, of all work."""
    seen: dict[tuple[int, int], dict[int, list[int]]] = {}
    plain = World.client

    def noted(self, task, state):
        if task.job == "work":
            seen.setdefault((task.round, task.stage), {})[task.client] = sorted(task.inbox)
        return plain(self, task, state)

    monkeypatch.setattr(World, "client", noted)
    return seen


def test_directions_alternate_and_hops_are_k_minus_one(tmp_path, monkeypatch):
    seen = inboxes(monkeypatch)
    run("fedrkd", tmp_path, run={"rounds": 3}, **VALID)
    clockwise, back = {0: [2], 1: [0], 2: [1]}, {0: [1], 1: [2], 2: [0]}
    assert seen[(0, 0)] == {0: [], 1: [], 2: []}
    assert [seen[(0, 1)], seen[(0, 2)]] == [clockwise] * 2
    assert [seen[(1, 0)], seen[(1, 1)]] == [back] * 2
    assert [seen[(2, 0)], seen[(2, 1)]] == [clockwise] * 2
    assert len(seen) == 7


def test_teachers_are_those_of_the_stage_before(tmp_path, monkeypatch):
    """All hops of a stage happen at once: nobody learns from what was made in the same stage."""
    received, plain = [], World.client

    def noted(self, task, state):
        if task.job == "work" and task.inbox:
            ((sender, report),) = task.inbox.items()
            received.append((task.stage, sender, report))
        return plain(self, task, state)

    monkeypatch.setattr(World, "client", noted)
    run("fedrkd", tmp_path, run={"rounds": 1}, **VALID)
    assert {stage for stage, *_ in received} == {1, 2}
    by = {(stage, sender): report.tensors for stage, sender, report in received}
    for sender in range(3):
        assert far(dict(by[(1, sender)]), dict(by[(2, sender)])) > 1e-6


@pytest.mark.parametrize("direction", ["clockwise", "counter"])
def test_one_way_variants(direction, tmp_path, monkeypatch):
    seen = inboxes(monkeypatch)
    run("fedrkd", tmp_path, topology={"direction": direction}, **VALID)
    first = {"clockwise": {0: [2], 1: [0], 2: [1]}, "counter": {0: [1], 1: [2], 2: [0]}}[direction]
    assert [edges for (round, stage), edges in seen.items() if (round, stage) != (0, 0)] == [first] * 4


def test_peer_to_peer_learns_from_every_model(tmp_path, monkeypatch):
    seen = inboxes(monkeypatch)
    result = run("fedrkd", tmp_path, topology={"name": "graph", "shape": "complete"}, run={"rounds": 1}, **VALID)
    assert seen == {(0, 0): {0: [], 1: [], 2: []}, (0, 1): {0: [1, 2], 1: [0, 2], 2: [0, 1]}}
    work = [entry for entry in result.rows("clients") if entry["job"] == "work"]
    alone, taught = ([e for e in work if e["stage"] == stage] for stage in (0, 1))
    for before, after in zip(alone, taught, strict=True):
        assert after["steps"] == 2 * before["steps"]  # one fit a teacher
        assert after["download_bytes"] > 2 * (before["upload_bytes"] - 1000)
        assert after["upload_bytes"] == pytest.approx(2 * before["upload_bytes"], rel=0.05)  # to two neighbours


def killing(monkeypatch, victim: int, moments: set[tuple[int, int]]):
    """The victim's device breaks in these (round, stage)."""
    plain = World.jobs.func

    def faulty(self):
        jobs = dict(plain(self))
        work = jobs["work"]

        def harmed(client, task):
            if client.id == victim and (task.round, task.stage) in moments:
                raise RuntimeError("killed")
            return (yield from work(client, task))

        return {**jobs, "work": harmed}

    monkeypatch.setattr(World, "jobs", property(faulty))


@pytest.mark.parametrize("method", ["fedrkd", "metafed"])
def test_killed_in_the_middle_of_a_round_and_back_in_the_next(method, tmp_path, monkeypatch):
    own = {"method": {"warm_up": 1}} if method == "metafed" else {}
    study = VALID | own | {"fleet": {"clients": 4}, "run": {"rounds": 2}}
    killing(monkeypatch, 1, {(0, 2)})
    seen = inboxes(monkeypatch)
    result = run(method, tmp_path, **study)
    assert result.summary["failures"] == 1
    if method == "fedrkd":
        # Four hops are asked for; after the second stage three participants are left, whose ring has two hops.
        assert seen[(0, 1)] == {0: [3], 1: [0], 2: [1], 3: [2]}
        assert seen[(0, 2)] == {0: [3], 1: [0], 2: [1], 3: [2]}
        assert (0, 3) not in seen
        assert seen[(1, 0)] == {0: [1], 1: [2], 2: [3], 3: [0]}
    else:
        chain = [seen[(0, stage)] for stage in range(1, 5)]
        assert chain == [{0: []}, {1: [0]}, {2: [0]}, {3: [2]}]  # 0 hands on to 2
        assert [seen[(1, stage)] for stage in range(4)] == [{0: [3]}, {1: [0]}, {2: [1]}, {3: [2]}]
    assert set(models(result)) == {0, 1, 2, 3}


def test_killed_early_its_neighbours_become_neighbours(tmp_path, monkeypatch):
    killing(monkeypatch, 1, {(0, 1), (1, 0)})
    seen = inboxes(monkeypatch)
    result = run("fedrkd", tmp_path, fleet={"clients": 4}, run={"rounds": 3}, **VALID)
    assert seen[(0, 2)] == {0: [3], 2: [0], 3: [2]}
    assert seen[(1, 1)] == {0: [2], 2: [3], 3: [0]}
    assert seen[(2, 0)] == {0: [3], 1: [0], 2: [1], 3: [2]}  # it came back
    assert result.summary["failures"] == 2


def test_drop_outs_of_a_fleet_are_skipped(tmp_path, monkeypatch):
    seen = inboxes(monkeypatch)
    fleet = {"clients": 6, "dropout": 0.3}
    result = run("fedrkd", tmp_path, fleet=fleet, engine={"quorum": 0.0}, run={"rounds": 4}, **VALID)
    assert result.summary["failures"] > 0
    widths = {len(edges) for edges in seen.values()}
    assert len(widths) > 1
    for edges in seen.values():
        for receiver, senders in edges.items():
            assert receiver not in senders


def test_below_the_quorum_the_run_ends(tmp_path, monkeypatch):
    from fedloom.errors import RunError

    killing(monkeypatch, 0, {(0, 0)})
    with pytest.raises(RunError, match="2 of 3 clients reported, the quorum is 90%"):
        run("fedrkd", tmp_path, engine={"quorum": 0.9}, **VALID)


@pytest.mark.slow
def test_knowledge_travels(tmp_path, monkeypatch):
    """Each of three participants has a class of its own; after one round of lambda 1 the others know it too.

    A mean over two seeds: with some seeds one of the six pairs stays at 0, as it is without teachers.
    """
    study = {
        "data": {"name": "tests.distillation.private:private_digits", "validation": 0.1, "limit": None},
        "partition": {"name": "domain"}, "model": {"name": "mlp", "hidden": None}, "engine": {"precision": "float32"},
        "train": {"lr": 0.1, "epochs": 20, "batch_size": 16}, "objective": {"hard": 3.0},
    }  # fmt: skip
    found = {}
    for forced, seed in ((0.0, 0), (1.0, 0), (1.0, 1)):
        monkeypatch.setattr(fedrkd, "strength", lambda *of, forced=forced: forced)
        result = run("fedrkd", tmp_path, run={"rounds": 1, "seed": seed}, **study)
        found[forced, seed] = knowledge(result.folder)
    alone, taught = found[0.0, 0].classes[:, 7:], (found[1.0, 0].classes + found[1.0, 1].classes)[:, 7:] / 2
    elsewhere = ~np.eye(3, dtype=bool)
    assert (alone[elsewhere] == 0).all()
    assert (alone.diagonal() > 0.5).all()
    assert (taught[elsewhere] > alone[elsewhere]).all()
    assert found[1.0, 0].others > found[0.0, 0].others


def test_a_teacher_brings_a_class_that_was_never_seen(tmp_path, monkeypatch):
    """Two participants, one hop: what only the other has is known after it, and not without it."""
    study = {
        "data": {"name": "tests.distillation.private:private_digits", "validation": 0.1, "limit": 600},
        "partition": {"name": "domain"}, "model": {"name": "mlp", "hidden": None}, "engine": {"precision": "float32"},
        "train": {"lr": 0.1, "epochs": 5, "batch_size": 16}, "run": {"rounds": 1},
        "topology": {"name": "graph", "shape": "edges", "edges": [[0, 1]]},
    }  # fmt: skip
    found = {}
    for forced in (0.0, 1.0):
        monkeypatch.setattr(fedrkd, "strength", lambda *of, forced=forced: forced)
        found[forced] = knowledge(run("fedrkd", tmp_path, **study).folder)
    for one, other in ((0, 1), (1, 0)):
        assert found[0.0].classes[one, 7 + other] == 0
        assert found[1.0].classes[one, 7 + other] > 0.1
    assert found[0.0].peers.shape == (3, 3)
    assert found[1.0].peers[0, 1] > found[0.0].peers[0, 1]


def test_gossip_mixes_by_hand(tmp_path):
    """Two rounds of a triangle: every model after mixing is the mean of all three, since each counts a third."""
    study = {"topology": {"shape": "complete"}, "train": {"lr": 0.1}}
    first = models(run("gossip", tmp_path, run={"rounds": 1}, **study))
    mean = {name: sum(first[n][name] for n in range(3)) / 3 for name in first[0]}
    frozen = {"schedule": "step", "milestones": [1], "decay": 0.0}
    second = models(run("gossip", tmp_path, run={"rounds": 2}, **study | {"train": {"lr": 0.1, **frozen}}))
    for number in range(3):
        close(second[number], mean, 1e-12)
        assert far(first[number], mean) > 1e-4


def test_gossip_on_a_path_keeps_the_mean(tmp_path):
    """Degrees 1, 2, 1: weights of a third on both edges."""
    study = {"topology": {"shape": "edges", "edges": [[0, 1], [1, 2]]}}
    first = models(run("gossip", tmp_path, run={"rounds": 1}, **study))
    frozen = {"lr": 0.1, "schedule": "step", "milestones": [1], "decay": 0.0}
    second = models(run("gossip", tmp_path, run={"rounds": 2}, train=frozen, **study))
    name = "classifier.1.weight"
    assert torch.allclose(second[0][name], (2 * first[0][name] + first[1][name]) / 3, atol=1e-12)
    assert torch.allclose(second[1][name], (first[0][name] + first[1][name] + first[2][name]) / 3, atol=1e-12)
    for name in first[0]:
        means = [sum(each[n][name] for n in range(3)) for each in (first, second)]
        assert torch.allclose(*means, atol=1e-12)


def test_gossip_alone_is_local_training(tmp_path):
    alone = {"fleet": {"clients": 1}, "partition": {"name": "iid"}}
    same(models(run("gossip", tmp_path, **alone))[0], models(run("local", tmp_path, **alone))[0])


def test_mixing_rounds_counters_and_leaves_what_is_not_shared():
    own = {"a": torch.tensor([1.0]), "n": torch.tensor(3), "private": torch.tensor([5.0])}
    other = {"a": torch.tensor([3.0]), "n": torch.tensor(8)}
    got = mixed(own, {4: other}, {4: 0.25})
    assert got["a"].item() == 1.5
    assert got["n"].item() == 4
    assert got["n"].dtype == torch.int64
    assert got["private"] is own["private"]


def test_private_layers_never_travel(tmp_path):
    """FedRKD with the share of FedBN: own norms stay, and stand in for the teacher's."""
    study = VALID | {"model": {"name": "lenet5_bn", "hidden": None}, "share": {"name": "fedbn"}}
    place = world("fedrkd", **study)
    result = run("fedrkd", tmp_path, **study)
    assert result.summary["failures"] == 0
    assert place.network.norms
    sent = [name for name in final(result) if name.startswith("server/memory/last")]
    assert sent
    assert not [name for name in sent if any(norm in name for norm in place.network.norms)]


def test_there_is_no_global_model(tmp_path):
    for method in ("fedrkd", "gossip"):
        result = run(method, tmp_path, run={"rounds": 1}, **VALID)
        assert result.summary["global_accuracy"] is None
        own = [entry["accuracy"] for entry in result.rows("clients") if entry["job"] == "evaluate"]
        assert len(own) == 3
        assert result.summary["local_accuracy"] == pytest.approx(np.mean(own))


def test_a_study_without_validation_data_is_refused():
    for method in ("fedrkd", "fedckd", "metafed"):
        with pytest.raises(InputError, match=f"{method} needs validation data at every client"):
            world(method).check()
    assert study_of("gossip")


def spared(clients, validation, without, **changes):
    """The world of a study in which some clients have no validation image."""
    place = world("fedckd", data={"validation": validation}, fleet={"clients": clients, **changes})
    held = Rows.of([[] if client in without else [client] for client in range(clients)])
    return replace(place, split=replace(place.split, validation=held))


@pytest.mark.parametrize(("validation", "without", "said"), [
    (0.2, [1, 4], "data.validation is 0.2 and 2 of 8 clients have none (numbers 1, 4); they hold too few images"),
    (0.2, range(1, 8), "7 of 8 clients have none (numbers 1, 2, 3, 4, 5, ...); they hold too few images"),
    (0.0, range(8), "data.validation is 0 and 8 of 8 clients have none (numbers 0, 1, 2, 3, 4, ...); keep some of "
     "each client's images aside with --set data.validation=0.1"),
])  # fmt: skip
def test_who_has_no_validation_image_is_named(validation, without, said):
    with pytest.raises(InputError) as refused:
        spared(8, validation, without).check()
    assert str(refused.value).endswith(said)


def test_who_never_trains_needs_no_validation_image():
    looking_on = spared(8, 0.2, [], onlookers=0.25).columns["onlooker"].nonzero()[0].tolist()
    assert len(looking_on) == 2
    spared(8, 0.2, looking_on, onlookers=0.25).check()
    with pytest.raises(InputError, match=r"1 of 8 clients have none \(numbers \d\)"):
        spared(8, 0.2, [*looking_on, min(set(range(8)) - set(looking_on))], onlookers=0.25).check()
