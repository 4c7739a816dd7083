"""Grids of runs: comparisons and published tables, resumable cell by cell."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedloom.engine.local import Local
from fedloom.report import grids
from fedloom.report.statistics import verdict
from fedloom.runs.store import Store
from tests.cli.conftest import SMALL

GRID = ["compare", "fedavg", "fedprox", *SMALL, "--rounds", 3, "--seeds", 2, "--out", "out", "--json"]
TIMES = ("seconds_per_round", "seconds")


def numbers(content):
    """What no clock measured."""
    return {method: {k: v for k, v in found.items() if k not in TIMES} for method, found in content["methods"].items()}


@pytest.fixture
def counted(monkeypatch):
    """The tasks that were really run: (method, seed, round, client)."""
    seen, plain = [], Local.run

    def record(self, tasks):
        for outcome in plain(self, tasks):
            if outcome.job == "work":
                study = self.place.study
                seen.append((study.method.name, study.run.seed, outcome.round, outcome.client))
            yield outcome

    monkeypatch.setattr(Local, "run", record)
    return seen


def test_compare_shows_and_leaves_its_numbers(command, tmp_path, counted):
    ended = command(*GRID)
    assert ended.code == 0, ended.err
    content = ended.last
    assert content["seeds"] == [0, 1]
    assert list(content["methods"]) == ["fedavg", "fedprox"]
    assert all(len(found["global_accuracy"]) == 2 for found in content["methods"].values())
    assert json.loads((tmp_path / "out" / "table.json").read_text()) == content
    assert "| fedprox |" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {
        "fedavg-0", "fedavg-1", "fedprox-0", "fedprox-1",
    }  # fmt: skip
    first = [json.loads((tmp_path / "out" / f"fedavg-{seed}" / "summary.json").read_text()) for seed in range(2)]
    assert content["methods"]["fedavg"]["global_accuracy"] == [summary["global_accuracy"] for summary in first]
    done = len(counted)
    assert done == 2 * 2 * 3 * 2
    assert numbers(command(*GRID).last) == numbers(content)
    assert len(counted) == done, "a finished grid is only shown"


def test_a_list_of_models_is_compared_by_methods_that_take_one(command):
    """What all cells share is no study by itself: without a method that is FedAvg, which takes one model."""
    several = ["--set", 'model.name=["mlp", "lenet5"]', "--set", "data.public=20", "--set", "data.limit=80"]
    ended = command("compare", "dsfl", "local", *several, "--clients", 2, "--rounds", 1, "--engine", "local", "--json")
    assert ended.code == 0, ended.err
    assert list(ended.last["methods"]) == ["dsfl", "local"]


@pytest.mark.parametrize("at", [1, 8])
def test_an_interrupted_grid_goes_on(command, tmp_path, counted, monkeypatch, at):
    """Ctrl-C in the middle of a cell, twice; nothing that was checkpointed is run twice."""
    whole = command(*[word if word != "out" else "whole" for word in GRID]).last
    counted.clear()
    plain, left = Local.run, [at]

    def stop(self, tasks):
        for number, outcome in enumerate(plain(self, tasks)):
            if outcome.job == "work" and number == 1:
                left[0] -= 1
                if left[0] == -1:
                    os.kill(os.getpid(), signal.SIGINT)
            yield outcome

    monkeypatch.setattr(Local, "run", stop)
    ended = command(*GRID)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()[-1]) > 10, "it says how to go on"
    broken = len(counted)
    content = command(*GRID).last
    assert numbers(content) == numbers(whole)
    repeated = len(counted) - len(set(counted))
    assert broken >= 1
    assert repeated <= 2, "at most the round that was under way"


def test_an_interrupt_between_cells(command, tmp_path, counted, monkeypatch):
    whole = command(*[word if word != "out" else "whole" for word in GRID]).last
    counted.clear()
    plain = grids.announced

    def stop(cell, number, count):
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return plain(cell, number, count)

    monkeypatch.setattr(grids, "announced", stop)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    ended = command(*GRID)
    signal.signal(signal.SIGINT, before)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    monkeypatch.setattr(grids, "announced", plain)
    assert numbers(command(*GRID).last) == numbers(whole)
    assert len(counted) == len(set(counted)) == 24


@pytest.mark.slow
def test_a_real_interrupt_of_a_real_process(command, tmp_path):
    words = [word if word != 3 else 60 for word in GRID]
    whole = command(*[word if word != "out" else "whole" for word in words]).last
    line = [sys.executable, "-m", "fedloom.cli", *map(str, words)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    end = time.monotonic() + 60
    while time.monotonic() < end and not (tmp_path / "out" / "fedavg-1" / "checkpoint.json").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert numbers(command(*words).last) == numbers(whole)


def test_another_grid_into_the_same_folder_is_not_the_old_one(command):
    """Cells are found by name; what they were run with must be what is asked for now."""
    first = command("compare", "fedavg", *SMALL, "--rounds", 1, "--out", "out", "--json")
    assert first.code == 0
    second = command("compare", "fedavg", *SMALL, "--rounds", 4, "--set", "train.lr=0.5", "--out", "out", "--json")
    if second.code == 2:
        assert "run.rounds" in second.err
    else:
        assert numbers(second.last) != numbers(first.last), "the old numbers under a new question"


def test_an_empty_folder_of_a_killed_start_does_not_block_the_grid(command, tmp_path):
    """Killed between making the folder and filling it."""
    (tmp_path / "out" / "fedavg-0").mkdir(parents=True)
    ended = command("compare", "fedavg", *SMALL, "--rounds", 1, "--out", "out", "--json")
    assert ended.code == 0, ended.err
    assert (tmp_path / "out" / "fedavg-0" / "summary.json").is_file()


def test_the_seed_of_a_study_counts(command, tmp_path):
    (tmp_path / "study.toml").write_text("[run]\nseed = 7\n")
    words = ["fedavg", *SMALL, "--rounds", 1, "--seeds", 2, "--json"]
    assert command("compare", "study.toml", *words).last["seeds"] == [7, 8]
    assert command("compare", *words, "--set", "run.seed=5").last["seeds"] == [5, 6]
    assert command("compare", "study.toml", *words, "--seed", 3).last["seeds"] == [3, 4]


def test_baseline_comes_first(command):
    found = command("compare", "fedprox", "fedavg", *SMALL, "--rounds", 1, "--baseline", "fedavg", "--json").last
    assert list(found["methods"]) == ["fedavg", "fedprox"]
    assert found["baseline"] == "fedavg"


def test_a_target_makes_a_table_of_its_own(command, tmp_path):
    words = ["fedavg", *SMALL, "--rounds", 2, "--set", "evaluate.target=0.01", "--out", "out"]
    ended = command("compare", *words)
    assert ended.code == 0, ended.err
    assert "until the target accuracy" in ended.out
    assert "until the target accuracy" in (tmp_path / "out" / "table.md").read_text()


PAPER = """
title = "A table of nothing"
source = "Nobody et al., 2020, table 1"
measure = "global_accuracy"

[study]
data = {{ name = "digits", limit = 60 }}
model = {{ name = "mlp" }}
engine = {{ name = "local" }}
fleet = {{ clients = 2 }}
run = {{ rounds = 50 }}

[rows.FedAvg]
method = {{ name = "fedavg" }}
[rows."FedProx, mu 1"]
method = {{ name = "fedprox", mu = 1.0 }}

[columns.IID]
partition = {{ name = "iid" }}
[columns.skewed]
partition = {{ name = "{skewed}" }}

[published.FedAvg]
IID = 91.2
skewed = 55.5

[scales.smoke]
takes = "seconds"
differs = "rounds: 2 instead of 50"
study = {{ run = {{ rounds = 2 }} }}
[scales.paper]
seeds = 3
"""


@pytest.fixture
def paper(tmp_path):
    def write(skewed="dirichlet:1.0", text=PAPER, name="nothing.toml"):
        (tmp_path / name).write_text(text.format(skewed=skewed))
        return name

    return write


def test_reproduce_shows_published_and_measured(command, paper, tmp_path):
    words = ["reproduce", paper(), "--scale", "smoke", "--out", "out"]
    found = command(*words, "--json")
    assert found.code == 0, found.err
    cells = {(cell["row"], cell["column"]): cell for cell in found.last["cells"]}
    assert {place: cell["published"] for place, cell in cells.items()} == {
        ("FedAvg", "IID"): 91.2, ("FedAvg", "skewed"): 55.5, ("FedProx, mu 1", "IID"): None,
        ("FedProx, mu 1", "skewed"): None,
    }  # fmt: skip
    assert all(0 <= cell["measured"][0] <= 100 for cell in cells.values())
    assert (found.last["scale"], found.last["differs"]) == ("smoke", "rounds: 2 instead of 50")
    text = (tmp_path / "out" / "nothing-smoke" / "result.md").read_text()
    measured = cells["FedAvg", "IID"]["measured"][0]
    assert f"{measured:.2f} (91.2, {measured - 91.2:+.2f})" in text
    assert "Nobody et al., 2020, table 1" in text
    assert "rounds: 2 instead of 50" in text
    shown = command("reproduce", paper(), "--scale", "smoke", "--out", "shown")
    assert shown.code == 0
    assert f"{measured:.2f} (91.2" in shown.out
    (place,) = (tmp_path / "out" / "nothing-smoke").glob("FedProx*skewed-0/study.json")
    study = json.loads(place.read_text())
    assert (study["method"]["mu"], study["partition"]["name"], study["run"]["rounds"]) == (1.0, "dirichlet:1.0", 2)


def test_a_finished_table_is_only_shown(command, paper, counted):
    """Whatever its rows are called."""
    words = ["reproduce", paper(), "--scale", "smoke", "--out", "out", "--json"]
    first = command(*words).last
    done = len(counted)
    assert command(*words).last == first
    assert len(counted) == done


def test_the_command_in_the_result_works(command, paper, tmp_path):
    """A table given as a file is made again by naming the file."""
    command("reproduce", paper(), "--scale", "smoke", "--out", "out")
    text = (tmp_path / "out" / "nothing-smoke" / "result.md").read_text()
    line = text.partition("`fedloom ")[2].partition("`")[0]
    assert command(*line.split(), "--out", "out").code == 0, line


def test_reproduce_refuses_what_it_does_not_know(command, paper, tmp_path):
    assert "Did you mean 'smoke'?" in command("reproduce", paper(), "--scale", "smok").sentence()
    assert "allowed: smoke or paper" in command("reproduce", paper(), "--scale", "small").sentence()
    for old, new, part in (
        ("[scales.smoke]", "[scales.smok]", "Did you mean 'smoke'?"),
        ("[published.FedAvg]", "[published.FedAvgg]", "Did you mean 'FedAvg'?"),
        ("IID = 91.2", "IDD = 91.2", "Did you mean 'IID'?"),
        ("source =", "sorce =", "sorce"),
        ("seeds = 3", "seeds = 0", "seeds"),
    ):
        name = paper(text=PAPER.replace(old, new))
        ended = command("reproduce", name, "--scale", "paper" if "seeds" in new else "smoke")
        assert ended.code == 2, new
        assert part in ended.err
    assert not (tmp_path / "runs").exists()


def test_every_cell_is_checked_before_the_first_one_runs(command, paper, tmp_path):
    """A mistake in the last column must not show after hours of the first."""
    sentence = command("reproduce", paper("classes:11"), "--scale", "smoke", "--out", "out")
    assert sentence.code == 2
    assert "at most the 10 classes" in sentence.err
    assert "skewed" in sentence.err, "say in which cell"
    assert not list(tmp_path.glob("out/*/*")), "nothing was run"


def test_tables_are_listed(command, paper, tmp_path):
    (tmp_path / "papers").mkdir()
    paper(name="papers/nothing.toml")
    (listed,) = command("reproduce", "--list", "--json").last
    assert (listed["name"], listed["title"]) == ("nothing", "A table of nothing")
    assert set(listed["scales"]) == {"smoke", "paper"}
    shown = command("reproduce", "--list")
    assert shown.code == 0
    assert "Nobody et al." in " ".join(shown.out.split())
    assert "Did you mean 'nothing'?" in command("reproduce", "nothin").sentence()


def test_no_tables_are_an_empty_list(command, monkeypatch):
    monkeypatch.setattr("fedloom.runs.papers.FOLDERS", ())
    assert command("reproduce", "--list", "--json").last == []
    assert command("reproduce", "--list").code == 0


# Without --engine the machine decides; one epoch of 60 images leaves time to interrupt.
TOGETHER = ["compare", "fedavg", "fedprox", *SMALL[:4], *SMALL[6:], "--rounds", 8, "--seeds", 2, "--jobs", 2, "--json"]


def test_runs_side_by_side_give_the_same_numbers(command):
    """Interrupted in the middle, gone on with, and against one run after another: bit for bit."""
    one_by_one = command(*TOGETHER, "--jobs", 1, "--engine", "local", "--out", "one")
    assert one_by_one.code == 0, one_by_one.err
    stop = threading.Thread(target=_interrupt_after, args=("two/fedprox-0/checkpoint.json",))
    stop.start()
    ended = command(*TOGETHER, "--out", "two")
    stop.join()
    assert ended.code == 130, ended.err
    assert "Repeat the command" in ended.err
    assert multiprocessing.active_children() == []
    again = command(*TOGETHER, "--out", "two")
    assert again.code == 0, again.err
    assert numbers(again.last) == numbers(one_by_one.last)
    assert again.err.startswith("["), "progress of the runs"


def _interrupt_after(path):
    end = time.monotonic() + 60
    while time.monotonic() < end and not Path(path).exists():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_killed_comparison_loses_nothing(command, tmp_path):
    """SIGKILL of the whole comparison while two runs are under way, at several moments; repeated, it ends the same."""
    words = TOGETHER
    whole = command(*words, "--jobs", 1, "--engine", "local", "--out", "whole").last
    line = [sys.executable, "-m", "fedloom.cli", *map(str, words), "--out", "out"]
    for name in ("fedavg-0/study.json", "fedprox-0/checkpoint.json"):
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
        end = time.monotonic() + 60
        while time.monotonic() < end and not (tmp_path / "out" / name).exists() and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        process.wait()
        time.sleep(1)  # its runs end by themselves
    again = command(*words, "--out", "out")
    assert again.code == 0, again.err
    assert numbers(again.last) == numbers(whole)


def test_a_run_that_is_under_way_is_not_touched(command, tmp_path):
    assert command("compare", "fedavg", *SMALL, "--rounds", 1, "--out", "out", "--json").code == 0
    (tmp_path / "out" / "fedavg-0" / "summary.json").unlink()
    line = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.lockf(f, 2); print(1, flush=True); time.sleep(60)"
    )
    place = tmp_path / "out" / "fedavg-0"
    with subprocess.Popen([sys.executable, "-c", line, place / ".claim"], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert "being run by another process" in command("resume", place).err
        for looks in ("knowledge", "profile"):
            looked = command(looks, place)
            assert looked.code == 2
            assert "is being run" in looked.err
        assert Store(place).is_running
        other.kill()
    assert not Store(place).is_running
    assert command("resume", place, "--json").code == 0


def test_methods_that_do_not_suit_the_fleet_are_named_and_left_out(command):
    words = [*SMALL, "--rounds", 1, "--fleet", "low", "--seeds", 2]
    ended = command("compare", "fedavg", "heterofl", *words, "--json")
    assert ended.code == 0, ended.err
    assert "not in the table: fedavg trains whole models" in ended.err
    assert ended.last["methods"]["fedavg"] == {}
    assert len(ended.last["methods"]["heterofl"]["global_accuracy"]) == 2
    assert ended.last["left_out"].keys() == {"fedavg"}
    shown = command("compare", "fedavg", "heterofl", *words, "--baseline", "fedavg")
    assert shown.code == 0, "nothing can be compared with it, but the runs count"
    assert "heterofl" in shown.out
    assert "fedavg" not in shown.out.replace("compare-fedavg", "")
    alone = command("compare", "fedavg", "fedprox", *words)
    assert alone.code == 2
    assert len(alone.err.splitlines()) == 2, "nobody is left: that is wrong input"


def test_statistics_are_of_these_runs(command):
    ended = command(
        "compare", "fedavg", "fedprox", *SMALL, "--rounds", 2, "--seeds", 3, "--baseline", "fedprox", "--json"
    )
    assert ended.code == 0, ended.err
    found = ended.last
    values = {name: dict(enumerate(each["global_accuracy"])) for name, each in found["methods"].items()}
    assert (found["winner"], found["verdict"]) == verdict(values, "global accuracy")


def test_a_target_that_only_some_runs_reach_says_so(command):
    ended = command("compare", "fedavg", *SMALL, "--rounds", 4, "--seeds", 3, "--out", "out", "--json")
    accuracies = sorted(ended.last["methods"]["fedavg"]["best_global_accuracy"])
    assert accuracies[0] < accuracies[2]
    target = f"evaluate.target={accuracies[2]}"
    words = ["compare", "fedavg", *SMALL, "--rounds", 4, "--seeds", 3, "--set", target, "--out", "with"]
    reached = sum(accuracy >= accuracies[2] for accuracy in accuracies)
    shown = command(*words)
    assert f"({reached} of 3)" in " ".join(shown.out.split())
    assert len(command(*words, "--json").last["methods"]["fedavg"]["macs_to_target"]) == reached


def test_targets_about_different_accuracies_say_so(command, tmp_path):
    """FedBN has no global model: its numbers are until the clients' own accuracy, and no table hides it."""
    words = [*SMALL, "--model", "lenet5_bn", "--rounds", 1, "--set", "evaluate.target=0.01"]
    mixed = command("compare", "fedavg", "fedbn", *words, "--out", "mixed", "--json")
    assert mixed.code == 0, mixed.err
    said = {name: each["target_measure"] for name, each in mixed.last["methods"].items()}
    assert said == {"fedavg": ["global_accuracy"], "fedbn": ["local_accuracy"]}
    table = (tmp_path / "mixed" / "table.md").read_text()
    assert "| method | target of | rounds |" in table
    assert "| fedavg | global accuracy | 1 |" in table
    assert "| fedbn | local accuracy | 1 |" in table
    assert "fedbn,local accuracy,1," in (tmp_path / "mixed" / "report.html").read_text()
    shown = command("compare", "fedavg", *words, "--out", "alone")
    assert "target of" not in shown.out, "nothing is mixed"
    assert "reached 1 % local accuracy after 1 rounds" in command("run", "fedbn", *words).out


def test_a_scale_may_change_rows_and_columns_of_its_own(command, paper, tmp_path):
    text = PAPER.replace("[scales.paper]", """[scales.small]
columns = {{ skewed = {{ run = {{ rounds = 3 }} }} }}
rows = {{ FedAvg = {{ train = {{ lr = 0.25 }} }} }}
[scales.paper]""")  # fmt: skip
    assert command("reproduce", paper(text=text), "--scale", "small", "--out", "out").code == 0
    (place,) = (tmp_path / "out" / "nothing-small").glob("*/study.json")
    study = json.loads(place.read_text())
    assert (place.parent.name, study["run"]["rounds"], study["train"]["lr"]) == ("FedAvg-skewed-0", 3, 0.25)
    assert study["partition"]["name"] == "dirichlet:1.0"
    text = (tmp_path / "out" / "nothing-small" / "result.md").read_text()
    assert "`run.rounds` 3 instead of 50" in text
    assert "`train.lr` 0.25 instead of 0.05" in text
    assert "1 seed(s) instead of 3" in text


def test_the_first_seeds_of_a_table_can_be_run_alone(command, paper, tmp_path):
    small = "[scales.small]\nseeds = 2\nstudy = {{ run = {{ rounds = 2 }} }}\n"
    name = paper(text=PAPER.replace("[scales.paper]", small + "[scales.paper]"))
    words = ["reproduce", name, "--scale", "small", "--row", "FedAvg", "--column", "IID", "--out", "out"]
    assert command(*words, "--seeds", "1").code == 0
    folder = tmp_path / "out" / "nothing-small"
    assert [path.parent.name for path in folder.glob("*/summary.json")] == ["FedAvg-IID-0"]
    assert "1 of 2 seeds (91.2" in (folder / "result.md").read_text()
    assert command(*words).code == 0
    assert len(list(folder.glob("*/summary.json"))) == 2
    assert "seeds (" not in (folder / "result.md").read_text()


def test_the_page_of_results(command, paper, tmp_path, counted, monkeypatch):
    """Part of a table is run, one run is stopped; the page says so, and can be made again from what it kept."""
    (tmp_path / "papers").mkdir()
    small = "[scales.small]\ntakes = '1 min'\ndiffers = 'rounds'\nstudy = {{ run = {{ rounds = 4 }} }}\n"
    text = PAPER.replace("[scales.paper]", small + "[scales.paper]")
    paper(text=text, name="papers/nothing.toml")
    words = ["reproduce", "nothing", "--out", "out"]
    assert command(*words, "--row", "FedAvg", "--column", "IID").code == 0
    plain, left = Local.run, [2]

    def stop(self, tasks):
        for outcome in plain(self, tasks):
            if outcome.job == "work" and outcome.client == 1:
                left[0] -= 1
                if left[0] == -1:
                    os.kill(os.getpid(), signal.SIGINT)
            yield outcome

    monkeypatch.setattr(Local, "run", stop)
    assert command(*words, "--row", "FedAvg").code == 130
    monkeypatch.setattr(Local, "run", plain)
    (listed,) = command("reproduce", "--list", "--out", "out", "--json").last
    assert {scale: each["state"] for scale, each in listed["scales"].items()} == {
        "smoke": "not run", "small": "1 of 4 runs done", "paper": "not run",
    }  # fmt: skip
    assert command("reproduce", "--page", "docs/results.md", "--out", "out").code == 0
    page = (tmp_path / "docs" / "results.md").read_text()
    summary = json.loads((tmp_path / "out" / "nothing-small" / "FedAvg-IID-0" / "summary.json").read_text())
    measured = 100 * summary["global_accuracy"]
    assert f"| FedAvg | {measured:.2f} (91.2, {measured - 91.2:+.2f}) | " in page
    assert "at round 2 of 4 (55.5) |" in page
    assert "| FedProx, mu 1 | not run | not run |" in page
    assert "Not run yet: A table of nothing (`nothing`) at scale `paper`" in page
    kept = tmp_path / "papers" / "results" / "nothing-small.json"
    before = kept.read_text()
    assert command("reproduce", "--page", "docs/results.md", "--out", "nowhere").code == 0
    assert (tmp_path / "docs" / "results.md").read_text() == page
    assert kept.read_text() == before
    assert "1 of 4 runs done" in command("reproduce", "--list", "--out", "nowhere").out
    # Another machine ran another part: the page has both.
    assert command(*words[:2], "--out", "other", "--row", "FedProx, mu 1", "--column", "IID").code == 0
    assert command("reproduce", "--page", "docs/results.md", "--out", "other").code == 0
    page = (tmp_path / "docs" / "results.md").read_text()
    summary = json.loads((tmp_path / "other" / "nothing-small" / "FedProx_mu_1-IID-0" / "summary.json").read_text())
    assert f"| FedAvg | {measured:.2f} (91.2, {measured - 91.2:+.2f}) | " in page
    assert f"| FedProx, mu 1 | {100 * summary['global_accuracy']:.2f} | not run |" in page
    assert "at round 2 of 4 (55.5) |" in page
    assert "2 of 4 runs done" in command("reproduce", "--list", "--out", "nowhere").out
