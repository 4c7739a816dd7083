"""What every registered method must hold on every engine."""

from __future__ import annotations

import struct
from math import log

import numpy as np
import pytest
import torch

from fedloom import wire
from fedloom.engine.local import Local
from fedloom.engine.processes import Processes
from fedloom.engine.states import States
from fedloom.errors import Interrupted
from fedloom.fleet.outgoing import arrived
from fedloom.registry import entries, find
from fedloom.runs import start
from fedloom.runs.world import World, dataset_of, world_of
from tests.contract.faults import elsewhere, faulty
from tests.contract.study import AFRESH, final, ledger, rows, run, study_of

OWN_METHOD = "examples.mymethod:MyMethod"  # written outside the package, in 20 lines
METHODS = [*sorted(entries("method")), OWN_METHOD]
every_method = pytest.mark.parametrize("method", METHODS)
# Methods of every kind: plain, with state, with cuts and scores, without a server. They run on every engine in the
# ordinary suite; the others there on one engine a test, and on all in the slow one.
KINDS = {"fedavg", "scaffold", "feddse", "fedrkd", OWN_METHOD}


def every(*engines, methods=METHODS, whole="local"):
    """Every method on every engine; on the `whole` one also in the ordinary suite."""
    cases = [(method, engine) for engine in engines for method in methods]
    return pytest.mark.parametrize(
        ("method", "engine"),
        [
            pytest.param(
                method, engine,
                marks=[*([pytest.mark.xdist_group("ray")] if engine == "ray" else []),
                       *([] if engine == whole or method in KINDS else [pytest.mark.slow])],
            )
            for method, engine in cases
        ],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _cluster(request):
    """Ray runs on two raylets."""
    if "ray" in getattr(request.node, "callspec", request).__dict__.get("params", {}).values():
        request.getfixturevalue("cluster")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor.nan_to_num(-1), two[name].nan_to_num(-1)), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Every method's uninterrupted local run, made once."""
    made = {}

    def get(method: str):
        if method not in made:
            made[method] = run(method, tmp_path_factory.mktemp("runs"))
        return made[method]

    return get


@every_method
def test_shapes_and_types_stay_and_something_is_learned(method, finished):
    result = finished(method)
    first = world_of(study_of(method, "x").model_dump_json()).network.initial(3)
    server = {n.removeprefix("server/tensors/"): t for n, t in final(result).items() if n.startswith("server/tensors/")}
    assert {n: (t.shape, t.dtype) for n, t in server.items()} == {n: (t.shape, t.dtype) for n, t in first.items()}
    losses = [row["train_loss"] for row in rows(result)]
    assert losses[-1] < (log(10) if method in AFRESH else losses[0])


@every("processes", "ray", whole="processes")
def test_engines_agree_bit_for_bit(method, engine, finished, tmp_path):
    other = run(method, tmp_path, engine)
    assert other.summary["engine"] == engine
    same(final(finished(method)), final(other))
    assert rows(finished(method)) == rows(other)
    assert ledger(finished(method)) == ledger(other)


@every("ray")
def test_sums_in_a_tree_agree(method, engine, finished, tmp_path):
    """One round: sums in float64 in another order differ in the last bits of a float32 at most."""
    exact, tree = (run(method, tmp_path, engine, engine={"reduce": how}, run={"rounds": 1}) for how in ("flat", "tree"))
    found = final(tree)
    for name, tensor in final(exact).items():
        if name.startswith("server/tensors"):
            assert torch.allclose(tensor.double(), found[name].double(), rtol=1e-6, atol=1e-6), name
    assert [row["client"] for row in exact.rows("clients")] == [row["client"] for row in tree.rows("clients")]


@every("local", "processes", "ray")
def test_resumed_equals_uninterrupted(method, engine, finished, tmp_path):
    def stop(row):
        if row["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        run(method, tmp_path, engine, watch=stop)
    result = start.resume(stopped.value.folder)
    same(final(finished(method)), final(result))
    assert rows(finished(method)) == rows(result)


@every_method
def test_order_of_clients_does_not_matter(method, finished, tmp_path, monkeypatch):
    straight, forward = final(finished(method)), Local.run  # before the patch, which all later tests would see in it

    def backward(self, tasks):
        return forward(self, reversed(list(tasks)))

    monkeypatch.setattr(Local, "run", backward)
    turned = final(run(method, tmp_path))
    for name, tensor in straight.items():
        # Sums in float64 in another order may differ in the last bit of a float32; training then amplifies it.
        assert torch.allclose(tensor.double(), turned[name].double(), rtol=1e-3, atol=1e-4, equal_nan=True), name


@pytest.fixture
def recorded(monkeypatch):
    """All (task, outcome) pairs of local runs."""
    pairs, plain = [], Local.run

    def record(self, tasks):
        kept = []

        def noted():
            for task in tasks:
                kept.append(task)
                yield task

        for outcome in plain(self, noted()):
            pairs.append((arrived(kept.pop(0), self.place.network), outcome))
            yield outcome

    monkeypatch.setattr(Local, "run", record)
    return pairs


def flat(tree):
    found = []
    skeleton = wire._flatten(tree, lambda tensor, path: found.append(tensor) or len(found))
    return skeleton, found


@every_method
def test_wire_round_trip_and_ledger_bytes(method, recorded, tmp_path):
    result = run(method, tmp_path, run={"rounds": 2})
    assert recorded
    for task, outcome in recorded:
        for message in (task, outcome.report):
            frame = wire.pack(message)
            (skeleton, tensors), (again, copies) = flat(message), flat(wire.unpack(frame))
            assert skeleton == again
            assert all(torch.equal(one, two) for one, two in zip(tensors, copies, strict=True))
        assert outcome.download_bytes == len(wire.pack(task))
        assert outcome.upload_bytes == task.copies * len(wire.pack(outcome.report))
    work = [outcome for _, outcome in recorded if outcome.job == "work"]
    assert sum(row["upload_bytes"] for row in rows(result)) == sum(outcome.upload_bytes for outcome in work)
    assert sum(row["download_bytes"] for row in rows(result)) == sum(outcome.download_bytes for outcome in work)


@every_method
def test_private_state_never_in_a_report(method, recorded, tmp_path, monkeypatch):
    canary, load = 12345.678, States.load
    monkeypatch.setattr(States, "load", lambda self, *which: load(self, *which) | {"canary": torch.full((3,), canary)})
    run(method, tmp_path, run={"rounds": 2})
    mark = struct.pack("<f", canary)
    world = world_of(study_of(method, "x").model_dump_json())
    private = world.method.share.private(world.network)
    for _, outcome in recorded:
        assert mark not in wire.pack(outcome.report)
        assert "canary" not in repr(flat(outcome.report)[0])
        assert not private & outcome.report.tensors.keys()


@every_method
def test_server_code_never_touches_client_data(method, finished, tmp_path, monkeypatch):
    started = Processes.__init__

    def poisoned(self, factory, workers=0):
        started(self, factory, workers)
        world = factory()
        _ = world.images  # its normalisation belongs to the study, not to the data of clients
        rows_of_clients = np.concatenate([world.split.train.rows, world.split.validation.rows])
        world.dataset.x[rows_of_clients] = 0  # only here: the workers were forked before
        world.dataset.y[rows_of_clients] = 0

    monkeypatch.setattr(Processes, "__init__", poisoned)
    for cache in (world_of, dataset_of):
        cache.cache_clear()
    result = run(method, tmp_path, "processes")
    for cache in (world_of, dataset_of):
        cache.cache_clear()
    same(final(finished(method)), final(result))


@every("local", "processes", "ray", methods=[name for name in METHODS if not find("method", name).pooled])
def test_survives_failing_slow_and_mad_clients(method, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(World, "elsewhere", elsewhere)
    monkeypatch.setattr(World, "jobs", property(faulty))
    result = run(method, tmp_path, engine, engine={"quorum": 0.2}, run={"rounds": 2})
    found = result.rows("clients")
    kinds = {(entry["client"], entry["failed"]) for entry in found if entry["job"] == "work"}
    assert {(0, "raised"), (1, "late"), (2, "nonsense"), (3, ""), (4, "")} == kinds
    assert all(bool(torch.isfinite(t).all()) for n, t in final(result).items() if n.startswith("server/tensors"))
    assert result.summary["failures"] == sum(entry["failed"] != "" for entry in found)
