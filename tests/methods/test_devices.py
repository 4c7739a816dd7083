"""Unequal devices: the virtual clock, deadlines, chance, weak devices, and a round that too few survive."""

from __future__ import annotations

import json
import logging
import sys

import numpy as np
import pytest
import torch

from fedloom import cli
from fedloom.errors import InputError
from fedloom.runs.start import resume
from tests.contract.study import final, rows
from tests.methods.tiny import run, same, sections_of, world

IDLE = "tests.methods.tiny:Idle"
QUICK = {"partition": {"name": "iid"}, "evaluate": {"every": 20}}


def work(result):
    return [entry for entry in result.rows("clients") if entry["job"] == "work"]


def test_virtual_clock_by_hand(tmp_path):
    fleet = {"clients": 1, "speed": 1e6, "down": 2e3, "up": 1e3}
    result = run("fedavg", tmp_path, fleet=fleet, partition={"name": "iid"}, train={"epochs": 2}, run={"rounds": 2})
    macs = 3 * (64 * 8 + 8 * 10) * 120 * 2  # forward and twice as much backward, samples, epochs
    for entry, row in zip(work(result), rows(result), strict=True):
        assert entry["macs"] == row["train_macs"] == macs
        assert entry["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
        assert entry["upload_bytes"] > 8 * entry["parameters"], "float64 and a header"
        seconds = macs / 1e6 + entry["download_bytes"] / 2e3 + entry["upload_bytes"] / 1e3
        assert entry["virtual_seconds"] == pytest.approx(seconds)
    metrics = result.rows("metrics")
    assert [row["virtual_seconds"] for row in metrics] == [entry["virtual_seconds"] for entry in work(result)]
    assert result.summary["virtual_seconds"] == pytest.approx(sum(row["virtual_seconds"] for row in metrics))
    assert result.summary["train_macs"] == 2 * macs


def test_a_round_takes_as_long_as_its_slowest_client(tmp_path):
    result = run("fedavg", tmp_path, fleet={"name": "mixed", "clients": 4, "spread": 50.0})
    for number, row in enumerate(result.rows("metrics")):
        seconds = [entry["virtual_seconds"] for entry in work(result) if entry["round"] == number]
        assert len(set(seconds)) == 4
        assert row["virtual_seconds"] == max(seconds)


def test_a_deadline_makes_stragglers_fail_and_caps_the_round(tmp_path):
    fleet = {"name": "mixed", "clients": 5, "spread": 50.0}
    times = {entry["client"]: entry["virtual_seconds"] for entry in work(run("fedavg", tmp_path, fleet=fleet))}
    *_, third, fourth, _ = sorted(times.values())
    deadline = (third + fourth) / 2
    result = run("fedavg", tmp_path, fleet={**fleet, "deadline": deadline})
    late = {entry["client"] for entry in work(result) if entry["failed"] == "late"}
    assert late == {client for client, seconds in times.items() if seconds > deadline}
    assert [row["virtual_seconds"] for row in result.rows("metrics")] == [deadline] * 2
    assert [row["failures"] for row in rows(result)] == [2, 2]
    assert result.summary["failures"] == 4
    reasons = {entry["reason"] for entry in work(result) if entry["failed"]}
    assert all("deadline" in reason and "virtual seconds" in reason for reason in reasons)


def test_what_is_late_is_not_merged(tmp_path):
    """One of two is always late: the server follows the other alone."""
    fleet = {"name": "mixed", "clients": 2, "spread": 50.0}
    times = {e["client"]: e["virtual_seconds"] for e in work(run("fedavg", tmp_path, fleet=fleet, run={"rounds": 1}))}
    result = run("fedavg", tmp_path, fleet={**fleet, "deadline": sum(times.values()) / 2}, run={"rounds": 1})
    (fast,) = [entry for entry in work(result) if not entry["failed"]]
    assert fast["client"] == min(times, key=times.get)
    assert rows(result)[0]["train_loss"] == fast["loss"]


def test_dropout_is_as_frequent_as_said(tmp_path):
    fleet = {"clients": 50, "dropout": 0.2}
    result = run(IDLE, tmp_path, fleet=fleet, run={"rounds": 20}, **QUICK)
    found = work(result)
    assert len(found) == 50 * 20
    dropped = np.array([entry["failed"] == "dropped" for entry in found])
    assert abs(dropped.mean() - 0.2) < 4 * np.sqrt(0.2 * 0.8 / 1000)
    by_round, by_client = (dropped.reshape(20, 50).sum(axis) for axis in (1, 0))
    assert len(set(by_round.tolist())) > 1
    assert by_client.max() < 12, "a fresh draw each round, not always the same ones"
    assert result.summary["failures"] == dropped.sum()


def test_who_drops_out_was_sent_the_task_and_stands_in_its_place_on_every_engine(tmp_path):
    fleet = {"clients": 12, "dropout": 0.3}
    one, two = (
        run("fedavg", tmp_path, fleet=fleet, run={"rounds": 2}, engine={"name": name, "workers": 2, "quorum": 0.0})
        for name in ("local", "processes")
    )
    for result in (one, two):
        found = work(result)
        assert [entry["client"] for entry in found] == [*range(12)] * 2
        sent = {entry["failed"]: entry["download_bytes"] for entry in found if entry["client"] < 10}
        assert sent.keys() == {"", "dropped"}
        assert sent[""] == sent["dropped"]  # numbers of one digit: tasks are equally long
    told = ("client", "round", "job", "failed", "download_bytes", "upload_bytes", "virtual_seconds")
    ledgers = [[[entry[name] for name in told] for entry in result.rows("clients")] for result in (one, two)]
    assert ledgers[0] == ledgers[1]


def test_availability_is_as_frequent_as_said(tmp_path):
    fleet = {"clients": 50, "availability": 0.7}
    result = run(IDLE, tmp_path, fleet=fleet, run={"rounds": 20}, **QUICK)
    asked = len(work(result))
    assert abs(asked / 1000 - 0.7) < 4 * np.sqrt(0.7 * 0.3 / 1000)
    assert result.summary["failures"] == 0, "who is not available was never asked"
    assert [row["clients"] for row in rows(result)] != [35] * 20


def test_a_round_waits_for_the_first_who_comes(tmp_path):
    fleet = {"clients": 4, "availability": 0.01}
    result = run(IDLE, tmp_path, fleet=fleet, run={"rounds": 30}, **QUICK)
    assert [row["clients"] for row in rows(result)].count(1) >= 28
    assert {entry["client"] for entry in work(result)} == set(range(4)), "not always the same one"


def test_weak_devices_are_refused_unless_told(tmp_path):
    with pytest.raises(InputError, match=r"fedavg trains whole models, but 4 of 5 devices.*exclude.*ignore"):
        run("fedavg", tmp_path, fleet={"name": "high", "clients": 5})
    assert list(tmp_path.iterdir()) == []


def test_weak_devices_excluded(tmp_path):
    result = run("fedavg", tmp_path, fleet={"name": "high", "clients": 5, "weak": "exclude"})
    assert {entry["client"] for entry in work(result)} == {0}
    evaluated = {entry["client"] for entry in result.rows("clients") if entry["job"] == "evaluate"}
    assert evaluated == set(range(5)), "they are users all the same"
    with pytest.raises(InputError, match="no device that can train the whole model"):
        run("fedavg", tmp_path, fleet={"name": "low", "clients": 5, "weak": "exclude"})


def test_weak_devices_ignored(tmp_path):
    result = run("fedavg", tmp_path, fleet={"name": "high", "clients": 5, "weak": "ignore"})
    assert {entry["client"] for entry in work(result)} == set(range(5))
    assert len({entry["parameters"] for entry in work(result)}) == 1


class HardlyCut(torch.nn.Module):
    """Most of it is behind a view that says how many units there are."""

    def __init__(self, channels, classes, size):
        super().__init__()
        self.large, self.small = torch.nn.Linear(channels * size * size, 64), torch.nn.Linear(16, 4)
        self.last = torch.nn.Linear(4, classes)

    def forward(self, x):
        hidden = torch.relu(self.large(x.flatten(1))).view(-1, 4, 16)
        return self.last(torch.relu(self.small(hidden.sum(1))))


@pytest.mark.parametrize(("model", "told"), [(f"{__name__}:HardlyCut", True), ("mlp", False)])
def test_a_weak_device_that_trains_most_of_a_model_is_named(model, told, caplog):
    with caplog.at_level(logging.WARNING, "fedloom.study"):
        world("heterofl", fleet={"name": "high", "clients": 5}, model={"name": model, "hidden": None}).check()
    assert ("a device of capacity 0.0625 trains 98% of the model's parameters" in caplog.text) == told


def test_weak_devices_are_fine_under_a_cut(tmp_path):
    result = run("fedavg", tmp_path, fleet={"name": "high", "clients": 5}, cut={"name": "prefix"})
    sent = [entry["parameters"] for entry in work(result)[:5]]
    assert sent == [64 * k + k + 10 * k + 10 for k in (8, 4, 2, 1, 1)]


def test_capacities_of_a_mixed_fleet_must_be_some():
    for wrong in ([], [0.0], [1.5]):
        with pytest.raises(InputError, match="capacities"):
            _ = world(fleet={"name": "mixed", "clients": 3, "capacities": wrong}).columns


@pytest.fixture
def command(monkeypatch, capsys):
    def go(*words):
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out = capsys.readouterr()
        return end.value.code, out.out, out.err

    return go


def test_a_lost_quorum_ends_with_a_sentence_and_can_be_resumed(command, monkeypatch, tmp_path):
    changes = {"run": {"rounds": 4, "seed": 1}, "fleet": {"clients": 4}}
    words = [
        word
        for section, values in sections_of(IDLE, tmp_path / "broken", **changes).items()
        for key, value in values.items()
        for word in ("--set", f"{section}.{key}={json.dumps(value)}")
    ]
    monkeypatch.setenv("BROKEN_SINCE_ROUND", "2")
    code, out, err = command("run", *words, "--json")
    assert (code, out) == (1, "")
    *_, sentence = err.splitlines()
    assert sentence.startswith("fedloom: round 3: 0 of 4 clients reported, the quorum is 50%; last failure: client 3")
    assert "no power" in sentence
    assert "Traceback" not in err
    monkeypatch.delenv("BROKEN_SINCE_ROUND")
    (folder,) = (tmp_path / "broken").iterdir()
    code, out, err = command("resume", folder, "--json")
    assert code == 0, err
    whole = run(IDLE, tmp_path, **changes)
    assert json.loads(out.splitlines()[-1])["rounds"] == 4
    again = resume(folder)
    assert rows(again) == rows(whole)
    same({n: t.nan_to_num(-1) for n, t in final(again).items() if "seconds" not in n},
         {n: t.nan_to_num(-1) for n, t in final(whole).items() if "seconds" not in n})  # fmt: skip
