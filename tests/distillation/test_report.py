"""What is shown of rings and stars: traffic, knowledge, curves."""

from __future__ import annotations

import json
import sys

import matplotlib
import numpy as np
import pytest

from fedloom import cli
from fedloom.report.plots import heat_map, progress, spent
from fedloom.report.traffic import traffic_rows
from fedloom.runs.knowledge import Knowledge, knowledge
from tests.distillation.test_ring import VALID
from tests.methods.tiny import run

STUDY = VALID | {"run": {"rounds": 2}, "evaluate": {"every": 1}, "partition": {"name": "iid"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("topologies")
    graph = {"name": "graph", "shape": "complete"}
    return {
        "star": run("fedavg", out / "star", **STUDY),
        "ring": run("fedrkd", out / "ring", **STUDY),
        "peers": run("fedrkd", out / "peers", topology=graph, **STUDY),
    }


def test_traffic_is_that_of_the_ledger(runs):
    rows = traffic_rows(runs)
    assert [rows[name]["single point of failure"] for name in runs] == ["yes", "no", "no"]
    assert [rows[name]["links"] for name in runs] == ["3", "3", "3"]
    assert [rows[name]["is"] for name in runs] == ["the server", "a participant", "a participant"]
    assert rows["star"]["share of all traffic"] == "100%"
    star = runs["star"].summary
    total = (star["upload_bytes"] + star["download_bytes"]) / 2
    assert rows["star"]["busiest node"] == f"{total / 1e3:.3g} kB"


def test_without_a_server_nobody_is_the_single_point_of_failure(tmp_path):
    """All traffic of a ring of two, or of a star of edges, passes one participant; yet the others go on without it."""
    edges = {"shape": "edges", "edges": [[0, 1], [0, 2]]}
    rows = traffic_rows({
        "pair": run("fedrkd", tmp_path / "pair", fleet={"clients": 2}, **STUDY),
        "hub": run("gossip", tmp_path / "hub", topology=edges, model={"hidden": [1000]}, **STUDY),
    })  # fmt: skip
    assert [row["share of all traffic"] for row in rows.values()] == ["100%", "100%"]
    assert [row["is"] for row in rows.values()] == ["a participant"] * 2
    assert [row["single point of failure"] for row in rows.values()] == ["no", "no"]


def test_an_epoch_is_one_pass_over_the_own_data(runs):
    """FedAvg: one a round. A ring of three: one alone and two hops in the first round, then two."""
    assert spent(runs["star"])["local epochs"] == pytest.approx([1, 2])
    assert spent(runs["ring"])["local epochs"] == pytest.approx([3, 5])
    assert spent(runs["peers"])["local epochs"] == pytest.approx([3, 5])
    metrics = runs["ring"].rows("metrics")
    bytes_ = np.cumsum([row["upload_bytes"] + row["download_bytes"] for row in metrics]) / 1e6
    assert spent(runs["ring"])["MB"] == pytest.approx(bytes_)
    assert spent(runs["ring"])["accuracy"] == [row["local_accuracy"] for row in metrics]


def test_pictures_are_drawn(runs, tmp_path):
    path = progress({name: [result, result] for name, result in runs.items()}, tmp_path / "curves.png")
    assert path.stat().st_size > 10_000
    known = Knowledge(np.eye(3), np.array([[0.5, np.nan]] * 3), ("cat", "dolphin"), "fedrkd")
    assert known.own == 1
    assert known.others == 0
    assert heat_map(known, tmp_path / "map.png").stat().st_size > 5_000


def test_pictures_leave_the_callers_own_alone(runs, tmp_path):
    """In a notebook, what is drawn afterwards must still be shown."""
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        progress({name: [result] for name, result in runs.items()}, tmp_path / "curves.png")
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use(before)


def test_the_diagonal_is_what_evaluation_measured(runs):
    for result in runs.values():
        known = knowledge(result.folder)
        assert known.peers.diagonal().tolist() == pytest.approx(result.participants)
        assert known.own == pytest.approx(result.summary["local_accuracy"])


def test_everybody_is_shown_the_model_of_its_kind(tmp_path):
    """FedDF with two models: clients of the second kind know with theirs what evaluation measured."""
    plan = {"model": {"name": ["lenet5", "mlp"], "hidden": None}, "fleet": {"clients": 4}, "data": {"public": 20}}
    result = run("feddf", tmp_path, partition={"name": "iid"}, **plan)
    known = knowledge(result.folder)
    assert known.peers.diagonal().tolist() == result.participants
    assert np.isfinite(known.peers).all()
    assert len({tuple(row) for row in known.peers.tolist()}) == 2, "one model a kind, and the kinds differ"


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, capsys.readouterr()


def test_from_the_command_line(runs, monkeypatch, capsys):
    folders = [result.folder for result in runs.values()]
    code, said = command(monkeypatch, capsys, "traffic", *folders, "--json")
    assert code == 0
    assert len(json.loads(said.out.splitlines()[-1])) == 3
    code, said = command(monkeypatch, capsys, "knowledge", folders[1], "--json")
    assert code == 0
    told = json.loads(said.out.splitlines()[-1])
    assert np.shape(told["peers"]) == (3, 3)
    assert (folders[1] / "knowledge.png").is_file()
    code, said = command(monkeypatch, capsys, "knowledge", folders[1])
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[1] == ["0", "1", "2"], "numbered as in the ledger and by --client"
    assert lines[3] == ["1", *(f"{100 * value:.1f}" for value in told["peers"][1])]
    code, said = command(monkeypatch, capsys, "knowledge", folders[1].parent)
    assert code == 2
    assert "is not the folder of a run" in said.err


def test_one_participant_has_nobody_to_exchange_with(tmp_path, monkeypatch, capsys):
    result = run("gossip", tmp_path, fleet={"clients": 1}, **STUDY)
    assert traffic_rows({"alone": result})["alone"]["share of all traffic"] == "-"
    assert traffic_rows({"alone": result})["alone"]["a participant sends"] == "0 B"
    code, said = command(monkeypatch, capsys, "knowledge", result.folder)
    assert code == 0
    assert "there are no others" in said.out
    assert "nan" not in said.out
