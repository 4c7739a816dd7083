"""Sums in blocks: whoever adds a block up, the bits are the same; and workers that add up lose nothing."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from fedloom.engine import processes
from fedloom.engine.local import Local
from fedloom.engine.processes import Processes
from fedloom.fleet.blocks import BLOCK, Blocks
from fedloom.policies.merge import Mean
from fedloom.policies.normalised import Normalised
from fedloom.types import Outcome, Report, Server, Task
from tests.core.small import Normed, Place, Plain, fleet_of, images_of, network_of

CLIENTS = 5 * BLOCK + 3


def learned(client, task):
    """A report as if trained: the model plus noise of the client's own; some clients fail, one sends nonsense."""
    if task.client == 5:
        raise ValueError("no such thing")
    client.state["seen"] = client.state.get("seen", 0) + 1
    moved = {
        name: tensor + torch.randn(tensor.shape, generator=client.generator("noise")) * 10.0 ** (task.client % 7)
        if tensor.is_floating_point()
        else tensor + 1
        for name, tensor in client.received().items()
    }
    if task.client == BLOCK + 2:
        moved["last.bias"][0] = float("nan")
    return Report(moved, task.client % 5 + 0.1, {"loss": float(task.client), "normaliser": 2.0, "steps": 2.0})
    yield


def deadly(client, task):
    if task.client == 2 * BLOCK + 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return (yield from learned(client, task))


def place_of(work, merge=None, make=Normed):
    place = Place(network_of(make), images_of(), [range(2)] * CLIENTS, {"work": work})
    place.merge = merge or Mean()
    return place


@pytest.fixture
def engine_of():
    made = []

    def start(place, workers=2):
        made.append(Processes(lambda: place, workers))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def joined(engine, merge=None, clients=CLIENTS, change=None):
    """A merged round: the server's tensors, the ledger without what is measured, the failures."""
    fleet, network = fleet_of(engine.place, engine), engine.place.network
    if change:
        change(fleet)
    server = Server(0, network.initial(0), network)
    tasks = (fleet.task(client, {"model": server.tensors}) for client in range(clients))
    tensors = fleet.join(merge or engine.place.merge, server, tasks).result()
    timed = {"seconds", "virtual_seconds", "peak_memory_bytes"}
    ledger = [{key: value for key, value in row.items() if key not in timed} for row in fleet.ledger]
    return tensors, ledger, {failure.client: failure.kind for failure in fleet.failed}


def assert_same(one, two):
    assert one[0].keys() == two[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, two[0][name]), name
    assert one[1:] == two[1:]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("merge", [Mean(), Mean(weights="equal"), Normalised()], ids=["mean", "equal", "normalised"])
def test_workers_add_up_to_the_bits_of_the_local_engine(engine_of, merge, workers):
    place = place_of(learned, merge)
    expected = joined(Local(lambda: place))
    engine = engine_of(place, workers)
    assert_same(joined(engine), expected)
    assert expected[2] == {5: "raised", BLOCK + 2: "nonsense"}
    assert engine.states.load(CLIENTS - 1, (0, 0)) == {"seen": 1}


def test_sums_travel_and_reports_do_not(engine_of, monkeypatch):
    place, sizes, plain = place_of(learned), [], processes.wire.unpack
    monkeypatch.setattr(processes.wire, "unpack", lambda frame, *rest: sizes.append(len(frame)) or plain(frame, *rest))
    engine = engine_of(place)
    expected, before = joined(engine), sum(sizes)
    sizes.clear()
    monkeypatch.setattr(engine, "reduce", lambda *_: None)
    assert_same(joined(engine), expected)
    assert before < 0.7 * sum(sizes)


def test_cut_reports_are_added_here_since_their_sums_would_be_larger(engine_of):
    """Sums are as large as the whole model, twice in float64; what two units of five are is less."""

    def narrow(client, task):
        tensors = {name: tensor + task.client for name, tensor in client.received().items()}
        return Report(tensors, 1.0, where=task.where)
        yield

    def cut(engine):
        fleet, network = fleet_of(engine.place, engine), engine.place.network
        server = Server(0, network.initial(0), network)
        where = {group: torch.tensor([0]) for group in network.units.sizes}
        tasks = (fleet.task(client, {"model": server.tensors}, where=where) for client in range(CLIENTS))
        return fleet.join(Mean(), server, tasks).result(), [], {}

    place = place_of(narrow)
    assert_same(cut(engine_of(place)), cut(Local(lambda: place)))


def test_who_kills_a_worker_takes_nobody_along(engine_of):
    tensors, ledger, failed = joined(engine_of(place_of(deadly)))
    assert failed == {5: "raised", BLOCK + 2: "nonsense", 2 * BLOCK + 1: "lost"}
    assert sorted(row["client"] for row in ledger) == list(range(CLIENTS))

    def refused(client, task):
        if task.client == 2 * BLOCK + 1:
            raise ValueError
        return (yield from learned(client, task))

    place = place_of(refused)
    expected = joined(Local(lambda: place))[0]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_many_who_kill_their_workers_are_each_a_failure(engine_of):
    def killers(client, task):
        if task.client % BLOCK == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return Report(client.received(), 1.0)
        yield

    _, _, failed = joined(engine_of(place_of(killers, make=Plain)))
    assert failed == dict.fromkeys(range(3, CLIENTS, BLOCK), "lost")


def test_what_a_deadline_refuses_is_in_no_sum(engine_of):
    """The server decides after a worker has done its part, so workers bring reports as they are."""

    def slow(fleet):
        fleet.columns |= {"speed": np.ones(CLIENTS), "down": np.full(CLIENTS, np.inf), "up": 1.0 + np.arange(CLIENTS)}
        fleet.deadline = 80.0

    place = place_of(learned, make=Plain)
    expected = joined(Local(lambda: place), change=slow)
    assert "late" in expected[2].values()
    assert_same(joined(engine_of(place), change=slow), expected)


def test_a_merge_that_is_not_the_methods_own_is_not_made_at_workers(engine_of):
    place = place_of(learned, Mean(weights="equal"))
    merge = Mean()
    assert_same(joined(engine_of(place), merge), joined(Local(lambda: place), merge))


def test_a_block_is_eight_tasks_whether_they_succeed_or_not():
    """By hand: 2^53 + 1 - 2^53 is 0 from left to right and 1 if the last two are added first."""
    network = network_of(Plain, torch.float64)
    server = Server(0, {name: torch.zeros_like(t) for name, t in network.initial(0).items()}, network)
    values = {0: 2.0**53, BLOCK: 1.0, BLOCK + 1: -(2.0**53)}

    def run(tasks):
        for task in tasks:
            value = torch.full((3,), values.get(task.client, 0.0), dtype=torch.float64)
            yield Outcome(task.client, 0, 0, "work", Report({"last.bias": value}, 1.0))

    def total(counted):
        blocks = Blocks(run, lambda: Mean().begin(server))
        for outcome in blocks.run(Task(client, 0) for client in range(2 * BLOCK)):
            if outcome.client in counted:
                blocks.add(outcome.report)
        return blocks.sums()["total"]["last.bias"][0].item()

    straight = (2.0**53 + 1.0) - 2.0**53
    assert straight == 0
    assert total({0, BLOCK, BLOCK + 1}) == 2.0**53 + (1.0 - 2.0**53) == 1
