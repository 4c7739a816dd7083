"""The benches: they run at tiny scale, say what is missing, and their arithmetic is right."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch

from fedloom.bench import peers as bench_peers
from fedloom.bench.cutting import cutting
from fedloom.bench.federation import device_of, seconds_of_rounds
from fedloom.bench.memory import STUDY, grown, memory
from fedloom.bench.peers import SCRIPTS, compared, peers
from fedloom.bench.peers import plot as plot_peers
from fedloom.bench.scale import _macs, exponents, scale
from fedloom.bench.scale import plot as plot_scale
from fedloom.errors import InputError
from fedloom.models.resolve import build
from fedloom.units import macs


@pytest.fixture(scope="module")
def workload():
    spec = importlib.util.spec_from_file_location("workload", SCRIPTS / "workload.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["workload"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("work", ["W1", "W2", "W3"])
def test_peers_train_the_same_network(workload, work):
    """Same layers in the same order: equal weights give equal logits."""
    settings = workload.WORKS[work]
    theirs = workload.network(settings)
    ours = build(settings.model, channels=settings.shape[0], classes=10, size=settings.shape[1])
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.rand(2, *settings.shape)
    assert torch.equal(ours(x), theirs(x))


def test_fedloom_gets_the_same_work(workload):
    """Every client trains on exactly its share, in as many batches as at the peers."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        from with_fedloom import study
    finally:
        sys.path.remove(str(SCRIPTS))
    from argparse import Namespace

    from fedloom.runs.study import resolve
    from fedloom.runs.world import world_of

    asked = study(Namespace(work="W3", rounds=2, device="cpu"), "x")
    sys.path.insert(0, str(SCRIPTS))
    try:
        world = world_of(resolve(asked).model_dump_json())
    finally:
        sys.path.remove(str(SCRIPTS))
    assert set(world.split.train.sizes) == {20}


def test_missing_and_failing_peers_are_listed(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDLOOM_PEERS", raising=False)
    broken = bench_peers.Peer("broken", "with_nothing.py", "torch")
    absent = bench_peers.Peer("absent", "with_pfl.py", "no_such_package", "absent")
    ours = next(peer for peer in bench_peers.PEERS if peer.name == "fedloom")
    monkeypatch.setattr(bench_peers, "PEERS", (ours, broken, absent))
    rows = {row["peer"]: row for row in peers("cpu", "W0", rounds=2, repeats=1, environments=tmp_path)}
    assert rows["fedloom"]["status"] == "ran"
    assert rows["fedloom"]["seconds"] > 0
    assert rows["broken"]["status"].startswith("failed: ")
    assert rows["absent"]["status"] == "not installed"
    assert rows["absent"]["seconds"] is None
    plot_peers(list(rows.values()), tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 1000


def test_ratios_are_taken_within_a_repeat():
    def ran(*seconds):
        return {"status": "ran", "version": "1", "rounds": [9.0, *seconds], "cpu": [9.0, *seconds],
                "first_round_s": 1.0, "peak_bytes": 2e6}  # fmt: skip

    found = {"fedloom": [ran(1.0), ran(2.0), ran(4.0)], "other": [ran(3.0), ran(4.0), {"status": "failed: why"}]}
    ours, theirs = compared("W1", found)
    assert (ours["seconds"], ours["times fedloom's"]) == (2.0, 1.0)
    assert (theirs["seconds"], theirs["times fedloom's"]) == (3.5, 2.5)
    assert theirs["status"] == "1 of 3 failed: why"


def test_unknown_workload_and_device():
    with pytest.raises(InputError, match="W9"):
        peers("cpu", "W9")
    with pytest.raises(InputError, match="tpu"):
        device_of("tpu")


def test_scale_at_one_client(tmp_path, monkeypatch):
    monkeypatch.setattr("fedloom.bench.scale.WIDTHS", (0.0625, 0.125))
    monkeypatch.setattr("fedloom.bench.scale.STEPS", (1, 2))
    rows = scale("cpu", rounds=2, most=1)
    assert [row["size"] for row in rows if row["series"].startswith(("clients", "local"))] == [1, 1, 2]
    assert all(row["seconds"] > 0 for row in rows)
    plot_scale(rows, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 1000


def test_growth_is_counted_against_the_networks_own_macs():
    widths = (8, 16, 32, 64)
    module = build("cnn4", channels=1, classes=10, size=28, widths=list(widths))
    assert _macs(widths) == macs(module.eval(), torch.zeros(1, 1, 28, 28))
    assert exponents([(1, 1.0), (2, 4.0)]) == [None, 2.0]


def test_memory_is_looked_at_and_judged(monkeypatch):
    monkeypatch.setitem(STUDY, "engine", {"name": "local"})
    *rows, last = memory("cpu", rounds=6)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["process_mb"] > 50 for row in rows)
    assert last["round"] == "growth"
    assert grown([1, 1, 10, 10, 12, 12]) == (2, 0.2)


def test_cutting_is_a_part_of_a_round():
    rows = {row["part"]: row for row in cutting("cpu", rounds=2, samples=2, width=0.0625)}
    assert rows["cutting and merging"]["ms"] == pytest.approx(
        sum(rows[part]["ms"] for part in ("take", "put", "result"))
    )
    assert rows["whole round"]["share of a round"] == 1.0


def test_first_and_last_round_are_left_out(monkeypatch):
    seen = []
    study = {**STUDY, "engine": {"name": "local"}}
    assert len(seconds_of_rounds(study, 3, "cpu", seen.append)) == 3
    assert seen == [1, 2, 3]


def test_command_gives_json_and_refuses_what_a_bench_does_not_take(capsys, monkeypatch):
    from fedloom.cli import bench

    monkeypatch.setattr("fedloom.bench.memory.ROUNDS", {"cpu": 2})
    monkeypatch.setitem(STUDY, "engine", {"name": "local"})
    bench("memory", device="cpu", as_json=True)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["bench"] == "memory"
    assert told["machine"]["torch"] == torch.__version__
    with pytest.raises(InputError, match="reference takes no --rounds"):
        bench("reference", rounds=3)
    with pytest.raises(InputError, match="no picture"):
        bench("reference", plot="x.png")
