"""How clients train: schedules, epochs or steps, optimisers."""

from __future__ import annotations

import json
import sys
from math import cos, pi

import pytest
import torch

from fedloom import cli
from fedloom.engine.local import Local
from tests.methods.tiny import begin, close, descend, far, run, server_of, world

LR = 0.4


@pytest.fixture
def rates(monkeypatch):
    """The learning rate of every task, by round."""
    seen, plain = {}, Local.run

    def record(self, tasks):
        def noted():
            for task in tasks:
                if task.job == "work":
                    seen.setdefault(task.round, set()).add(task.train.lr)
                yield task

        return plain(self, noted())

    monkeypatch.setattr(Local, "run", record)
    return seen


@pytest.mark.parametrize(("schedule", "expected"), [
    ({}, [LR] * 4),
    ({"schedule": "constant", "decay": 0.5}, [LR] * 4),
    ({"schedule": "step", "milestones": [1, 3], "decay": 0.5}, [LR, LR / 2, LR / 2, LR / 4]),
    ({"schedule": "exponential", "decay": 0.5}, [LR, LR / 2, LR / 4, LR / 8]),
    ({"schedule": "cosine", "decay": 0.0}, [LR * (1 + cos(pi * t / 4)) / 2 for t in range(4)]),
    ({"schedule": "cosine", "decay": 1.0}, [LR] * 4),
])  # fmt: skip
def test_schedules_reach_the_clients(schedule, expected, rates, tmp_path):
    run("fedavg", tmp_path, train={"lr": LR, **schedule}, run={"rounds": 4}, data={"limit": 30})
    assert [len(rates[round]) for round in range(4)] == [1] * 4
    assert [min(rates[round]) for round in range(4)] == pytest.approx(expected, rel=1e-12)


def test_the_rate_of_the_round_is_the_one_used(tmp_path):
    once = run("fedavg", tmp_path, run={"rounds": 1})
    then_none = {"schedule": "step", "milestones": [1], "decay": 0.0}
    close(server_of(once), server_of(run("fedavg", tmp_path, train=then_none, run={"rounds": 3})))


def test_scaffold_survives_a_rate_of_zero(tmp_path):
    """The schedule allows it, and c_i divides by the rate."""
    result = run("scaffold", tmp_path, train={"schedule": "step", "milestones": [1], "decay": 0.0})
    assert result.summary["failures"] == 0


@pytest.mark.parametrize(
    ("train", "steps"), [({"epochs": 1}, 3), ({"epochs": 2}, 6), ({"steps": 5}, 5), ({"epochs": 2, "steps": 1}, 1)]
)
def test_epochs_or_steps(train, steps, tmp_path):
    study = {"partition": {"name": "iid"}, "train": train, "run": {"rounds": 1}}
    work = [entry for entry in run("fedavg", tmp_path, **study).rows("clients") if entry["job"] == "work"]
    assert {entry["steps"] for entry in work} == {steps}
    place = world(**study)
    ended = [descend(place, begin(place).tensors, client, 0) for client in range(3)]
    assert [count for _, count in ended] == [steps] * 3
    mean = {name: sum(end[name] for end, _ in ended) / 3 for name in ended[0][0]}
    close(server_of(run("fedavg", tmp_path, **study)), mean)


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out = capsys.readouterr()
    assert end.value.code == 0, out.err
    return json.loads(out.out.splitlines()[-1])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_optimisers_from_the_command_line(optimizer, monkeypatch, capsys, tmp_path):
    settings = [f"train.optimizer={optimizer}", "train.weight_decay=0.01", "train.lr=0.01", "data.limit=200",
                "engine.precision=float64", "train.batch_size=8", "train.epochs=2"]  # fmt: skip
    words = ["run", "fedavg", "--model", "mlp", "--clients", 2, "--rounds", 4, "--engine", "local", "--out", tmp_path]
    summary = command(monkeypatch, capsys, *words, *(w for s in settings for w in ("--set", s)), "--json")
    assert summary["global_accuracy"] > (0.3 if optimizer == "sgd" else 0.6)
    assert summary["failures"] == 0


def test_one_adam_step_is_torchs(tmp_path):
    """Through a whole run: one client, one step over everything."""
    study = {"fleet": {"clients": 1}, "partition": {"name": "iid"}, "run": {"rounds": 1}}
    for name, make in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        train = {"optimizer": name, "weight_decay": 0.1, "lr": 0.01, "steps": 1}
        place = world(train=train | {"lr": 1.0}, **study)
        first = begin(place).tensors
        stepped, _ = descend(place, first, 0, 0)  # with lr 1: first - gradient
        leaves = {n: t.clone().requires_grad_() for n, t in first.items()}
        for n, leaf in leaves.items():
            leaf.grad = first[n] - stepped[n]
        make(list(leaves.values()), lr=0.01, weight_decay=0.1).step()
        found = server_of(run("fedavg", tmp_path, train=train, **study))
        assert far(found, {n: leaf.detach() for n, leaf in leaves.items()}) < 1e-9
