"""The bar of a run on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedloom.report import progress


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal of 100 columns is sent."""
    sent = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=sent, force_terminal=True, width=100))
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
