"""Worker processes: they may die, be slow, be many; the run goes on and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

from fedloom.engine.local import Local
from fedloom.engine.processes import Processes
from fedloom.errors import RunError
from fedloom.types import Report, Task
from tests.core.small import CLASSES, SIDE, Place, Plain, fleet_of, images_of, network_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine_with():
    made = []

    def make(work, clients=6, workers=2, network=None):
        place = Place(network or network_of(Plain), images_of(), [range(2)] * clients, {"work": work})
        made.append(Processes(lambda: place, workers))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    assert not any(worker.process.is_alive() for engine in made for worker in engine._workers)


@pytest.fixture(autouse=True)
def limit():
    """A deadlock is a failure, not a wait."""

    def stop(*_):
        raise TimeoutError("deadlock")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(12)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def number(value):
    return Report(numbers={"value": float(value)})


def tasks(count, **fields):
    return (Task(client, 0, **fields) for client in range(count))


def values(outcomes):
    return [(o.client, o.report.numbers["value"] if o.report else o.failure.kind) for o in outcomes]


def pid_of(client, task):
    return number(os.getpid())
    yield


def echo(client, task):
    return number(10 * task.round + task.client)
    yield


def test_outcomes_come_in_the_order_of_the_tasks(engine_with):
    def uneven(client, task):
        time.sleep(0.2 if task.client == 0 else 0)
        return number(task.client)
        yield

    assert values(engine_with(uneven, 20).run(tasks(20))) == [(client, client) for client in range(20)]


def test_few_tasks_are_spread_over_the_workers(engine_with):
    def slow(client, task):
        time.sleep(0.3)
        return number(os.getpid())
        yield

    pids = {pid for _, pid in values(engine_with(slow).run(tasks(2)))}
    assert len(pids) == 2, "one worker did both while the other idled"


def test_a_worker_that_is_killed_costs_one_task(engine_with):
    def deadly(client, task):
        if task.client == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number(task.client)
        yield

    engine = engine_with(deadly, 8)
    outcomes = list(engine.run(tasks(8)))
    assert values(outcomes) == [(client, "lost" if client == 2 else client) for client in range(8)]
    assert outcomes[2].failure.message
    assert values(engine.run([Task(3, 1)])) == [(3, 3)]


def test_a_worker_that_is_killed_from_outside_costs_one_failure_and_the_round_goes_on(engine_with):
    def slow(client, task):
        time.sleep(0.3)
        return number(task.client)
        yield

    engine = engine_with(slow, 6)
    fleet = fleet_of(engine.place, engine)
    reports = []
    for report in fleet.run(fleet.task(client) for client in range(6)):
        if not reports:
            os.kill(engine._workers[1].process.pid, signal.SIGKILL)
        reports.append(report.client)
    (failure,) = fleet.failed
    assert failure.kind == "lost"
    assert sorted([*reports, failure.client]) == list(range(6))


def test_a_worker_that_dies_while_idle_costs_nothing(engine_with):
    engine = engine_with(echo)
    list(engine.run(tasks(4)))
    for worker in engine._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.join()
    outcomes = values(engine.run(tasks(6)))
    assert [client for client, _ in outcomes] == list(range(6))
    assert sum(value == "lost" for _, value in outcomes) <= 2, "at most the task it was just sent"


def test_a_slow_client_whose_worker_dies_does_not_stop_the_others_for_ever(engine_with):
    """The window is full of finished tasks; the one that all wait for has to be given out again."""

    def deadly(client, task):
        if task.client == 0:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return number(task.client)
        yield

    signal.alarm(6)
    outcomes = values(engine_with(deadly, 30).run(tasks(30)))
    assert outcomes == [(client, "lost" if client == 0 else client) for client in range(30)]


def test_workers_that_keep_dying_end_the_run_with_a_sentence(engine_with):
    def deadly(client, task):
        os.kill(os.getpid(), signal.SIGKILL)
        yield

    with pytest.raises(RunError, match="keep dying"):
        list(engine_with(deadly, 40).run(tasks(40)))


def test_a_run_that_is_left_early_does_not_answer_for_the_next(engine_with):
    def slow(client, task):
        time.sleep(0.05)
        return number(10 * task.round + task.client)
        yield

    engine = engine_with(slow, 8)
    running = engine.run(tasks(8))
    assert values(islice(running, 1)) == [(0, 0)]
    running.close()
    assert values(engine.run(Task(client, 1) for client in range(3))) == [(0, 10), (1, 11), (2, 12)]


def sums(client, task):
    return number(float(client.received()["last.bias"].sum()))
    yield


@pytest.mark.parametrize("kind", ["local", "processes"])
def test_every_task_gets_the_tensors_of_its_own_base(engine_with, kind):
    engine = engine_with(sums)
    engine = engine if kind == "processes" else Local(lambda: engine.place)
    fleet = fleet_of(engine.place, engine)
    own = [{"model": {"last.bias": torch.full((3,), float(client))}} for client in range(6)]
    shared = {"model": {"last.bias": torch.full((3,), 9.0)}}
    reports = list(fleet.run(fleet.task(client, own[client]) for client in range(6)))
    assert [report.numbers["value"] for report in reports] == [0, 3, 6, 9, 12, 15]
    reports = list(fleet.run(fleet.task(client, shared) for client in range(6)))
    assert [report.numbers["value"] for report in reports] == [27] * 6
    assert next(iter(fleet.run([fleet.task(0, own[1])]))).numbers["value"] == 3


class Wide(nn.Module):
    """Twelve megabytes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(SIDE * SIDE, 80_000), nn.Linear(80_000, CLASSES, bias=False)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)))


def big(client, task):
    client.state["own"] = {"first.weight": client.received()["first.weight"] + 1}
    return Report({"first.weight": client.state["own"]["first.weight"]}, 1.0, {"value": float(task.client)})
    yield


def test_large_bases_states_and_reports_do_not_deadlock(engine_with):
    network = network_of(Wide)
    engine = engine_with(big, 8, network=network)
    fleet = fleet_of(engine.place, engine)
    base = {"model": network.initial(0)}
    for _ in range(2):
        reports = list(fleet.run(fleet.task(client, base) for client in range(8)))
        assert [report.client for report in reports] == list(range(8))
    assert torch.equal(reports[3].tensors["first.weight"], base["model"]["first.weight"] + 1)


def test_states_travel_with_the_task(engine_with):
    def counting(client, task):
        client.state["count"] = client.state.get("count", 0) + 1
        return number(client.state["count"])
        yield

    fleet = fleet_of((engine := engine_with(counting)).place, engine)
    for round in range(3):
        fleet.begin(round, fleet.train)
        reports = list(fleet.run(fleet.task(client) for client in range(6)))
        fleet.commit()
        assert [report.numbers["value"] for report in reports] == [round + 1] * 6
    assert engine.states.load(4, (2, 0)) == {"count": 3}


def test_a_clients_exception_comes_back_as_a_failure_with_its_trace(engine_with):
    def broken(client, task):
        raise ValueError("no such thing")
        yield

    (outcome,) = engine_with(broken).run(tasks(1))
    assert outcome.failure.kind == "raised"
    assert outcome.failure.message == "ValueError: no such thing"
    assert "in broken" in outcome.failure.trace


SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
from tests.core.small import *
from fedloom.engine.processes import Processes
from fedloom.types import Report, Task

def endless(client, task):
    time.sleep(1000)
    yield

place = Place(network_of(Plain), images_of(), [range(2)] * 4, {{"work": endless}})
engine = Processes(lambda: place, 2)
print(*[worker.process.pid for worker in engine._workers], flush=True)
list(engine.run(Task(client, 0) for client in range(4)))
"""


def test_workers_end_when_their_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT.format(root=str(ROOT))], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.3)
    assert all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


MEMORY = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's peak")


@MEMORY
@pytest.mark.parametrize("engine", [Local, Processes])
def test_the_peak_of_a_run_is_that_of_its_largest_task(engine):
    """Every task begins a peak of its own; the run's is not the last one's."""

    def work(client, task):
        held = torch.ones(50_000_000 if client.id == 0 else 1)
        return number(held.sum())
        yield

    place = Place(network_of(Plain), images_of(), [range(2)] * 4, {"work": work})
    doing = engine(lambda: place)
    try:
        first, *others = (outcome.peak_memory_bytes for outcome in doing.run(tasks(4)))
        assert first > max(others[-1:]) + 150e6
        assert doing.peak_memory() >= first
    finally:
        doing.close()


@MEMORY
def test_the_next_run_does_not_inherit_a_peak():
    def work(client, task):
        return number(torch.ones(task.round).sum())
        yield

    place = Place(network_of(Plain), images_of(), [range(2)], {"work": work})
    peaks = []
    for size in (50_000_000, 1):
        engine = Local(lambda: place)
        list(engine.run([Task(0, size)]))
        peaks.append(engine.peak_memory())
    assert peaks[1] < peaks[0] - 150e6
