"""A worker or a machine dies in the middle of a round: the run ends with the result of one where nobody died."""

from __future__ import annotations

import time

import pytest
import torch

from fedloom.engine import ray as engine_module
from fedloom.runs import start
from fedloom.runs.experiment import Experiment
from fedloom.runs.study import Open
from tests.cluster import mortal
from tests.conftest import STORE
from tests.contract.study import final, rows, study_of

pytestmark = pytest.mark.xdist_group("ray")
METHODS = {"no state": "tests.cluster.mortal:MortalAvg", "state": "tests.cluster.mortal:MortalScaffold"}


@pytest.fixture
def studied(cluster, tmp_path, monkeypatch):
    """Runs a mortal method; it dies once for each flag."""
    monkeypatch.setattr(engine_module, "PATIENCE", 60)

    def go(method, on="local", *, flag, node="", **engine):
        study = study_of(method, tmp_path / "runs", on, engine=engine, run={"rounds": 5})
        mortal = Open(name=method, flag=str(tmp_path / flag), node=node)
        return start.start(study.model_copy(update={"method": mortal}))

    return go


@pytest.fixture
def restored(monkeypatch):
    """How often a run went back to a checkpoint."""
    seen, plain = [], Experiment._restore
    monkeypatch.setattr(Experiment, "_restore", lambda self: seen.append(1) or plain(self))
    return seen


def agree(one, two):
    assert two.summary["failures"] == 0
    expected, found = final(one), final(two)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor.nan_to_num(-1), found[name].nan_to_num(-1)) for name, tensor in expected.items())
    assert rows(one) == rows(two)


def case(state, *more, slow):
    return pytest.param(METHODS[state], *more, id="-".join((state, *more)), marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("method", "reduce"),
    [
        case("state", "flat", slow=False),
        case("state", "tree", slow=True),
        case("no state", "flat", slow=True),
        case("no state", "tree", slow=True),
    ],
)
def test_a_killed_worker_changes_nothing(method, reduce, studied, restored, tmp_path):
    found = studied(method, "ray", flag="kill", reduce=reduce)
    assert (tmp_path / "kill").exists()
    # States of round 3 died, of which the checkpoint after round 2 knows nothing; without states, nothing is redone.
    assert len(restored) == (2 if method == METHODS["state"] else 1)
    if reduce == "flat":
        agree(studied(method, flag="kill"), found)
    else:
        plain, found = final(studied(method, "ray", flag="kill", reduce="tree")), final(found)
        for name, tensor in plain.items():  # other workers may have added up other clients since
            assert torch.allclose(tensor.double(), found[name].double(), rtol=1e-5, atol=1e-5, equal_nan=True), name


@pytest.mark.parametrize("method", [case("state", slow=False), case("no state", slow=True)])
def test_a_killed_machine_changes_nothing(method, studied, cluster, tmp_path):
    import ray

    extra = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    for _ in range(100):
        if sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]) >= 3:
            break
        time.sleep(0.1)
    found = studied(method, "ray", flag="kill", node=extra.node_id, workers=3)
    assert (tmp_path / "kill").exists()
    cluster.remove_node(extra, allow_graceful=False)
    agree(studied(method, flag="kill", node=extra.node_id), found)


def test_what_was_lost_can_count_as_failed(studied):
    found = studied(METHODS["state"], "ray", flag="kill", lost="fail", quorum=0.2)
    lost = [row for row in found.rows("clients") if row["failed"] == "lost"]
    assert lost
    assert {row["round"] for row in lost} == {mortal.ROUND}
    assert len(found.rows("metrics")) == 5
