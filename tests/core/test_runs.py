"""A run may be stopped anywhere; what comes out in the end is what would have come out anyway."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch

from fedloom.engine.local import Local
from fedloom.errors import Interrupted, RunError
from fedloom.runs import store as store_module
from fedloom.runs.result import Result
from fedloom.runs.start import resume
from fedloom.runs.store import Store
from fedloom.runs.world import World
from fedloom.types import Failure, Report
from tests.contract.study import final, rows, run

ROUNDS = 10
# Control variates in the server's memory and with the clients, norm layers of their own: all there is to lose.
STUDY = {
    "share": {"name": "fedbn"}, "fleet": {"clients": 4, "name": "uniform"}, "select": {"fraction": 0.5},
    "data": {"limit": 200}, "run": {"rounds": ROUNDS, "checkpoint_every": 1}, "evaluate": {"every": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run("scaffold", tmp_path_factory.mktemp("whole"), **STUDY)


def equal(one: Result, two: Result):
    first, second = final(one), final(two)
    assert first.keys() == second.keys()
    different = [
        name for name, tensor in first.items() if not torch.equal(tensor.nan_to_num(-1), second[name].nan_to_num(-1))
    ]
    assert different == []
    assert rows(one) == rows(two)
    assert ledger(one) == ledger(two)


def ledger(result: Result):
    kept = ("client", "round", "stage", "job", "upload_bytes", "download_bytes", "macs", "failed")
    return [[row[name] for name in kept] for row in Store(result.folder).rows("clients")]


def command(*words: object, **options) -> subprocess.Popen:
    line = [sys.executable, "-m", "fedloom.cli", *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def begin(folder: Path, engine: str = "local") -> subprocess.Popen:
    """The command line's version of the same study."""
    sections = json.loads((folder.parent / "study.json").read_text())
    settings = [
        word
        for section, values in sections.items()
        for key, value in values.items()
        if value is not None and value != "" and (section, key) not in (("run", "out"), ("engine", "name"))
        for word in ("--set", f"{section}.{key}={json.dumps(value)}")
    ]
    return command("run", *settings, "--out", folder, "--engine", engine)


def first_checkpoint(process: subprocess.Popen, folder: Path) -> Path:
    """Wait until there is something to lose."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        for path in folder.glob("*/checkpoint.json"):
            return path.parent
        time.sleep(0.005)
    raise AssertionError(process.communicate())


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


def kill_and_go_on(whole: Result, folder: Path, times: int, engine: str) -> Result:
    """Kill the run `times` times, each a random while after it went on; then let it finish."""
    chance = random.Random(times)
    (folder.parent / "study.json").write_text((whole.folder / "study.json").read_text())
    process = begin(folder, engine)
    run_folder = first_checkpoint(process, folder)
    kills = 0
    while kills < times:
        manifest = (run_folder / "checkpoint.json").read_text()
        while process.poll() is None and kills and (run_folder / "checkpoint.json").read_text() == manifest:
            time.sleep(0.005)  # starting up again takes much longer than the rounds; kill among the rounds
        time.sleep(chance.random() * 0.04)
        process.kill()
        process.communicate()
        kills += 1
        process = command("resume", run_folder)
    finish(process)
    return Result(Store(run_folder), json.loads((run_folder / "summary.json").read_text()))


def test_killed_three_times_and_still_the_same(whole, tmp_path):
    equal(whole, kill_and_go_on(whole, tmp_path / "out", 3, "local"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "processes"])
def test_killed_twenty_times_and_still_the_same(tmp_path, engine):
    study = {**STUDY, "run": {"rounds": 60, "checkpoint_every": 1}}
    whole = run("scaffold", tmp_path / "whole", **study)
    equal(whole, kill_and_go_on(whole, tmp_path / "out", 20, engine))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_leave_a_checkpoint_and_say_how_to_go_on(whole, tmp_path, number, code):
    (tmp_path / "study.json").write_text((whole.folder / "study.json").read_text())
    process = begin(tmp_path / "out", "processes")
    folder = first_checkpoint(process, tmp_path / "out")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert f"fedloom resume {folder}" in err
    assert not (folder / "summary.json").exists()
    done = json.loads((folder / "checkpoint.json").read_text())["round"]
    assert pandas.read_parquet(folder / "metrics.parquet")["round"].tolist() == list(range(1, done + 1))
    equal(whole, resume(folder))


class Stop:
    """Ctrl-C, once, at a place counted in calls."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def stop_in_work(monkeypatch, stop):
    plain = Local.run

    def counted(self, tasks):
        for outcome in plain(self, tasks):
            if outcome.job == "work":
                stop()
            yield outcome

    monkeypatch.setattr(Local, "run", counted)


def stop_in_evaluation(monkeypatch, stop):
    plain = Local.run

    def counted(self, tasks):
        for outcome in plain(self, tasks):
            if outcome.job == "evaluate":
                stop()
            yield outcome

    monkeypatch.setattr(Local, "run", counted)


def stop_before(name):
    def set_up(monkeypatch, stop):
        plain = getattr(Store, name)

        def counted(self, *words):
            stop()
            return plain(self, *words)

        monkeypatch.setattr(Store, name, counted)

    return set_up


def stop_after(name):
    def set_up(monkeypatch, stop):
        plain = getattr(Store, name)

        def counted(self, *words):
            plain(self, *words)
            stop()

        monkeypatch.setattr(Store, name, counted)

    return set_up


@pytest.mark.parametrize(("place", "at"), [
    (stop_in_work, 1), (stop_in_work, 2), (stop_in_work, 6), (stop_in_evaluation, 1), (stop_in_evaluation, 7),
    (stop_before("append"), 1), (stop_before("append"), 4), (stop_after("append"), 5), (stop_after("append"), 6),
    (stop_before("checkpoint"), 3), (stop_after("checkpoint"), 3), (stop_before("write"), 2), (stop_after("write"), 2),
])  # fmt: skip
def test_an_interrupt_anywhere_in_a_round_loses_and_doubles_nothing(whole, tmp_path, monkeypatch, place, at):
    with monkeypatch.context() as patch:
        place(patch, Stop(at))
        study = {**STUDY, "run": {"rounds": ROUNDS, "checkpoint_every": 3}}
        with pytest.raises(Interrupted):
            run("scaffold", tmp_path, **study)
    (folder,) = tmp_path.iterdir()
    equal(whole, resume(folder))


def test_failures_are_counted_once_when_their_round_is_done_again(tmp_path, monkeypatch):
    plain = World.jobs.func

    def faulty(self):
        jobs = dict(plain(self))

        def harmed(client, task):
            if client.id == 0:
                raise RuntimeError("broken device")
            return (yield from jobs["work"](client, task))

        return {**jobs, "work": harmed}

    monkeypatch.setattr(World, "jobs", property(faulty))
    study = {**STUDY, "select": {"fraction": 1.0}, "run": {"rounds": 3, "checkpoint_every": 1}}
    whole = run("fedavg", tmp_path / "whole", **study)
    with monkeypatch.context() as patch:
        stop_in_work(patch, Stop(7))
        with pytest.raises(Interrupted) as stopped:
            run("fedavg", tmp_path / "stopped", **study)
    equal(whole, resume(stopped.value.folder))
    assert whole.summary["failures"] == 3


def test_a_diverged_client_does_not_spoil_the_metrics(tmp_path, monkeypatch):
    plain = World.jobs.func

    def diverged(self):
        jobs = dict(plain(self))

        def harmed(client, task):
            report = yield from jobs["work"](client, task)
            numbers = {**report.numbers, "loss": float("nan")} if client.id == 0 else report.numbers
            return Report(report.tensors, report.weight, numbers)

        return {**jobs, "work": harmed}

    monkeypatch.setattr(World, "jobs", property(diverged))
    result = run("fedavg", tmp_path, **{**STUDY, "select": {"fraction": 1.0}, "run": {"rounds": 1}})
    (row,) = rows(result)
    assert row["train_loss"] == row["train_loss"] > 0
    text = (result.folder / "metrics.jsonl").read_text() + (result.folder / "clients.jsonl").read_text()
    assert "NaN" not in text, "not JSON: only Python reads it"


@pytest.mark.parametrize("engine", ["local", "processes"])
def test_dropout_is_drawn_as_in_the_uninterrupted_run(tmp_path, monkeypatch, engine):
    """Masks belong to their round and client, not to the process: a resumed run neither repeats nor skips any."""
    (tmp_path / "droppednet.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    study = {"model": {"name": "droppednet:Net"}, "run": {"rounds": 5}, "data": {"limit": 200}}
    uninterrupted = run("fedavg", tmp_path / "whole", **study)

    def stop(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        run("fedavg", tmp_path / "stopped", engine, watch=stop, **study)
    torch.rand(3)  # what this process draws meanwhile is nobody's mask
    equal(uninterrupted, resume(stopped.value.folder))


def test_float64_runs(tmp_path):
    result = run("fedavg", tmp_path, **{**STUDY, "engine": {"precision": "float64"}, "run": {"rounds": 1}})
    assert result.summary["failures"] == 0


def test_tables_are_made_once_whatever_the_number_of_checkpoints(tmp_path, monkeypatch):
    made, plain = [], store_module.write_parquet
    monkeypatch.setattr(store_module, "write_parquet", lambda *given: (made.append(given[1]), plain(*given)))
    result = run("fedavg", tmp_path, **STUDY | {"run": {"rounds": 4, "checkpoint_every": 1}})
    assert made == ["metrics", "clients"]
    found = [pandas.read_parquet(result.folder / f"{name}.parquet") for name in made]
    assert [len(table) for table in found] == [len(result.rows(name)) for name in made]


def test_a_run_that_fails_leaves_its_tables(tmp_path, monkeypatch):
    plain = Local.run

    def failing(self, tasks):
        for outcome in plain(self, tasks):
            bad = Failure(outcome.client, outcome.round, 0, "raised", "no")
            yield outcome if outcome.round < 2 else replace(outcome, report=None, failure=bad)

    monkeypatch.setattr(Local, "run", failing)
    with pytest.raises(RunError, match="quorum"):
        run("fedavg", tmp_path, **STUDY)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert pandas.read_parquet(folder / "metrics.parquet")["round"].tolist() == [1, 2]


def test_a_half_written_line_is_not_a_row(whole, tmp_path):
    store = Store(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"rou')
    assert store.rows("metrics") == [{"round": 1}]


def test_the_folder_is_complete(whole):
    names = {path.name for path in whole.folder.iterdir()}
    assert names >= {"study.json", "environment.json", "split.npz", "metrics.jsonl", "metrics.parquet", "clients.jsonl",
                     "clients.parquet", "checkpoint.json", "checkpoints", "summary.json"}  # fmt: skip
    assert not [name for name in names if "partial" in name]
    manifest = json.loads((whole.folder / "checkpoint.json").read_text())
    named = {*manifest["files"].values(), *manifest["clients"].values()}
    assert {path.name for path in (whole.folder / "checkpoints").iterdir()} == named
    assert whole.metrics["round"].tolist() == list(range(1, ROUNDS + 1))
    assert whole.summary["upload_bytes"] == whole.metrics["upload_bytes"].sum() > 0


def test_a_model_beside_the_user_can_be_named_on_the_command_line(tmp_path):
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n\n\ndef Net(channels, classes, size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))\n"
    )
    script = Path(sys.executable).with_name("fedloom")
    line = [
        script,
        "run",
        "--model",
        "mynet:Net",
        "--rounds",
        "1",
        "--clients",
        "2",
        "--engine",
        "local",
        "--set",
        "data.limit=50",
    ]
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
