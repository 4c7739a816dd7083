"""Judged by the model that was last trained."""

from __future__ import annotations

import pytest

from fedloom.engine.reference import Reference
from fedloom.engine.states import States
from fedloom.readings import Accuracy
from fedloom.types import Measure, Task
from tests.methods.tiny import NORMED, numbers, run, server_of, world

TRAINED = {"evaluate": {"model": "trained", "on": "all"}}


def test_of_one_client_it_is_the_global_model(tmp_path):
    alone = {"fleet": {"clients": 1}, "partition": {"name": "iid"}}
    for row in run("fedavg", tmp_path, **alone, **TRAINED).rows("metrics"):
        assert row["local_accuracy"] == row["global_accuracy"]


@pytest.mark.parametrize("method", ["fedavg", "fedcpn", "scaffold", "local"])
def test_training_is_the_same_and_the_trained_model_is_judged(method, tmp_path, monkeypatch):
    kept, propose = {}, States.propose

    def note(self, client, moment, state):
        kept[client] = state
        propose(self, client, moment, state)

    monkeypatch.setattr(States, "propose", note)
    plain = run(method, tmp_path / "a")
    assert not any("trained" in state for state in kept.values())
    other = run(method, tmp_path / "b", **TRAINED)
    assert server_of(plain).keys() == server_of(other).keys()
    assert all((tensor == server_of(plain)[name]).all() for name, tensor in server_of(other).items())
    place = world(method, **TRAINED)
    images = place.client(Task(0, 0), {}).test if method != "fedcpn" else place.home().test
    reads = Reference(place.network).solve(
        [Measure(state["trained"], Accuracy(), images) for _, state in sorted(kept.items())]
    )
    accuracies = [float(read["right"].sum() / read["samples"].sum()) for read in reads]
    assert numbers(other)[-1]["local_accuracy"] == pytest.approx(sum(accuracies) / 3)
    if method != "local":
        assert len(set(accuracies)) > 1


def test_being_judged_by_what_they_trained_costs_clients_nothing_while_they_train(tmp_path):
    """Norm statistics for that are taken when they are judged."""
    static = {"share": {"name": "static"}, "evaluate": {"every": 2}, "run": {"rounds": 2}, **NORMED}
    judged = {**static, "evaluate": {"every": 2, "model": "trained"}}
    used, trained = (
        [row["macs"] for row in run("fedavg", tmp_path / name, **study).rows("clients") if row["job"] == "work"]
        for name, study in (("used", static), ("trained", judged))
    )
    assert used == trained
