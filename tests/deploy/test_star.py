"""A server and clients over Flower and TLS: the same result as the simulation, on the same files."""

from __future__ import annotations

import json

import pytest
import torch

from tests.contract.study import rows
from tests.deploy.federation import Federation, simulated, tensors_of, together

pytest.importorskip("flwr")

CAPACITIES = [1.0, 0.5, 0.25]
MEASURED = ("global_accuracy", "local_accuracy", "train_loss", "upload_bytes", "download_bytes", "train_macs",
            "mean_parameters", "mean_forward_macs")  # fmt: skip


def no_secret_in(text, folder):
    keys = list(folder.rglob("*.key"))
    assert len(keys) == 8
    for path in keys:
        assert "".join(path.read_text().splitlines()[1:-1])[20:60] not in text
        assert path.stat().st_mode & 0o077 == 0


def equal(one, two):
    for served, run in zip(rows(one), rows(two), strict=True):
        assert {name: served[name] for name in MEASURED} == {name: run[name] for name in MEASURED}
    for name, tensor in tensors_of(two).items():
        assert torch.equal(tensors_of(one)[name], tensor), name


def test_fedavg_equals_its_simulation_bit_for_bit(tmp_path, capfd):
    federation = Federation(tmp_path)
    served, said = together(federation)
    no_secret_in(" ".join((*said, *capfd.readouterr())), tmp_path / "deploy")
    equal(served, simulated(federation, tmp_path / "simulated"))
    assert sum("joined: " in line for line in said) == 3
    assert said.count("the run is over") == 3
    status = json.loads((served.folder / "status.json").read_text())
    assert [client["name"] for client in status["clients"]] == ["client_0", "client_1", "client_2"]
    for client in status["clients"]:
        assert client["state"] == "connected"
        assert client["reports"] == 2
        sent = sum(row["upload_bytes"] for row in served.rows("clients") if row["client"] == client["number"])
        assert sent < client["received_bytes"] < 1.5 * sent  # what it sent is what the server received


@pytest.mark.slow
def test_feddse_with_three_capacities_equals_its_simulation(tmp_path):
    federation = Federation(tmp_path, method={"name": "feddse"}, run={"rounds": 3})
    served, _ = together(federation, capacity=CAPACITIES)
    equal(
        served,
        simulated(federation, tmp_path / "sim", fleet={"name": "mixed", "capacities": CAPACITIES, "spread": 1.0}),
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedbn", "scaffold", "heterofl", "fedprox", "fednova"])
def test_others_equal_their_simulation(method, tmp_path):
    federation = Federation(tmp_path, method={"name": method}, run={"rounds": 3})
    served, _ = together(federation)
    equal(served, simulated(federation, tmp_path / "sim"))


@pytest.mark.slow
def test_chfl_by_loss_equals_its_simulation(tmp_path):
    """Times are measured here and virtual there, so only what is chosen by loss can be the same."""
    select = {"name": "chfl", "fraction": 0.67, "scored_share": 1.0, "indicators": ["loss"]}
    federation = Federation(tmp_path, select=select, run={"rounds": 5})
    served, _ = together(federation)
    plain = simulated(federation, tmp_path / "sim")
    equal(served, plain)
    chosen = [(row["round"], row["client"]) for row in served.rows("clients") if row["job"] == "work"]
    assert chosen == [(row["round"], row["client"]) for row in plain.rows("clients") if row["job"] == "work"]
    assert len(chosen) == 5 * 2


@pytest.mark.slow
def test_chfl_by_loss_and_measured_time_runs(tmp_path):
    federation = Federation(tmp_path, select={"name": "chfl", "fraction": 0.67}, run={"rounds": 4})
    served, _ = together(federation)
    rows = [row for row in served.rows("clients") if row["job"] == "work"]
    assert len(rows) == 4 * 2
    assert all(row["seconds"] > 0 and not row["failed"] for row in rows)
    assert served.summary["local_accuracy"] > 0.5


@pytest.mark.slow
def test_a_selection_and_a_share_compose(tmp_path):
    sections = {"select": {"name": "uniform", "fraction": 0.6}, "share": {"name": "fedbn"}, "run": {"rounds": 3}}
    federation = Federation(tmp_path, method={"name": "fedprox"}, **sections)
    served, _ = together(federation)
    equal(served, simulated(federation, tmp_path / "sim"))
