"""Whole runs as jobs on a cluster."""

from __future__ import annotations

import json

import pytest

from fedloom.errors import FedloomError
from fedloom.runs import jobs
from fedloom.runs.grid import Grid
from fedloom.runs.start import resume
from fedloom.runs.study import resolve

pytestmark = pytest.mark.xdist_group("ray")
BASE = {
    "data": {"name": "digits", "limit": 100}, "model": {"name": "mlp"}, "fleet": {"clients": 3},
    "run": {"rounds": 2}, "engine": {"name": "ray", "cpus": 0.5},
}  # fmt: skip
ROWS = {name: {"method": {"name": name}} for name in ("fedavg", "fedbn")}


def silent(*_):
    return lambda row: None


def accuracies(done):
    return {cell.label: result.summary["local_accuracy"] for cell, result in done}


def test_a_comparison_on_a_cluster_is_the_comparison(cluster, tmp_path, monkeypatch):
    done, failures = Grid(BASE, ROWS).run(tmp_path / "far", silent)
    assert not failures
    near, _ = Grid({**BASE, "engine": {"name": "local"}}, ROWS).run(tmp_path / "near", silent)
    assert accuracies(done) == accuracies(near)
    assert all(result.folder == tmp_path / "far" / cell.label for cell, result in done)
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["fedavg-0", "fedbn-0"]
    monkeypatch.setattr(jobs, "_run", None)  # nothing is run a second time
    again, _ = Grid(BASE, ROWS).run(tmp_path / "far", silent)
    assert accuracies(again) == accuracies(done)


def test_a_failed_cell_is_named_and_the_others_are_there(cluster, tmp_path):
    rows = ROWS | {"broken": {"method": {"name": "fedavg"}, "engine": {"deadline": 1e-9}}}
    done, failures = Grid(BASE, rows).run(tmp_path, silent)
    assert {cell.row for cell, _ in done} == {"fedavg", "fedbn"}
    (sentence,) = failures
    assert sentence.startswith("broken-0: round 1: 0 of 3 clients reported")


def test_a_job_that_does_not_see_the_folder_sends_its_own_back(tmp_path):
    study = jobs.as_job(resolve({**BASE, "method": {"name": "fedavg"}}))
    failure, packed = jobs._job(study.model_dump_json(), "cell", str(tmp_path / "nowhere"), b"", [], None)
    assert failure == ""
    assert list(tmp_path.iterdir()) == []
    jobs._unpack(packed, tmp_path)
    jobs._at_home(tmp_path / "cell")
    result = resume(tmp_path / "cell")
    assert result.summary["run_dir"] == str(tmp_path / "cell")
    assert len(result.rows("metrics")) == 2
    # One that was left unfinished goes on from what was sent along.
    (tmp_path / "cell" / "summary.json").unlink()
    failure, packed = jobs._job(study.model_dump_json(), "cell", "nowhere", jobs._packed(tmp_path / "cell"), [], None)
    jobs._unpack(packed, tmp_path / "again")
    summary = json.loads((tmp_path / "again" / "cell" / "summary.json").read_text())
    assert summary["local_accuracy"] == result.summary["local_accuracy"]


def test_what_a_run_finds_wrong_is_its_failure(tmp_path):
    study = jobs.as_job(resolve({**BASE, "engine": {"name": "ray", "deadline": 1e-9}}))
    failure, _ = jobs._job(study.model_dump_json(), "cell", "nowhere", b"", [], None)
    assert "0 of 3 clients reported" in str(FedloomError(failure))
