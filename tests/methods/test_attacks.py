"""One bad client among ten, on real pictures; robust merges in runs, on engines, under other policies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from fedloom.engine.local import Local
from fedloom.methods.fedavg import FedAvg
from tests.cli.conftest import command  # noqa: F401 (a fixture)
from tests.contract.study import final, rows
from tests.methods.tiny import NORMED, run, same

MERGES = [{"name": "median"}, {"name": "trimmed", "share": 0.1}, {"name": "krum"}, {"name": "krum", "keep": 4}]
every_merge = pytest.mark.parametrize("merge", MERGES, ids=lambda merge: " ".join(map(str, merge.values())))
FEDERATION = {
    "data": {"limit": None, "validation": 0.1}, "partition": {"name": "dirichlet:1.0"}, "fleet": {"clients": 10},
    "model": {"hidden": [32]}, "engine": {"precision": "float32"}, "run": {"rounds": 12}, "evaluate": {"every": 12},
}  # fmt: skip
SMALLER = {"fleet": {"clients": 6}, "data": {"limit": 300}}


@dataclass(frozen=True)
class Attacked(FedAvg):
    """Client 3 sends a thousand times its update, backwards."""

    def report(self, client, fit, where=None):
        honest = super().report(client, fit, where)
        if client.id != 3:
            return honest
        sent = client.received()
        back = {name: sent[name] - 1000 * (tensor - sent[name]) for name, tensor in honest.tensors.items()}
        return replace(honest, tensors=back)


def accuracy(tmp_path, method=f"{__name__}:Attacked", **changes):
    return run(method, tmp_path, **FEDERATION, **changes).summary["global_accuracy"]


def test_the_mean_breaks(tmp_path):
    assert accuracy(tmp_path) < 0.3
    assert accuracy(tmp_path, "fedavg") > 0.9


@every_merge
def test_robust_merges_learn(merge, tmp_path):
    assert accuracy(tmp_path, merge=merge) > 0.75


@every_merge
@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_engines_agree_bit_for_bit(method, merge, tmp_path):
    alone = run(method, tmp_path, merge=merge, **SMALLER, **NORMED)
    model, engine = NORMED["model"], {**NORMED["engine"], "name": "processes", "workers": 2}
    apart = run(method, tmp_path, merge=merge, **SMALLER, model=model, engine=engine)
    same(*({name: t.nan_to_num(-1) for name, t in final(each).items()} for each in (alone, apart)))
    assert rows(alone) == rows(apart)


@every_merge
def test_the_order_of_reports_does_not_change_a_bit(merge, tmp_path, monkeypatch):
    straight, forward = run("fedavg", tmp_path, merge=merge, **SMALLER), Local.run
    monkeypatch.setattr(Local, "run", lambda self, tasks: forward(self, reversed(list(tasks))))
    same(final(straight), final(run("fedavg", tmp_path, merge=merge, **SMALLER)))


@pytest.mark.parametrize("method", ["heterofl", "fedes", "fedgse", "fedea", "tfedavg", "fednova", "perfedavg"])
def test_under_other_methods(method, tmp_path):
    study = {"fleet": {"name": "mixed", "clients": 6, "capacities": [0.25, 0.5, 1.0], "weak": "ignore"}}
    study |= {"data": {"limit": 300, "public": 40, "validation": 0.1}, "model": {"hidden": [12, 12]}}
    own = {"fedea": {"population": 2, "rounds_each": 1}, "tfedavg": {"layers": "all"}}.get(method, {})
    for name in ("median", "trimmed"):
        result = run(method, tmp_path, method=own, merge={"name": name, "by_class": True}, **study)
        assert result.summary["rounds"] == 2


def krum(command, *settings):  # noqa: F811 (the fixture)
    return command("run", "fedavg", "--model", "mlp", "--rounds", "1", "--set", "merge.name=krum", "--set",
                   "data.limit=60", "--engine", "local", *settings)  # fmt: skip


def test_a_cohort_too_small_for_the_merge_is_refused_before_the_run(command):  # noqa: F811 (the fixture)
    ended = krum(command, "--clients", "4")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("fedloom: krum with attackers = 1 and keep = 1 needs at least 5 ")


def test_too_few_reports_end_a_run_with_a_sentence(command):  # noqa: F811 (the fixture)
    ended = krum(command, "--clients", "6", "--set", "fleet.dropout=0.5", "--set", "engine.quorum=0", "--seed", "3")
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("fedloom: round 1: krum with attackers = 1 and keep = 1 needs at ")
    assert "Traceback" not in ended.err
