"""Selections in real runs: under every method, with no extra message, through an interruption."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fedloom.errors import Interrupted
from fedloom.method import Method
from fedloom.registry import entries, find
from fedloom.runs import start
from tests.contract.study import final, rows
from tests.contract.study import run as run_small
from tests.methods.tiny import run, same
from tests.selection.fleets import RULES

IDLE = "tests.methods.tiny:Idle"
PAPERS = ["chfl", "powd", "oort", "tifl"]


def selects(name):
    """Whether a method has a server that chooses: no ring, and no bound that has all data in one place."""
    method = find("method", name)
    return method.round is not Method.round and not method.pooled


METHODS = [name for name, entry in sorted(entries("method").items())
           if entry.path.startswith("fedloom.") and selects(name)]  # fmt: skip
QUICK = ("fedavg", "fednova", "scaffold", "fedadam", "fedbn", "heterofl", "feddse", "fedgse", "local")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


def work(result):
    return [entry for entry in result.rows("clients") if entry["job"] == "work"]


def test_there_are_methods_of_every_kind():
    assert {"fedavg", "fedprox", "fednova", "scaffold", "feddse", "heterofl", "depthfl"} <= set(METHODS)


@pytest.mark.parametrize("method", EVERY)
def test_chfl_under_every_method(method, tmp_path):
    select = {"name": "chfl", "fraction": 0.4, "scored_share": 1.0, "eta": 50.0}
    result = run_small(method, tmp_path, select=select, evaluate={"every": 3})
    asked = [{entry["client"] for entry in work(result) if entry["round"] == round} for round in range(3)]
    assert [len(each) for each in asked] == [2, 2, 2]
    assert not asked[0] & asked[1], "whoever was never seen comes first"
    assert len(asked[0] | asked[1] | asked[2]) == 5


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("method", ["fedavg", "feddse", "fedbn"])
def test_every_rule_under_whole_models_cuts_and_own_norms(method, name, tmp_path):
    result = run_small(method, tmp_path, select={"name": name, "fraction": 0.4}, evaluate={"every": 3})
    assert [sum(entry["round"] == round for entry in work(result)) for round in range(3)] == [2, 2, 2]
    assert result.summary["failures"] == 0


@pytest.mark.parametrize("name", PAPERS)
def test_an_interruption_changes_nothing(name, tmp_path):
    study = {"select": {"name": name, "fraction": 0.4}, "fleet": {"name": "mixed", "clients": 5}, "run": {"rounds": 6},
             "evaluate": {"every": 6}}  # fmt: skip
    if name == "tifl":
        study["select"] |= {"interval": 1, "judge": "accuracy"}
    if name == "oort":
        study["select"] |= {"window": 1}
    whole = run_small("fedavg", tmp_path / "whole", **study)

    def stop(row):
        if row["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        run_small("fedavg", tmp_path / "parts", watch=stop, **study)
    again = start.resume(stopped.value.folder)
    assert rows(whole) == rows(again)
    one, two = ({n: t.nan_to_num(-1) for n, t in final(each).items()} for each in (whole, again))
    same(one, two)


def frames(result):
    """Bytes of every task and report, but for the digits of what tasks name: client, round, last accepted round."""
    last, found = {}, set()
    for entry in work(result):
        client, round = entry["client"], entry["round"]
        digits = len(f"{client}{round}{last.get(client, -1)}")
        found.add((entry["download_bytes"] - digits, entry["upload_bytes"] - len(f"{client}")))
        last[client] = round
    return found


@pytest.mark.parametrize("name", [name for name in RULES if name != "uniform"])
def test_selection_costs_no_extra_byte_and_no_extra_message(name, tmp_path):
    """Per round the ledger of every rule that does not ask is the one of uniform selection."""
    fleet = {"name": "mixed", "clients": 8}
    plan = {"fleet": fleet, "partition": {"name": "iid"}, "run": {"rounds": 8}, "evaluate": {"every": 8}}
    other = run(IDLE, tmp_path, select={"name": name, "fraction": 0.25, **RULES[name]}, **plan)
    uniform = run(IDLE, tmp_path, select={"name": "uniform", "fraction": 0.25}, **plan)
    assert len(frames(other)) == 1
    assert frames(other) == frames(uniform)
    ledgers = [[(e["round"], e["job"]) for e in each.rows("clients")] for each in (other, uniform)]
    assert ledgers[0] == ledgers[1], "as many messages of the same kinds in every round"
    for one, two in zip(rows(other), rows(uniform), strict=True):
        assert one["upload_bytes"] == two["upload_bytes"]
        assert abs(one["download_bytes"] - two["download_bytes"]) <= 2, "a client never seen is told -1, two digits"
    asked = [[(e["round"], e["client"]) for e in work(each)] for each in (other, uniform)]
    assert asked[0] != asked[1], "the rule does choose otherwise"


def test_the_same_clients_cost_the_same_whoever_chose_them(tmp_path):
    """Real training of all clients: byte for byte, bit for bit."""
    chosen = run("fedavg", tmp_path, select={"name": "chfl", "fraction": 1.0})
    everybody = run("fedavg", tmp_path, select={"name": "uniform", "fraction": 1.0})
    assert rows(chosen) == rows(everybody)


def test_the_indicator_is_the_root_mean_square_of_the_first_epoch(tmp_path):
    """A rate too small to matter: the mean squared loss of the first epoch is that of the model that was sent."""
    result = run("fedavg", tmp_path, train={"lr": 1e-12, "epochs": 2}, run={"rounds": 2})
    first, second = ([entry["squared_loss"] for entry in work(result) if entry["round"] == round] for round in (0, 1))
    assert first == pytest.approx(second, rel=1e-6)
    columns = {name.removeprefix("fleet/"): t.numpy() for name, t in final(result).items() if name.startswith("fleet/")}
    assert columns["squared_loss"] == pytest.approx(second)
    assert (columns["squared_loss"] > columns["loss"] ** 2).all(), "Jensen: not the square of the mean"


def test_asking_costs_traffic_and_time(tmp_path):
    plan = {"fleet": {"name": "mixed", "clients": 8}, "run": {"rounds": 2}, "evaluate": {"every": 2}}
    asking = run("fedavg", tmp_path, select={"name": "powd", "fraction": 0.25}, **plan)
    silent = run("fedavg", tmp_path, select={"name": "powd", "fraction": 0.25, "ask": False}, **plan)
    questions = [entry for entry in asking.rows("clients") if entry["job"] == "loss" and entry["round"] == 0]
    trained = [entry for entry in work(asking) if entry["round"] == 0]
    assert len(questions) == 4
    assert {entry["client"] for entry in trained} == {
        entry["client"] for entry in sorted(questions, key=lambda entry: entry["loss"])[-2:]
    }
    row = asking.rows("metrics")[0]
    assert row["download_bytes"] == sum(entry["download_bytes"] for entry in questions + trained)
    slowest = [max(entry["virtual_seconds"] for entry in each) for each in (questions, trained)]
    assert row["virtual_seconds"] == pytest.approx(sum(slowest))
    assert row["clients"] == 2
    assert row["download_bytes"] > silent.rows("metrics")[0]["download_bytes"]


def test_asked_losses_are_those_of_the_global_model(tmp_path):
    """Both rules see the same loss: the one that is asked for, and the first batch's of who then trains."""
    plan = {"select": {"name": "powd", "fraction": 1.0}, "train": {"lr": 1e-12, "batch_size": 1000}}
    result = run("fedavg", tmp_path, **plan)
    told = {(e["round"], e["client"]): e["loss"] for e in result.rows("clients") if e["job"] == "loss"}
    trained = {(e["round"], e["client"]): e["loss"] for e in work(result)}
    assert told == pytest.approx(trained, rel=1e-9)


def test_tifl_is_told_what_an_evaluation_of_the_same_server_gives(tmp_path):
    """Statistics of norms that training leaves out are filled in before models are judged."""
    select = {"name": "tifl", "fraction": 0.5, "tiers": 2, "interval": 1, "judge": "accuracy"}
    fleet = {"name": "mixed", "clients": 4, "capacities": [1.0, 0.5]}
    plan = {"select": select, "fleet": fleet, "data": {"limit": 400}, "run": {"rounds": 6}, "evaluate": {"every": 1}}
    result = run("heterofl", tmp_path, model={"name": "lenet5_bn", "hidden": None}, **plan)
    told = [[entry["accuracy"] for entry in result.rows("clients")
             if (entry["job"], entry["round"]) == ("evaluate", round)] for round in range(6)]  # fmt: skip
    assert [len(each) for each in told] == [4, 4, 4, 8, 8, 8], "two rounds to know everybody, one before a tier is used"
    for before, after in pairwise(told[2:]):
        assert after[:4] == before[-4:]
    assert len({tuple(each) for each in told[2:]}) > 1, "the models do differ"


def test_the_late_are_known_to_be_slow(tmp_path):
    """Whoever misses the deadline is remembered with it, so that rules stop taking it for never seen."""
    fleet = {"name": "mixed", "clients": 5, "spread": 50.0}
    times = {e["client"]: e["virtual_seconds"] for e in work(run("fedavg", tmp_path, fleet=fleet))}
    deadline = float(np.median(list(times.values()))) * 1.01
    result = run("fedavg", tmp_path, fleet={**fleet, "deadline": deadline}, engine={"quorum": 0.1})
    columns = {n.removeprefix("fleet/"): t.numpy() for n, t in final(result).items() if n.startswith("fleet/")}
    late = [client for client, seconds in times.items() if seconds > deadline]
    assert len(late) == 2
    assert columns["seconds"][late].tolist() == [deadline] * 2
    assert np.isnan(columns["loss"][late]).all()
    assert (columns["asked"] == 1).all()
    assert (columns["round"][late] == -1).all()


def test_time_makes_chfl_fast_and_as_printed_slow(tmp_path):
    """Time alone, sharply: rounds as short as the two fastest, or as long as the slowest, once all are known."""
    fleet, spent = {"name": "mixed", "clients": 8, "spread": 50.0}, {}
    for sense in ("fast_first", "as_printed"):
        select = {"name": "chfl", "fraction": 0.25, "scored_share": 1.0, "eta": 1e6, "indicators": ["time"],
                  "time_sense": sense}  # fmt: skip
        plan = {"fleet": fleet, "select": select, "run": {"rounds": 6}, "evaluate": {"every": 6}}
        result = run(IDLE, tmp_path / sense, partition={"name": "iid"}, **plan)
        spent[sense] = [row["virtual_seconds"] for row in result.rows("metrics")]
    assert max(spent["fast_first"][4:]) < min(spent["as_printed"][4:])
    assert max(spent["as_printed"][4:]) == pytest.approx(max(spent["as_printed"]), rel=1e-3)
