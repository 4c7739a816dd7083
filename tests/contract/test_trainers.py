"""The trainers that a method says it takes are those that really do its fits, and they give the reference's result."""

from __future__ import annotations

import pytest
import torch

from fedloom.engine import taped
from fedloom.engine.graphs import Graphs, Machine
from fedloom.engine.reference import Reference
from fedloom.engine.stacked import Stack, Stacked
from fedloom.registry import entries, find
from fedloom.runs.world import World
from fedloom.types import Fit
from tests.contract.cuda import pretend
from tests.contract.study import final, run
from tests.methods.tiny import world


@pytest.fixture
def counted(monkeypatch):
    """How many fits were done together, and how many one by one."""
    numbers = {"together": 0, "alone": 0}
    together, solve = Stacked._together, Reference.solve

    def batched(self, fits, beats):
        answers = together(self, fits, beats)
        numbers["together"] += len(fits)
        return answers

    def one_by_one(self, requests):
        numbers["alone"] += sum(isinstance(request, Fit) for request in requests)
        return solve(self, requests)

    monkeypatch.setattr(Stacked, "_together", batched)
    monkeypatch.setattr(Reference, "solve", one_by_one)
    return numbers


@pytest.mark.parametrize("method", sorted(entries("method")))
def test_stacked_does_what_is_claimed_and_agrees(method, counted, tmp_path):
    # Whole models of equal size and equal plans: whatever can be stacked is.
    alike = {
        "fleet": {"name": "uniform", "clients": 4}, "partition": {"name": "iid"}, "run": {"rounds": 2},
        "train": {"momentum": 0.9, "weight_decay": 1e-3, "clip": 1.0},
    }  # fmt: skip
    ends = {}
    for trainer in ("reference", "stacked"):
        counted.update(together=0, alone=0)
        engine = {"trainer": trainer, "precision": "float64"}
        ends[trainer] = final(run(method, tmp_path / trainer, engine=engine, **alike))
    assert (counted["together"] > 0) == ("stacked" in find("method", method).trainers), counted
    for name, tensor in ends["reference"].items():
        if name.startswith("server/tensors/"):
            torch.testing.assert_close(ends["stacked"][name].double(), tensor.double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", sorted(entries("method")))
def test_taped_does_what_is_claimed_to_the_last_bit(method, monkeypatch, caplog, tmp_path):
    tapes: list[taped.Tape] = []
    begin = taped.Tape.__init__
    monkeypatch.setattr(taped.Tape, "__init__", lambda self: (begin(self), tapes.append(self))[0])
    monkeypatch.setattr(taped, "PATIENCE", 2)
    often = {"partition": {"name": "iid"}, "run": {"rounds": 4}}  # batches of equal size come again
    ends = [final(run(method, tmp_path / name, engine={"trainer": name}, **often)) for name in ("reference", "taped")]
    assert any(tape.trusted for tape in tapes) == ("taped" in find("method", method).trainers)
    assert not any(tape.refused for tape in tapes), caplog.text
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=0, atol=0, equal_nan=True)


def captured(monkeypatch, method, out, **study):
    """A run by the `graphs` trainer on a CUDA made of the CPU; what it ends with, and how many steps it captured."""
    captures, capture = [], Machine.capture
    with monkeypatch.context() as patch:
        pretend(patch)
        patch.setattr(World, "_trainer", lambda self, network: Graphs(network))
        patch.setattr(Machine, "capture", lambda self, kind: (captures.append(kind), capture(self, kind))[1])
        return final(run(method, out, **study)), len(captures)


PLAIN = {"precision": "float64", "trainer": "reference"}  # in float32 the reference lays pictures out otherwise


@pytest.mark.parametrize("method", sorted(entries("method")))
def test_graphs_give_the_reference_bits_where_the_kernels_are_the_same(method, monkeypatch, caplog, tmp_path):
    study = {
        "run": {"rounds": 2}, "train": {"momentum": 0.9, "weight_decay": 1e-3, "clip": 1.0}, "engine": PLAIN,
    }  # fmt: skip
    truth = final(run(method, tmp_path / "reference", **study))
    ends, captures = captured(monkeypatch, method, tmp_path / "graphs", **study)
    assert captures > 0
    assert "graphs:" not in caplog.text
    assert ends.keys() == truth.keys()
    for name, tensor in truth.items():
        if not name.startswith("fleet/"):  # sums of losses are rounded elsewhere, and travel
            torch.testing.assert_close(ends[name], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", ["fedavg", "fedckd", "fedcpn", "heterofl", "scaffold"])
def test_graphs_of_many_small_clients_are_stacked_and_agree(method, monkeypatch, caplog, tmp_path):
    study = {
        "fleet": {"name": "uniform", "clients": 9}, "partition": {"name": "iid"}, "run": {"rounds": 2}, "engine": PLAIN,
    }  # fmt: skip
    truth = final(run(method, tmp_path / "reference", **study))
    stacks, begin = [], Stack.__init__
    monkeypatch.setattr(Stack, "__init__", lambda self, *given: (stacks.append(1), begin(self, *given))[1])
    ends, _ = captured(monkeypatch, method, tmp_path / "graphs", **study)
    assert stacks
    assert "graphs:" not in caplog.text
    for name, tensor in truth.items():
        if name.startswith("server/tensors/"):
            torch.testing.assert_close(ends[name].double(), tensor.double(), rtol=0, atol=1e-9)


def test_a_method_that_leaves_taped_out_is_not_played(monkeypatch):
    assert world("fedavg").settled.engine.trainer == "taped"
    monkeypatch.setattr(find("method", "fedavg"), "trainers", ("reference",))
    assert world("fedavg", run={"seed": 9}).settled.engine.trainer == "reference"  # another study: worlds are kept


@pytest.mark.parametrize("method", sorted(entries("method")))
def test_listed_trainers_are_the_methods_own(method):
    assert tuple(entries("method")[method].trainers) == find("method", method).trainers
    assert "reference" in find("method", method).trainers
