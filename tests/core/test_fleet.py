"""What the server half sees: reports in order, failures as values, nothing of a round that did not finish."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch

from fedloom.encoding import Sparse
from fedloom.errors import RunError
from fedloom.fleet.fleet import Fleet
from fedloom.fleet.nonsense import Form, looked_at, nonsense
from fedloom.policies.merge import Mean
from fedloom.policies.select import Uniform
from fedloom.types import Named, Report, Server, Train
from tests.core.small import Normed, Place, Plain, fleet_of, images_of, network_of

NETWORK, IMAGES = network_of(Normed), images_of()


def fleet_with(work, clients=4, quorum=0.5):
    place = Place(NETWORK, IMAGES, [range(5 * each, 5 * each + 5) for each in range(clients)], {"work": work})
    return fleet_of(place, quorum=quorum)


def good_report(number):
    return Report({"last.bias": torch.zeros(3)}, 5.0, {"loss": 1.0 + number, "squared_loss": 2.0})


def good(client):
    return good_report(client.id)


def work_that(returns):
    def work(client, task):
        return returns(client)
        yield

    return work


def run(fleet):
    return list(fleet.run(fleet.task(client) for client in range(fleet.size)))


def test_reports_come_in_the_order_of_the_tasks_and_say_whose_they_are():
    assert [report.client for report in run(fleet_with(work_that(good)))] == [0, 1, 2, 3]


def test_a_failure_is_kept_and_the_round_goes_on():
    def faulty(client):
        if client.id == 1:
            raise RuntimeError("broken")
        if client.id == 2:
            raise TimeoutError("slow")
        return good(client)

    fleet = fleet_with(work_that(faulty))
    assert [report.client for report in run(fleet)] == [0, 3]
    one, two = fleet.failed
    assert (one.client, one.kind, one.message) == (1, "raised", "RuntimeError: broken")
    assert "faulty" in one.trace
    assert (two.client, two.kind) == (2, "late")
    assert [entry["failed"] for entry in fleet.ledger] == ["", "raised", "late", ""]


def test_below_the_quorum_the_run_ends_with_a_sentence():
    def faulty(client):
        if client.id != 2:
            raise RuntimeError(f"no power at {client.id}")
        return good(client)

    with pytest.raises(RunError) as error:
        run(fleet_with(work_that(faulty)))
    assert str(error.value) == (
        "round 1: 1 of 4 clients reported, the quorum is 50%; last failure: client 3 raised: "
        "RuntimeError: no power at 3. A new run with engine.quorum=0 lets such rounds pass"
    )
    assert "no power at 3" in error.value.trace


@pytest.mark.parametrize(
    ("failing", "quorum", "holds"), [(2, 0.5, True), (3, 0.5, False), (4, 0.0, True), (1, 1.0, False), (0, 1.0, True)]
)
def test_the_quorum_is_a_share_of_those_asked(failing, quorum, holds):
    def faulty(client):
        if client.id < failing:
            raise RuntimeError
        return good(client)

    fleet = fleet_with(work_that(faulty), quorum=quorum)
    if holds:
        assert len(run(fleet)) == 4 - failing
    else:
        with pytest.raises(RunError):
            run(fleet)


def test_exactly_the_quorum_is_enough():
    """0.14 * 50 is a little above 7 in binary."""

    def faulty(client):
        if client.id >= 7:
            raise RuntimeError
        return good(client)

    place = Place(NETWORK, IMAGES, [range(2)] * 50, {"work": work_that(faulty)})
    assert len(run(fleet_of(place, quorum=0.14))) == 7


def test_a_question_needs_no_quorum():
    def faulty(client):
        raise RuntimeError

    fleet = fleet_with(work_that(good))
    fleet.engine.place.jobs["evaluate"] = work_that(faulty)
    assert list(fleet.ask("evaluate", (fleet.task(client) for client in range(4)))) == []


def nan_of(name, value=torch.nan):
    return {name: torch.full(NETWORK.shapes()[name], value)}


HALF = {"first": torch.tensor([0, 1])}
NONSENSE = {
    "unknown name": (Report({"lost.bias": torch.zeros(3)}), "'lost.bias' is not in the model"),
    "shape": (Report({"last.bias": torch.zeros(4)}), r"shape \(4,\), expected \(3,\)"),
    "broadcast": (Report({"last.bias": torch.zeros(())}), r"shape \(\), expected \(3,\)"),
    "whole under a cut": (Report({"first.bias": torch.zeros(4)}, where=HALF), r"expected \(2,\)"),
    "cut without where": (Report({"first.bias": torch.zeros(2)}), r"expected \(4,\)"),
    "nan": (Report(nan_of("last.weight")), "not finite"),
    "inf": (Report(nan_of("last.weight", torch.inf)), "not finite"),
    "another part": (Report(extra={"control": nan_of("last.bias", 1.0)}), r"further parts are \['control'\]"),
    "nan number": (Report(numbers={"loss": float("nan")}), "number"),
    "inf weight": (Report(weight=float("inf")), "number"),
    "nan weight": (Report(weight=float("nan")), "number"),
    "negative weight": (Report(nan_of("last.bias", 1.0), weight=-5.0), "weight"),
    "unknown group": (Report({"first.bias": torch.zeros(2)}, where={"fist": torch.tensor([0, 1])}), ""),
    "units that do not rise": (Report({"first.bias": torch.zeros(2)}, where={"first": torch.tensor([1, 0])}), ""),
    "units beyond the group": (Report({"first.bias": torch.zeros(2)}, where={"first": torch.tensor([1, 9])}), ""),
    "too many units": (Report({"first.bias": torch.zeros(4)}, where={"first": torch.tensor([0, 1, 2, 2])}), ""),
    "class that does not exist": (Report({"last.bias": torch.zeros(3)}, classes=torch.tensor([0, 3])), "classes"),
    "a class twice": (Report({"last.bias": torch.zeros(3)}, classes=torch.tensor([0, 0])), "classes"),
    "classes that are no numbers": (Report({"last.bias": torch.zeros(3)}, classes=torch.tensor([0.0, 1.0])), "classes"),
    "a mask of units": (Report({"first.bias": torch.zeros(2)}, where={"first": torch.tensor([False, True])}), "rising"),
}


CONTROL = {"last.bias": torch.zeros(3)}
ASKED = Form({"loss": -inf, "squared_loss": 0.0}, extra={"control": CONTROL})
TOLD = Report({"last.bias": torch.zeros(3)}, 5.0, {"loss": -1.0, "squared_loss": 2.0}, extra={"control": CONTROL})
UNREADABLE = {  # such as nobody makes here, but another may send
    "no tensors": (replace(TOLD, tensors=5), "its 'tensors' is not Mapping"),
    "not a tensor": (replace(TOLD, tensors={"last.bias": 3.0}), "its 'tensors' is not Mapping"),
    "a number that is none": (replace(TOLD, numbers={"loss": "low", "squared_loss": 1.0}), "its 'numbers' is not"),
    "a number without a name": (replace(TOLD, numbers={("a", 1): 1.0}), "its 'numbers' is not"),
    "a number too large for a column": (replace(TOLD, numbers={"loss": 10**30}), "its 'numbers' is not"),
    "a number too large for a float": (replace(TOLD, numbers={"loss": 10**300}), "its 'numbers' is not"),
    "a truth for a weight": (replace(TOLD, weight=True), "its 'weight' is not float"),
    "half a letter": (replace(TOLD, numbers={**TOLD.numbers, "\ud800": 1.0}), "no text"),
    "a tensor's name that cannot be shown": (replace(TOLD, tensors={"\ud800\x1b[2J": torch.zeros(3)}), r"'\?\?\[2J'"),
    "a number left out": (replace(TOLD, numbers={"loss": 1.0}), "does not tell 'squared_loss'"),
    "a number that cannot be": (replace(TOLD, numbers={"loss": 1.0, "squared_loss": -1.0}), "at least 0 is possible"),
    "a part left out": (replace(TOLD, extra={}), r"further parts are \[\], expected \['control'\]"),
    "a tensor of a part left out": (replace(TOLD, extra={"control": {}}), "holds no 'last.bias'"),
    "a tensor that is not of a part": (
        replace(TOLD, extra={"control": CONTROL | nan_of("first.bias", 1.0)}),
        "'first.bias' was not asked for",
    ),
    "nan in a part": (replace(TOLD, extra={"control": nan_of("last.bias")}), "not finite"),
    "units where all are trained": (replace(TOLD, where=HALF), "trained whole"),
    "a shape of letters": (replace(TOLD, tensors={"last.bias": Sparse("xy", torch.ones(1), torch.zeros(1))}), "shape"),
    "places that do not fit": (
        replace(TOLD, tensors={"last.bias": Sparse((3,), torch.ones(2), torch.tensor([7, 8], dtype=torch.int32))}),
        "cannot be read",
    ),
    "more places than values": (
        replace(TOLD, tensors={"last.bias": Sparse((3,), torch.ones(2), torch.tensor([0], dtype=torch.int32))}),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_was_sent_is_nonsense_unless_it_is_what_was_asked_for(kind):
    bad, reason = UNREADABLE[kind]
    assert nonsense(TOLD, NETWORK, ASKED) == ""
    assert re.search(reason, nonsense(bad, NETWORK, ASKED))


def test_numbers_whose_squares_overflow_are_refused_for_that():
    large, empty = Report(nan_of("last.weight", 1e30)), Report({"last.bias": torch.empty(0)})
    assert looked_at([large, None, Report(nan_of("last.weight")), empty]) == [False, None, False, True]
    assert nonsense(large, NETWORK) == "a tensor is not finite, or the sum of its squares is not"


def test_who_looked_at_a_report_where_it_was_made_spares_the_server_its_decoding(monkeypatch):
    report = Report({"last.bias": Sparse.of(torch.tensor([0.0, 1.0, 2.0]))})
    monkeypatch.setattr(Sparse, "decode", lambda self: 1 / 0)
    assert nonsense(report, NETWORK, sound=True) == ""
    assert "ZeroDivisionError" in nonsense(report, NETWORK)


def test_a_report_that_is_not_what_it_says_fails_where_it_is_made():
    """Other processes and machines would not take it."""
    fleet = fleet_with(work_that(lambda client: Report(numbers={"loss": "low"}) if client.id == 1 else good(client)))
    assert [report.client for report in run(fleet)] == [0, 2, 3]
    (failure,) = fleet.failed
    assert (failure.kind, failure.message) == (
        "raised", "TypeError: 'numbers' of a Report is not Mapping[str, float]",
    )  # fmt: skip


def test_a_report_that_does_not_count_leaves_no_numbers_in_the_ledger():
    bad = replace(good_report(1), tensors={"lost.bias": torch.zeros(3)}, numbers={"loss": 1.0, "made up": 2.0})
    fleet = fleet_with(work_that(lambda client: bad if client.id == 1 else good(client)))
    run(fleet)
    entry = next(entry for entry in fleet.ledger if entry["client"] == 1)
    assert "made up" not in entry
    assert (entry["parameters"], entry["failed"]) == (0, "nonsense")


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_costs_one_client_and_never_the_round(kind):
    bad, reason = NONSENSE[kind]
    fleet = fleet_with(work_that(lambda client: bad if client.id == 1 else good(client)))
    joined = Mean().begin(Server(0, NETWORK.initial(0), NETWORK))
    for report in fleet.run(fleet.task(client) for client in range(4)):
        assert report.client != 1
        joined.add(report)
    joined.result()
    (failure,) = fleet.failed
    assert (failure.client, failure.kind) == (1, "nonsense")
    assert re.search(reason, failure.message)


def test_clients_that_work_side_by_side_are_looked_at_once(monkeypatch):
    """A look at a GPU's numbers waits for it."""
    looks, norm = [], torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda tensors: (looks.append(len(tensors)), norm(tensors))[1])
    fleet = fleet_with(work_that(lambda client: Report(nan_of("last.bias")) if client.id == 2 else good(client)))
    fleet.engine.place.trainer.window = 4
    assert [report.client for report in run(fleet)] == [0, 1, 3]
    assert [(each.client, each.message) for each in fleet.failed] == [
        (2, "a tensor is not finite, or the sum of its squares is not")
    ]
    assert looks == [4]


class Unheard:
    """Nothing that could travel."""


@pytest.mark.parametrize("report", [None, 3, Report({"last.bias": Unheard()}), Report(numbers={"a": Unheard()})])
def test_a_report_that_cannot_travel_costs_one_client(report):
    fleet = fleet_with(work_that(lambda client: report if client.id == 1 else good(client)))
    assert [each.client for each in run(fleet)] == [0, 2, 3]
    assert [failure.client for failure in fleet.failed] == [1]


def test_columns_learn_of_a_round_once_it_counts():
    fleet = fleet_with(work_that(good))
    before = {name: column.copy() for name, column in fleet.columns.items()}
    run(fleet)
    assert all(np.array_equal(column, before[name], equal_nan=True) for name, column in fleet.columns.items())
    assert fleet.accepted(2) == (0, 0)
    fleet.commit()
    assert fleet.columns["loss"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert fleet.columns["round"].tolist() == [0, 0, 0, 0]
    assert (fleet.columns["seconds"] > 0).all()


def test_an_interrupted_round_leaves_no_trace():
    def stop(client):
        if client.id == 1:
            raise RuntimeError("broken")
        if client.id == 3:
            raise KeyboardInterrupt
        return good(client)

    fleet = fleet_with(work_that(stop))
    before = {name: column.copy() for name, column in fleet.columns.items()}
    with pytest.raises(KeyboardInterrupt):
        run(fleet)
    fleet.begin(0, Train())
    assert fleet.accepted(0) == (-1, 0)
    fleet.commit()
    assert all(np.array_equal(column, before[name], equal_nan=True) for name, column in fleet.columns.items())
    assert fleet.failed == [], (
        "the failure belongs to a round that never counted, and comes again when it is done again"
    )


def test_failed_clients_teach_nothing():
    fleet = fleet_with(work_that(lambda client: NONSENSE["nan number"][0] if client.id == 1 else good(client)))
    run(fleet)
    fleet.commit()
    assert fleet.columns["round"].tolist() == [0, -1, 0, 0]
    assert np.isnan(fleet.columns["loss"][1])


def test_a_clients_numbers_do_not_overwrite_the_ledger():
    lies = {"upload_bytes": 0, "client": 99, "failed": 3, "seconds": 0.0, "macs": 7, "job": 1}
    fleet = fleet_with(work_that(lambda client: Report({"last.bias": torch.zeros(3)}, 1.0, lies)))
    run(fleet)
    for client, entry in enumerate(fleet.ledger):
        assert entry["client"] == client
        assert entry["upload_bytes"] > 12
        assert (entry["job"], entry["macs"], entry["failed"]) == ("work", 0, "")
        assert entry["seconds"] > 0


def test_state_of_a_report_that_did_not_count_is_forgotten():
    seen = {}

    def work(client, task):
        seen[client.id, task.round] = dict(client.state)
        client.state["count"] = client.state.get("count", 0) + 1
        bad = client.id == 1 and task.round == 1
        return Report({"last.bias": torch.full((3,), torch.nan if bad else 0.0)}, 1.0)
        yield

    fleet = fleet_with(work)
    for round in range(3):
        fleet.begin(round, Train())
        run(fleet)
        fleet.commit()
    assert [seen[0, round].get("count", 0) for round in range(3)] == [0, 1, 2]
    assert [seen[1, round].get("count", 0) for round in range(3)] == [0, 1, 1]


def test_a_questions_state_is_forgotten():
    def question(client, task):
        client.state["asked"] = True
        return Report()
        yield

    fleet = fleet_with(work_that(good))
    fleet.engine.place.jobs["evaluate"] = question
    list(fleet.ask("evaluate", [fleet.task(0)]))
    assert fleet.engine.states.load(0, (9, 0)) == {}


def test_bookkeeping_of_a_hundred_thousand_clients_takes_under_a_second_a_round():
    size = 100_000
    columns = {"samples": np.ones(size), "capacity": np.ones(size), "availability": np.full(size, 0.9)}
    fleet = Fleet(columns, None, None, None, seed=0, names=(Named("a"), Named("b")))
    begin = time.perf_counter()
    fleet.begin(1, Train())
    cohort = Uniform(0.01)(fleet, None)
    assert len([fleet.task(client) for client in cohort]) == 1000
    fleet._news = {int(client): ((1, 0), {"loss": 1.0}) for client in cohort}
    fleet.commit()
    assert time.perf_counter() - begin < 1


def test_a_task_does_not_start_from_what_the_same_call_brought():
    """A client that is asked twice in one call is asked the same, whatever an engine pulls ahead."""

    def echo(client, task):
        return Report(numbers={"round": float(task.accepted[0])})
        yield

    place = Place(network_of(Plain), images_of(), [range(2)] * 2, {"work": echo})
    fleet = fleet_of(place)
    told = [report.numbers["round"] for report in fleet.run(fleet.task(client) for client in (0, 1, 0, 1))]
    assert told == [-1.0] * 4
    assert fleet.accepted(0) == (0, 0)
