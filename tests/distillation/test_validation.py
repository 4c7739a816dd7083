"""What decides about mu0 and lambda is validation data, and nothing ever looks at test data but evaluation."""

from __future__ import annotations

import pytest
import torch

from fedloom.engine import local
from fedloom.engine.reference import Reference
from fedloom.engine.worker import perform
from fedloom.runs.world import dataset_of, world_of
from fedloom.types import Fit
from tests.contract.study import final
from tests.distillation.test_ring import VALID
from tests.methods.tiny import run, same, world

METHODS = [("fedckd", {"mu0": 0.1}), ("fedrkd", {}), ("metafed", {"warm_up": 1, "threshold": 0.2})]
each_method = pytest.mark.parametrize(("method", "own"), METHODS)


@each_method
def test_work_reads_training_and_validation_rows_alone(method, own, tmp_path, monkeypatch):
    """Every row that a request of a client's work names, and whose it is."""
    seen: list[tuple[str, frozenset[int]]] = []
    solve, now = Reference.solve, {"job": ""}

    def performed(place, tasks):
        ((task, _),) = tasks  # the reference takes one client at a time
        now.update(job=task.job, world=place, client=task.client)
        outcomes = perform(place, tasks)
        now["job"] = ""
        return outcomes

    def watched(self, requests):
        if now["job"] == "work":
            split, client = now["world"].split, now["client"]
            for request in requests:
                fit = isinstance(request, Fit)
                used = torch.cat([row[0] for row in request.plan.steps]) if fit else request.samples.rows
                part = (split.train if fit else split.validation)[client]
                assert set(used.tolist()) <= set(part.tolist())
                seen.append(("fit" if fit else "measure", frozenset(used.tolist())))
        return solve(self, requests)

    monkeypatch.setattr(local, "perform", performed)
    monkeypatch.setattr(Reference, "solve", watched)
    run(method, tmp_path, method=own, **VALID)
    assert {kind for kind, _ in seen} == {"fit", "measure"}
    tested = set(now["world"].split.test.rows.tolist())
    assert tested
    assert not any(rows & tested for _, rows in seen)


@each_method
def test_other_test_data_change_nothing_that_is_learned(method, own, tmp_path):
    """Test images black and their labels wrong: all models, states and decisions stay bit for bit."""
    plain = run(method, tmp_path, method=own, **VALID)
    for cache in (world_of, dataset_of):
        cache.cache_clear()
    known = world(method, method=own, **VALID).dataset  # what the next run finds, too
    known.x[known.trained :] = 0
    known.y[known.trained :] = (known.y[known.trained :] + 1) % 10
    try:
        spoiled = run(method, tmp_path, method=own, **VALID)
    finally:
        for cache in (world_of, dataset_of):
            cache.cache_clear()
    assert spoiled.summary["local_accuracy"] != plain.summary["local_accuracy"]
    same(final(plain), final(spoiled))
