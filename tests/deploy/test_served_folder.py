"""The folder of a run with real clients: nobody takes it for a simulation."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import fedloom.models.resolve
from fedloom import wire
from fedloom.deploy.folder import init
from fedloom.errors import InputError, Interrupted
from fedloom.report.fairness import fairness, read
from fedloom.report.gather import groups_of, read_runs
from fedloom.report.words import words
from fedloom.runs.export import export
from fedloom.runs.knowledge import knowledge
from fedloom.runs.profiles import profiles
from fedloom.runs.start import resume
from tests.deploy.federation import Federation, together
from tests.deploy.near import near

pytest.importorskip("flwr")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A run of two clients, for which no data set is at hand."""
    federation = Federation(tmp_path_factory.mktemp("served"), clients=2, limit=100, run={"rounds": 1})
    result, _ = together(federation)
    return result.folder


@pytest.fixture(autouse=True)
def without_data(monkeypatch):
    def load(*given):
        raise AssertionError("a data set was loaded")

    monkeypatch.setattr("fedloom.runs.world.dataset_of", load)


@pytest.fixture
def unfinished(served, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(served, folder)
    (folder / "summary.json").unlink()
    return folder


def test_it_is_exported_with_the_clients_kind_of_data(served, tmp_path):
    line = export(served, tmp_path / "model.pt")
    assert line == "fedloom.models.resolve.build('lenet5_bn', channels=1, classes=10, size=8)"
    eval(line, {"fedloom": fedloom}).load_state_dict(torch.load(tmp_path / "model.pt"))


def test_its_fairness_knows_no_samples(served, tmp_path):
    chosen = read(served)
    assert chosen.samples is None
    assert [cohort.tolist() for cohort in chosen.cohorts] == [[0, 1]]
    assert fairness(served, tmp_path / "fairness.png").is_file()


def test_a_paper_is_told_of_real_devices(served):
    text = words(groups_of(read_runs([served])))
    assert "The clients are 2 real devices with data of their own." in text
    assert not any(word in text for word in ("digits", "partition", "fleet"))


def test_a_finished_one_is_given_back(served):
    assert resume(served).summary["rounds"] == 1


@pytest.mark.parametrize(
    ("method", "command"), [("fedavg", "fedloom serve .*run"), ("gossip", "fedloom join, for every peer as before")]
)
def test_it_says_how_to_go_on(unfinished, tmp_path, method, command):
    for name in ("study.json", ".study.json"):
        study = json.loads((unfinished / name).read_text())
        study["method"]["name"] = method
        (unfinished / name).write_text(json.dumps(study))
    with pytest.raises(InputError, match=f"is a run with real clients; go on with: {command}"):
        resume(unfinished)
    with pytest.raises(InputError, match=f"is not finished; go on with: {command}"):
        export(unfinished, tmp_path / "model.pt")


def test_a_run_of_peers_cannot_be_served(unfinished):
    from fedloom.deploy.serve import conduct

    study = json.loads((unfinished / "study.json").read_text())
    study["method"]["name"] = "gossip"
    (unfinished / "study.json").write_text(json.dumps(study))
    keys = unfinished.parent / "deploy"
    init(keys, ["client_0", "client_1"])
    with pytest.raises(InputError, match="is a run of peers, without a server; go on with: fedloom join"):
        conduct(None, {"study": str(unfinished), "keys": str(keys / "server")})


@pytest.mark.parametrize("look", [knowledge, lambda folder: profiles(folder, [0, 1])])
def test_nobody_looks_into_data_that_are_elsewhere(look, served):
    with pytest.raises(InputError, match="a run with real clients, whose data are not here"):
        look(served)


def honest(request, answer):
    return wire.pack(answer)


@pytest.fixture
def stopped(tmp_path):
    """A federation, and its run of two rounds that was stopped in the second one."""

    def stop(request, answer):
        if request["kind"] == "work" and request["body"]["task"].round == 1:
            raise KeyboardInterrupt
        return honest(request, answer)

    federation = Federation(tmp_path, clients=2, limit=100)
    with pytest.raises(Interrupted) as told:
        near(federation, stop)
    return federation, str(told.value.folder)


def test_a_run_that_goes_on_measures_on_the_same_images(stopped, tmp_path):
    federation, folder = stopped
    went_on = near(federation, honest, study=folder, test="")
    whole = near(Federation(tmp_path / "whole", clients=2, limit=100), honest)
    measured = [row["global_accuracy"] for row in went_on.rows("metrics")]
    assert measured == [row["global_accuracy"] for row in whole.rows("metrics")]
    assert None not in measured


def test_a_run_does_not_go_on_with_other_images(stopped):
    federation, folder = stopped
    file = federation.folder / "data" / "test.npz"
    moved = file.rename(file.with_name("moved.npz"))
    with pytest.raises(InputError, match="does not exist, with which the run began; give --test if it lies elsewhere"):
        near(federation, honest, study=folder, test="")
    with pytest.raises(InputError, match=r"client_0.npz is not what it was when the run began, with --test .*test.npz"):
        near(federation, honest, study=folder, test="data/client_0.npz")
    assert near(federation, honest, study=folder, test=str(moved)).read("deployment.json")["files"]["test"]["path"] == (
        str(moved)
    )
