"""Clients with one sample: batch norm goes by two, also where nothing is trained but something is looked at."""

from __future__ import annotations

import pytest

from tests.methods.tiny import NORMED, run
from tests.submodels.federation import Federation

ONE_EACH = {
    "data": {"limit": 60, "validation": 0.34, "test": 0.33, "public": 6}, "partition": {"name": "iid"},
    "fleet": {"name": "high", "clients": 18}, "run": {"rounds": 1}, **NORMED,
}  # fmt: skip
LOOKING = {
    "heterofl": {}, "fedgse": {}, "fjord": {}, "feddse": {}, "fedes": {"cut": {"score": "activation"}},
    "fedavg": {"fleet": {"clients": 18}, "select": {"name": "powd", "fraction": 0.5}},
}  # fmt: skip


@pytest.mark.parametrize("method", LOOKING)
def test_scores_statistics_and_losses_of_one_sample_can_be_told(method, tmp_path):
    changes = ONE_EACH | LOOKING[method]
    assert (Federation(method, **changes).world.split.train.sizes == 1).any()
    result = run(method, tmp_path, **changes)
    assert not [entry for entry in result.rows("clients") if entry["failed"]]
    assert result.summary["global_accuracy"] is not None
