"""The bar of a run on a terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from fedloom.report import progress
from fedloom.runs.start import run


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal of 80 columns is sent."""
    sent = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=sent, force_terminal=True, width=80))
    return sent


@pytest.mark.parametrize("done", [0, 20])
def test_a_run_that_goes_on_begins_where_it_stopped(terminal, done):
    with progress.watching("fedavg", 40, done) as watch:
        begun = terminal.getvalue()
        watch({"round": done + 1, "train_loss": 0.5})
    assert f"{done}/40" in begun
    assert f"{done + 1}/40" in terminal.getvalue()
    assert ("0/40" in terminal.getvalue().replace("20/40", "")) == (done == 0)


def test_the_last_accuracy_stays_until_the_next(terminal):
    with progress.watching("fedavg", 3) as watch:
        watch({"round": 1, "local_accuracy": 0.25, "failures": 2})
        watch({"round": 2, "local_accuracy": None, "failures": 0})
    last = terminal.getvalue().rpartition("2/3")[2]
    assert "local 25.0%" in last
    assert "failed" not in last


def test_within_a_round_the_clients_are_counted(terminal):
    with progress.watching("fedavg", 3) as watch:
        watch.heard(4, "work")
        watch.heard(4, "work")
        watch.refresh()
        assert "2/4 clients" in terminal.getvalue()
        watch.heard(4, "evaluate")
        watch.refresh()
        assert "evaluate 1" in terminal.getvalue()
        for _ in range(5):
            watch.heard(4, "work")
        watch.refresh()
        assert "5 tasks" in terminal.getvalue()
        watch({"round": 1, "local_accuracy": 0.25})
        watch.refresh()
    last = terminal.getvalue().rpartition("1/3")[2]
    assert "tasks" not in last


def test_eighty_columns_hold_times_and_numbers(terminal):
    with progress.watching("examples.mymethod:MyMethod", 100, 98) as watch:
        watch({"round": 99, "global_accuracy": 1.0, "local_accuracy": 1.0, "train_loss": 10.0, "failures": 12})
        for _ in range(100):
            watch.heard(100, "work")
        watch.refresh()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).rpartition("examples")[2].splitlines()
    assert "0:00:00 left" in lines[0]
    assert "99/100 100/100 clients" in lines[0]
    assert "global 100.0%  local 100.0%  loss 10.000  failed 12" in lines[1]
    assert "…" not in lines[0].replace("MyMe…", "").partition("99/100")[2]


def test_a_run_tells_of_every_task(tmp_path):
    told = []

    class Watch:
        def __call__(self, row):
            told.append(row["round"])

        def heard(self, asked, job):
            told.append((asked, job))

    run("fedavg", model="mlp", clients=3, rounds=1, out=tmp_path, engine="local", watch=Watch(),
        set={"data.limit": 60, "select.fraction": 0.6})  # fmt: skip
    assert told == [(2, "work")] * 2 + [(2, "evaluate")] * 3 + [1]
