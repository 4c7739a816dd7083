"""MetaFed: lambda, flags, copies, and the authors' code where it departs."""

from __future__ import annotations

import pytest
import torch

from fedloom.methods.metafed import MetaFed, personal_strength
from fedloom.runs.world import World
from fedloom.types import Task, Train
from tests.distillation.test_ring import VALID, drive, models
from tests.methods.tiny import begin, close, descend, far, run, same, world

ONCE = {"warm_up": 1}


@pytest.mark.parametrize(
    ("teacher", "own", "expected"),
    [(0.8, 0.6, 1.0), (1.0, 0.1, 1.0), (0.6, 0.6, 0.1), (0.6, 0.8, 0.01), (0.7, 0.6, 10**-0.5)],
)
def test_lambda_table(teacher, own, expected):
    assert personal_strength(teacher, own) == pytest.approx(expected)
    assert personal_strength(teacher, own, 3.0) == pytest.approx(3 * expected)


def test_a_bad_teacher_that_is_not_better_teaches_nothing():
    assert personal_strength(0.4, 0.4) == 0
    assert personal_strength(0.4, 0.4, floor=0.4) == pytest.approx(0.1)
    assert personal_strength(0.4, 0.3) > 0


def test_above_one_it_is_cyclic_transfer(tmp_path):
    """Nobody ever distils: each takes over what its predecessor handed on, and trains it."""
    study = VALID | {"train": {"steps": 2}, "run": {"rounds": 2}}
    result = run("metafed", tmp_path, method=ONCE | {"threshold": 1.1}, **study)
    place = world("metafed", **study)
    handed = None
    own: dict[int, dict[str, torch.Tensor]] = {}
    for client in range(3):
        task = Task(client, 0, 0, train=Train(lr=0.1, batch_size=16))
        plan = place.client(task, {}).plan(purpose="warm up")
        own[client] = by_hand(place, begin(place).tensors, plan)
    stage = 1
    for round in range(2):
        for client in range(3):
            task = Task(client, round, stage, train=Train(lr=0.1, batch_size=16, steps=2))
            start = own[client] if handed is None else handed
            own[client] = handed = by_hand(place, start, place.client(task, {}).plan())
            stage += 1
        stage = 0
    for client, tensors in models(result).items():
        close(tensors, own[client])


def by_hand(place, tensors, plan):
    from tests.methods.tiny import gradient

    for (chosen,) in plan.steps:
        batch = place.images.batch(chosen)
        slopes = gradient(place, tensors, batch.x, batch.y)
        tensors = {name: tensor - 0.1 * slopes[name] for name, tensor in tensors.items()}
    return tensors


def station(place, good: bool, **settings):
    """One station in round 3, with a predecessor's model, for who was good once or never."""
    from fedloom.types import Report

    teacher = place.network.initial(9)
    task = Task(0, 3, 1, train=Train(lr=0.1, epochs=3), inbox={2: Report(teacher)})
    client = place.client(task, {"own": place.network.initial(5), "good": good})
    fits, _ = drive(place.method, client, task, [0.5])
    return fits, teacher, client


def test_never_good_takes_over_and_good_keeps():
    place = world("metafed", method=ONCE, **VALID)
    ((fit,), teacher, _) = station(place, good=False)
    same(fit.tensors, teacher)
    assert "teacher" not in fit.fixed
    ((fit,), teacher, _) = station(place, good=True)
    same(fit.tensors, place.network.initial(5))
    same(dict(fit.fixed["teacher"]), teacher)
    assert float(fit.fixed["strength"]) == 1


def test_below_zero_nobody_ever_copies(tmp_path, monkeypatch):
    """Threshold 0: whoever gets one answer right keeps its own model for good."""
    copied, plain = [], World.client

    def noted(self, task, state):
        if task.job == "work" and task.inbox:
            copied.append(not state["good"])
        return plain(self, task, state)

    monkeypatch.setattr(World, "client", noted)
    run("metafed", tmp_path, method={"warm_up": 5, "threshold": 0.0}, **VALID)
    assert copied
    assert not any(copied)


def test_once_good_always_good():
    place = world("metafed", method=ONCE | {"threshold": 0.6}, **VALID)
    _, _, client = station(place, good=True)  # its accuracy is 0.5 now
    assert client.state["good"] is True
    _, _, client = station(place, good=False)
    assert client.state["good"] is False


def test_the_reference_copies_before_every_epoch():
    """So only the last epoch's batches count."""
    for mode, epochs in (("paper", 3), ("reference", 1)):
        place = world("metafed", method=ONCE | {"mode": mode}, **VALID)
        ((fit,), _, _) = station(place, good=False)
        assert len(fit.plan.steps) == epochs * fit.plan.epoch
        last = place.client(Task(0, 3, 1, train=Train(lr=0.1, epochs=3)), {}).plan().steps[-fit.plan.epoch :]
        assert all(
            torch.equal(one[0], two[0]) for one, two in zip(fit.plan.steps[-fit.plan.epoch :], last, strict=True)
        )
        ((fit,), _, _) = station(place, good=True)
        assert len(fit.plan.steps) == 3 * fit.plan.epoch


def test_the_order_of_the_circle_matters(tmp_path):
    """Client 2 ends with what the others gave it; the first one never hears of the last in the first round."""
    study = VALID | {"run": {"rounds": 1}}
    result = models(run("metafed", tmp_path, method=ONCE | {"threshold": 1.1}, **study))
    assert far(result[0], result[2]) > 1e-4


def test_the_last_who_got_through_teaches(tmp_path, monkeypatch):
    """The last of the circle fails in the second round: its model of the first is nobody's teacher any more."""
    work, evaluation, shown = MetaFed.work, MetaFed.evaluation, []

    def failing(self, client, task):
        if (task.client, task.round) == (2, 1):
            raise RuntimeError("broken device")
        return (yield from work(self, client, task))

    def seen(self, server):
        shown.append(evaluation(self, server))
        return shown[-1]

    monkeypatch.setattr(MetaFed, "work", failing)
    monkeypatch.setattr(MetaFed, "evaluation", seen)
    result = run("metafed", tmp_path, method=ONCE, **VALID, run={"rounds": 2}, evaluate={"every": 2})
    own = models(result)
    same(shown[-1], own[1])
    far(shown[-1], own[2])


def test_alone_one_is_ones_own_teacher(tmp_path):
    alone = {"fleet": {"clients": 1}, "partition": {"name": "iid"}, "run": {"rounds": 1}, "train": {"steps": 2}}
    result = run("metafed", tmp_path, method={"warm_up": 0, "threshold": 0.0}, **VALID | alone)
    place = world("metafed", **VALID | alone)
    close(models(result)[0], descend(place, begin(place).tensors, 0, 0)[0])
    task = Task(0, 2, 0, train=Train(lr=0.1, steps=2))
    client = place.client(task, {"own": place.network.initial(5), "good": True})
    (fit,), _ = drive(place.method, client, task, [0.5])
    same(dict(fit.fixed["teacher"]), place.network.initial(5))


@pytest.mark.parametrize(("after", "personal"), [(0.9, True), (0.6, False), (0.3, False)])
def test_the_reference_may_refuse_to_be_personal(after, personal):
    place = world("metafed", method=ONCE | {"mode": "reference"}, **VALID)
    task = Task(0, 3, 4, job="evaluate", train=Train(lr=0.1), tensors={"model": place.network.initial(9)})
    client = place.client(task, {"own": place.network.initial(5), "good": True})

    class Used:
        def work(self, client, task):
            return place.method.final(client, task)

    _, used = drive(Used(), client, task, [0.7, 0.6, after])
    assert (far(used, place.network.initial(5)) > 1e-6) == personal
