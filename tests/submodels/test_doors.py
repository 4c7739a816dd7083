"""Sub-models from the outside: the command line, a network of one's own, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom
from fedloom.runs.start import run as start
from tests.contract.study import rows
from tests.methods.tiny import run
from tests.submodels.federation import HERE, OWN

METHODS = ["heterofl", "feddropout", "fedrolex", "feddse", "fedgse", "fjord"]
SMALL = ["--clients", 5, "--rounds", 1, "--engine", "local", "--set", "data.limit=150", "--set", "data.public=20"]


def test_a_network_that_the_package_has_never_seen(command):
    ended = command("run", "feddse", "--model", OWN, "--fleet", "low", *SMALL, "--json")
    assert ended.code == 0, ended.err
    assert ended.last["method"] == "feddse"
    assert ended.last["failures"] == 0
    assert 0 <= ended.last["global_accuracy"] <= 1


@pytest.mark.parametrize("method", METHODS)
def test_the_same_from_python_under_every_method(method, tmp_path):
    result = start(
        method, model=OWN, fleet="low", clients=5, rounds=2, engine="local", out=tmp_path,
        set={"data.limit": 150, "data.public": 20, "train.lr": 0.02},
    )  # fmt: skip
    assert [row["failures"] for row in rows(result)] == [0, 0]
    work = [entry for entry in result.rows("clients") if entry["job"] == "work" and entry["round"] == 0]
    assert [entry["parameters"] for entry in work] == sorted((entry["parameters"] for entry in work), reverse=True)
    assert work[-1]["parameters"] < work[0]["parameters"] / 10


def test_it_learns(tmp_path):
    result = start(
        "feddse", model=OWN, fleet="high", clients=5, rounds=6, engine="local", out=tmp_path,
        set={"data.limit": 600, "train.lr": 0.1, "train.batch_size": 16, "model.width": 16, "train.momentum": 0.5,
             "evaluate.every": 2},
    )  # fmt: skip
    assert result.summary["best_global_accuracy"] > 0.3


def test_its_units_are_shown(command):
    found = command("inspect", OWN, "--shape", "1x8x8", "--capacity", 0.5, "--json").last
    assert found["groups"] == {"stem": 8, "expand": 16, "fine": 8, "coarse": 4, "mix": 16}
    assert found["whole"] == {}


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_cannot_be_traced_is_refused(method, command):
    """Before the first round, whoever would cut: client or server."""
    told = command("run", method, "--model", f"{HERE}:Untraceable", "--fleet", "low", *SMALL).sentence()
    assert "Untraceable cannot be traced on an input of shape [2, 1, 8, 8]" in told
    assert "only zeros, please" in told


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_no_layer_cannot_be_joined_by_class(method, command):
    """12 hidden units behind 10 classes: rows 10 and 11 would never be joined, the others by a class they are not."""
    model = ("run", method, "--model", f"{HERE}:Cosine", "--fleet", "low", *SMALL)
    told = command(*model).sentence()
    assert f"{method} joins output rows by class, but no layer of the model has its classes for rows" in told
    assert "'layers.1': 'the output is made of them by what is not a layer'" in told
    assert "set merge.by_class to false" in told
    assert command(*model, "--set", "merge.by_class=false", "--json").last["failures"] == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("model", "why"),
    [
        ([f"{HERE}:Cosine", "--set", "model.hidden=[12]"], "it keeps whole layers.0 (the output is made of them by"),
        (["mlp", "--set", "model.hidden=[]"], "it has no hidden layers"),
    ],
)
def test_a_model_without_units_is_refused_where_weak_devices_should_train_a_part(method, model, why, command):
    told = command("run", method, "--model", *model, "--set", "merge.by_class=false", "--fleet", "low", *SMALL)
    assert f"{method} found no units to cut in the model: {why}" in told.sentence()


@pytest.mark.parametrize("method", ["heterofl", "feddse"])
@pytest.mark.parametrize("capacity", [0.0, 1.5, -0.25])
def test_capacities_outside_zero_to_one_are_refused(capacity, method, command):
    told = command("run", method, "--model", "mlp", "--fleet", "mixed", "--set", f"fleet.capacities=[{capacity}, 1.0]",
                   *SMALL).sentence()  # fmt: skip
    assert "fleet.capacities must be in (0, 1]" in told
    assert str(capacity) in told


def test_weak_devices_under_whole_models_are_refused(command):
    told = command("run", "fedavg", "--model", "mlp", "--fleet", "low", *SMALL).sentence()
    assert "cannot train them" in told


@pytest.mark.parametrize("method", ["heterofl", "fjord", "depthfl"])
def test_costs_can_be_asked_for_beforehand(method, command):
    model = "cnn4" if method == "depthfl" else OWN
    Path("study.toml").write_text(
        f"[method]\nname = '{method}'\n[model]\nname = '{model}'\n[fleet]\nname = 'low'\nclients = 5\n"
        "[data]\nlimit = 150\npublic = 20\n[engine]\nname = 'local'\n"
    )
    ended = command("check", "study.toml")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("method", ["heterofl", "feddse", "fedgse"])
def test_a_client_without_many_samples_is_no_failure(method, tmp_path):
    """Norm layers and clients of two samples: batches of one are joined, scores are read on what there is."""
    result = run(
        method, tmp_path, model={"name": OWN, "hidden": None}, engine={"precision": "float32"},
        fleet={"name": "low", "clients": 20}, data={"limit": 80, "public": 10}, partition={"name": "iid"},
    )  # fmt: skip
    assert [row["failures"] for row in rows(result)] == [0, 0]


def test_the_example_says_how_to_run_it():
    text = (Path(fedloom.__file__).parents[2] / "examples" / "own_net.py").read_text()
    assert f"--model {OWN}" in text
