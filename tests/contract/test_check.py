"""Every method's study can be checked before it is run."""

from __future__ import annotations

import pytest

from fedloom.registry import entries
from fedloom.runs.check import estimate
from fedloom.runs.world import world_of
from tests.contract.study import study_of


@pytest.mark.parametrize("method", sorted(entries("method")))
def test_costs_are_estimated(method, tmp_path):
    found = estimate(world_of(study_of(method, tmp_path).model_dump_json()))
    assert found["training MACs a round"] > 0
    assert found["time of a round (estimated), s"] > 0
