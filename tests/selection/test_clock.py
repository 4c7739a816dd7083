"""The virtual clock: presence by traces, distributions, stragglers, jitter, and devices that were measured."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.errors import InputError, Interrupted
from fedloom.fleet.profiles import DEVICES, LINES, measured, mixed
from fedloom.fleet.traces import SHAPES, presence, trace
from fedloom.runs import start
from tests.contract.study import rows
from tests.methods.tiny import run, study_of, world

IDLE = "tests.methods.tiny:Idle"
QUICK = {"partition": {"name": "iid"}, "evaluate": {"every": 20}}


def work(result):
    return [entry for entry in result.rows("clients") if entry["job"] == "work"]


def random():
    return np.random.default_rng(0)


def nobody_out(clients):
    return np.zeros(clients, bool)


# Client 0 is there from 10 to 30 of 24 (so also from 0 to 6), client 1 from 20 to 22.
WINDOWS = {"windows": np.array([[[10.0, 30.0]], [[20.0, 22.0]]]), "period": np.array([24.0, 24.0])}


@pytest.mark.parametrize(
    ("now", "waited", "leaves"),
    [
        (10, 0, [20, -np.inf]),
        (21, 0, [9, 1]),
        (22, 0, [8, -np.inf]),
        (25, 0, [5, -np.inf]),
        (5.5, 0, [0.5, -np.inf]),
        (7, 3, [23, -np.inf]),
        (6, 4, [24, -np.inf]),
        (24 * 1000 + 7, 3, [23, -np.inf]),
    ],
)
def test_presence_by_hand(now, waited, leaves):
    found, left = presence(WINDOWS, now, nobody_out(2))
    assert found == pytest.approx(waited)
    assert left == pytest.approx(leaves)


def test_the_fleet_does_not_wait_for_those_who_are_out():
    waited, left = presence(WINDOWS, 0.0, np.array([True, False]))
    assert waited == pytest.approx(20)
    assert left[1] == pytest.approx(22)


def test_without_a_trace_everybody_stays():
    waited, left = presence({}, 5.0, nobody_out(3))
    assert waited == 0
    assert np.isinf(left).all()


def test_a_window_as_long_as_the_period_never_ends():
    always = {"windows": np.array([[[3.0, 27.0]]]), "period": np.array([24.0])}
    assert presence(always, 1.0, nobody_out(1)) == (0.0, np.inf)


def share_there(name, hours, clients=2000):
    columns = trace(name, clients, 24.0, random())
    found = [presence(columns, hour, nobody_out(clients)) for hour in hours]
    return np.array([(left > 0).mean() if waited == 0 else 0.0 for waited, left in found])


def test_shapes_look_like_what_they_are_called():
    noon, night = share_there("nightly", [13.0, 2.0])
    assert noon < 0.01
    assert night > 0.95
    world = share_there("world", np.arange(24.0))
    assert world.min() > 0.28
    assert world.max() < 0.39, "a third of the world at any time"
    assert share_there("office", [2.0, 4.6, 8.0, 12.0]).tolist() == [1, 0, 1, 0], "there, at lunch, there, gone"
    flaky = share_there("flaky", np.arange(2.0, 22.0))
    assert abs(flaky.mean() - 1 / 3) < 0.05


def test_every_shape_lets_somebody_in_at_any_time():
    for name in SHAPES:
        columns = trace(name, 20, 86400.0, random())
        for now in np.linspace(0, 3 * 86400, 50):
            waited, left = presence(columns, now, nobody_out(20))
            assert 0 <= waited <= 86400
            assert (left > waited).any()


def test_a_file_of_windows(tmp_path):
    path = tmp_path / "presence.csv"
    path.write_text("# period = 100\nclient,from,to\n0,0,50\n0,60,70\n7,90,120\n")
    columns = trace(str(path), 3, 86400.0, random())
    assert columns["period"].tolist() == [100.0] * 3
    assert columns["windows"][0].tolist() == columns["windows"][2].tolist() == [[0, 50], [60, 70]]
    assert presence(columns, 5.0, nobody_out(3))[1].tolist() == [45.0, 15.0, 45.0]
    assert presence(columns, 75.0, nobody_out(3))[0] == 15.0


@pytest.mark.parametrize(
    ("windows", "now", "leaves"),
    [
        ([(0, 10), (10, 20)], 9, 11),  # they touch
        ([(10, 20), (0, 10)], 9, 11),  # in any order
        ([(0, 15), (10, 20), (12, 13)], 11, 9),  # they overlap, one within another
        ([(0, 10), (11, 20)], 9, 1),  # they do not
        ([(90, 100), (0, 10)], 95, 15),  # over the end of the period
        ([(90, 105), (3, 10)], 95, 15),
        ([(90, 105), (3, 10)], 2, 8),
        ([(90, 112), (3, 10), (12, 20)], 95, 25),
        ([(0, 50), (50, 100)], 70, np.inf),  # always there
        ([(40, 100), (0, 50)], 70, np.inf),
    ],
)
def test_windows_of_a_file_that_touch_or_overlap_are_one(tmp_path, windows, now, leaves):
    path = tmp_path / "presence.csv"
    lines = [f"0,{begin},{end}" for begin, end in windows]
    path.write_text("\n".join(["# period = 100", "client,from,to", *lines, "1,30,31"]))
    waited, left = presence(trace(str(path), 2, 86400.0, random()), now, nobody_out(2))
    assert (waited, left[0]) == (0, pytest.approx(leaves))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("client,from\n0,1\n", "no column 'to'; expected client,from,to"),
        ("client,from,to\n0,5,2\n", "line 2: a window must begin at 0 or later and end after that; got 5 to 2"),
        ("client,from,to\n0,a,2\n", "near line 2"),
        ("", "is empty; expected lines of client,from,to"),
        ("client,from,to\n", "it has no windows"),
        ("# period = 10\nclient,from,to\n0,11,12\n", "begins after the period of 10 seconds"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path, text, reason):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        trace(str(path), 2, 86400.0, random())
    assert reason in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_names_that_are_no_trace():
    with pytest.raises(InputError, match="allowed: nightly"):
        trace("nightley", 2, 1.0, random())
    with pytest.raises(InputError, match=r"nowhere\.csv cannot be read"):
        trace("nowhere.csv", 2, 1.0, random())


def test_a_run_waits_skips_the_absent_and_loses_those_who_leave(tmp_path):
    """Client 0 comes at 5 s, client 1 at 6 s for a moment that is too short for its work, client 2 at 1000 s."""
    path = tmp_path / "presence.csv"
    path.write_text("# period = 2000\nclient,from,to\n0,5,1900\n1,5,5.001\n2,1000,1900\n")
    fleet = {"clients": 3, "trace": str(path), "speed": 1e4}
    result = run("fedavg", tmp_path, fleet=fleet, run={"rounds": 2}, partition={"name": "iid"})
    first = [entry for entry in work(result) if entry["round"] == 0]
    assert [(entry["client"], entry["failed"]) for entry in first] == [(0, ""), (1, "dropped")]
    assert first[1]["reason"].startswith("left after 0.001 of ")
    assert result.rows("metrics")[0]["virtual_seconds"] == pytest.approx(5 + first[0]["virtual_seconds"])
    assert {entry["client"] for entry in work(result) if entry["round"] == 1} == {0}


def test_a_server_waits_for_those_who_never_report_until_its_deadline(tmp_path):
    fleet = {"name": "mixed", "clients": 12, "dropout": 0.3}
    plan = {"run": {"rounds": 12}, "engine": {"quorum": 0.0}, **QUICK}
    for deadline, waits in ((None, False), (1e6, True)):
        result = run(IDLE, tmp_path, fleet=fleet | {"deadline": deadline}, **plan)
        silent = {entry["round"] for entry in work(result) if entry["reason"] == "never reported"}
        assert 0 < len(silent) < 12
        for row in result.rows("metrics"):
            assert (row["virtual_seconds"] == deadline) == (waits and row["round"] - 1 in silent)


def test_a_trace_survives_an_interruption(tmp_path):
    def stop(row):
        if row["round"] == 3:
            raise KeyboardInterrupt

    fleet = {"clients": 12, "trace": "flaky", "day": 0.5, "name": "mixed", "jitter": 0.3}
    plan = {"fleet": fleet, "run": {"rounds": 8}, "engine": {"quorum": 0.0}, **QUICK}
    whole = run(IDLE, tmp_path / "whole", **plan)
    with pytest.raises(Interrupted) as stopped:
        start.start(study_of(IDLE, tmp_path / "parts", **plan), stop)
    again = start.resume(stopped.value.folder)
    assert rows(whole) == rows(again)
    one, two = ([row["virtual_seconds"] for row in each.rows("metrics")] for each in (whole, again))
    assert one == two
    assert len({row["clients"] for row in rows(whole)}) > 1, "not the same number in every round"


def test_distributions_stay_in_their_bounds():
    for distribution in ("log_uniform", "log_normal", "uniform", "two"):
        speed = mixed(5000, random(), speed=1e9, spread=10.0, distribution=distribution)["speed"]
        assert speed.max() <= 1e9 * (1 + 1e-9)
        assert speed.min() >= 1e8 * (1 - 1e-9)
        assert speed.max() / speed.min() == pytest.approx(10, rel=0.02)
    two = mixed(5000, random(), speed=1e9, spread=10.0, distribution="two")["speed"]
    assert len(np.unique(two)) == 2
    logs = np.log10(mixed(20000, random(), speed=1.0, spread=10.0, distribution="log_normal")["speed"])
    assert logs.mean() == pytest.approx(-0.5, abs=0.01)


def test_stragglers_are_slow_in_everything():
    plain, slow = mixed(2000, random()), mixed(2000, random(), stragglers=0.1, slowdown=20.0)
    factors = {name: plain[name] / slow[name] for name in ("speed", "down", "up")}
    assert all(np.allclose(factors["speed"], each) for each in factors.values())
    assert set(np.round(factors["speed"]).tolist()) == {1.0, 20.0}
    assert (factors["speed"] > 2).mean() == pytest.approx(0.1, abs=0.03)


def test_jitter_changes_times_from_task_to_task(tmp_path):
    steady = run(IDLE, tmp_path, fleet={"name": "mixed", "clients": 4}, run={"rounds": 30}, **QUICK)
    shaky = run(IDLE, tmp_path, fleet={"name": "mixed", "clients": 4, "jitter": 0.5}, run={"rounds": 30}, **QUICK)
    factors = [b["virtual_seconds"] / a["virtual_seconds"] for a, b in zip(work(steady), work(shaky), strict=True)]
    assert np.std(np.log(factors)) == pytest.approx(0.5, rel=0.2)
    assert np.mean(np.log(factors)) == pytest.approx(0, abs=0.2)


def test_measured_devices_say_where_their_figures_are_from():
    for name, device in DEVICES.items():
        assert device.source, name
        assert device.line in LINES
        assert 1e9 < device.speed < 1e12
    columns = measured(600, random(), devices=("phones", "pi4"))
    speeds, counts = np.unique(columns["speed"], return_counts=True)
    assert sorted(speeds) == sorted(DEVICES[name].speed for name in ("pixel1", "pixel2", "pixel3", "pi4"))
    assert counts.tolist() == [150] * 4
    phones = columns["speed"] != DEVICES["pi4"].speed
    assert np.median(columns["down"][phones]) == pytest.approx(42 * 1.25e5, rel=0.1)
    with pytest.raises(InputError, match="pixel1"):
        measured(10, random(), devices=("pixel",))


def test_a_measured_fleet_runs(tmp_path):
    assert (world(fleet={"name": "measured", "clients": 6}).columns["jitter"] == 0.2).all()
    result = run("fedavg", tmp_path, fleet={"name": "measured", "clients": 6})
    assert result.summary["virtual_seconds"] > 0
