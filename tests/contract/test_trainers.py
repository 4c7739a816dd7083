"""The trainers that a method says it takes are those that really do its fits, and they give the reference's result."""

from __future__ import annotations

import pytest
import torch

from fedloom.engine.reference import Reference
from fedloom.engine.stacked import Stacked
from fedloom.registry import entries, find
from fedloom.types import Fit
from tests.contract.study import final, run


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
def test_listed_trainers_are_the_methods_own(method):
    assert tuple(entries("method")[method].trainers) == find("method", method).trainers
    assert "reference" in find("method", method).trainers
