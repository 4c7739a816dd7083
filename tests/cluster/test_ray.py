"""The Ray engine on two raylets: order, batches, states, deaths, sums."""

from __future__ import annotations

import sys
import time
from itertools import islice

import pytest
import torch

from fedloom.engine import ray as engine_module
from fedloom.engine.local import Local
from fedloom.engine.ray import Ray
from fedloom.errors import InputError, RoundLost, RunError
from fedloom.policies.merge import Mean
from fedloom.types import NEVER, Server, Task
from tests.cluster import places
from tests.cluster.places import CLIENTS, Far
from tests.core.small import fleet_of

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture
def engine_with(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "PATIENCE", 60)
    made = []

    def make(work, workers=2, **settings):
        place = Far(work, tmp_path)
        made.append(Ray(lambda: place, workers, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def tasks(count=CLIENTS, **fields):
    return (Task(client, 0, **fields) for client in range(count))


def values(outcomes):
    return [(o.client, o.report.numbers["value"] if o.report else o.failure.kind) for o in outcomes]


def test_outcomes_come_in_the_order_of_the_tasks_from_all_workers(engine_with):
    engine = engine_with(places.slow)
    assert values(engine.run(tasks())) == [(client, client) for client in range(CLIENTS)]
    nodes = {slot.actor._actor_id for slot in engine.slots}
    assert len(nodes) == 2


def test_tasks_travel_in_few_batches(engine_with, monkeypatch):
    sent, send = [], Ray._send
    monkeypatch.setattr(
        Ray, "_send", lambda self, slot, batch, *rest: sent.append(len(batch)) or send(self, slot, batch, *rest)
    )
    engine = engine_with(places.echo)
    assert len(list(engine.run(Task(number % CLIENTS, number) for number in range(1000)))) == 1000
    assert sum(sent) == 1000
    assert len(sent) < 60


def test_an_engine_that_is_closed_twice_leaves_each_worker_once(engine_with):
    """Else the next run would take one worker for two, and the second sum of a round would miss its reports."""
    engine = engine_with(places.echo)
    assert len(list(engine.run(tasks()))) == CLIENTS
    engine.close()
    engine.close()
    left = [actor._actor_id for actors in engine_module._warm.values() for actor in actors]
    assert len(left) == len(set(left)) > 0


def test_both_workers_work(engine_with):
    pids = {pid for _, pid in values(engine_with(places.process).run(tasks()))}
    assert len(pids) == 2


def test_every_task_gets_the_tensors_of_its_own_base(engine_with):
    engine = engine_with(places.sums)
    fleet = fleet_of(engine.place, engine)
    own = [{"model": {"last.bias": torch.full((3,), float(client))}} for client in range(6)]
    shared = {"model": {"last.bias": torch.full((3,), 9.0)}}
    reports = list(fleet.run(fleet.task(client, own[client]) for client in range(6)))
    assert [report.numbers["value"] for report in reports] == [0, 3, 6, 9, 12, 15]
    reports = list(fleet.run(fleet.task(client, shared) for client in range(6)))
    assert [report.numbers["value"] for report in reports] == [27] * 6


def test_what_a_rounds_tasks_share_is_put_into_the_object_store_once(engine_with, monkeypatch):
    engine = engine_with(places.sums)
    put, puts = Ray.put, []
    monkeypatch.setattr(Ray, "put", lambda self, parts: puts.append(1) or put(self, parts))
    fleet, model = fleet_of(engine.place, engine), {"last.bias": torch.ones(3)}
    for _ in range(2):  # tasks name the same tensors in dicts of their own, as methods do
        assert len(list(fleet.run(fleet.task(client, {"model": dict(model)}) for client in range(CLIENTS)))) == CLIENTS
    assert len(puts) == 1


def test_a_clients_exception_comes_back_as_a_failure_with_its_trace(engine_with):
    (outcome,) = engine_with(places.broken).run(tasks(1))
    assert (outcome.failure.kind, outcome.failure.message) == ("raised", "ValueError: no such thing")
    assert "in broken" in outcome.failure.trace


def test_a_run_that_is_left_early_does_not_answer_for_the_next(engine_with):
    engine = engine_with(places.slow)
    running = engine.run(tasks())
    assert values(islice(running, 1)) == [(0, 0)]
    running.close()
    assert values(engine.run(Task(client, 1) for client in (3, 4, 8))) == [(3, 3), (4, 4), (8, 8)]


# States


def count_rounds(engine, rounds, clients=6):
    fleet, found = fleet_of(engine.place, engine), []
    for round in rounds:
        fleet.begin(round, fleet.train)
        fleet.columns["round"][:] = round - 1
        found.append([report.numbers for report in fleet.run(fleet.task(client) for client in range(clients))])
    return found


def test_a_client_with_a_state_stays_with_its_worker(engine_with):
    rounds = count_rounds(engine_with(places.counting), range(4), 7)
    assert [[numbers["value"] for numbers in row] for row in rounds] == [[1] * 7, [2] * 7, [3] * 7, [4] * 7]
    assert all([numbers["pid"] for numbers in row] == [numbers["pid"] for numbers in rounds[0]] for row in rounds)


def test_states_are_checkpointed_and_go_on_with_other_workers(engine_with, tmp_path):
    first = engine_with(places.counting)
    count_rounds(first, range(3))
    files = first.states.checkpoint(tmp_path, dict.fromkeys(range(6), (2, 0)))
    assert sorted(files) == [str(client) for client in range(6)]
    assert first.states.checkpoint(tmp_path, dict.fromkeys(range(6), (2, 0))) == files
    first.close()
    second = engine_with(places.counting)
    second.states.restore(tmp_path, files)
    (row,) = count_rounds(second, [3])
    assert [numbers["value"] for numbers in row] == [4] * 6


def test_a_state_that_never_counted_is_dropped(engine_with, tmp_path):
    engine = engine_with(places.counting)
    count_rounds(engine, [0, 1])
    assert values(engine.run([Task(2, 1, accepted=(0, 0))])) == [(2, 2)]
    assert values(engine.run([Task(2, 1, accepted=NEVER)])) == [(2, 1)]


# Deaths


def test_what_a_killed_worker_was_doing_is_done_again(engine_with):
    engine = engine_with(places.deadly_once)
    assert values(engine.run(tasks())) == [(client, client) for client in range(CLIENTS)]
    assert values(engine.run(tasks(8))) == [(client, client) for client in range(8)]


def test_or_counts_as_failed(engine_with):
    found = dict(values(engine_with(places.deadly_once, lost="fail").run(tasks())))
    lost = {client for client, value in found.items() if value == "lost"}
    assert 5 in lost
    assert {client: found[client] for client in found.keys() - lost} == {c: c for c in range(CLIENTS) if c not in lost}


@pytest.mark.slow
def test_a_client_that_always_kills_its_worker_is_lost_alone(engine_with):
    found = values(engine_with(places.deadly).run(tasks(12)))
    assert found == [(client, "lost" if client == 5 else client) for client in range(12)]


@pytest.mark.slow
def test_workers_that_keep_dying_end_the_run_with_a_sentence(engine_with):
    with pytest.raises(RunError, match="keep dying"):
        list(engine_with(places.always_deadly).run(tasks()))


def test_states_that_died_with_a_worker_cost_the_round_or_all_since_the_checkpoint(engine_with, cluster, tmp_path):
    import ray

    engine = engine_with(places.counting)
    count_rounds(engine, [0])
    files = engine.states.checkpoint(tmp_path, dict.fromkeys(range(6), (0, 0)))
    ray.kill(engine.slots[0].actor)
    assert [n["value"] for n in count_rounds(engine, [1])[0]] == [2] * 6  # all were saved: nothing is lost
    ray.kill(engine.states.slots[0].actor)
    with pytest.raises(RoundLost) as lost:
        count_rounds(engine, [2])
    assert lost.value.before
    engine.states.restore(tmp_path, files)
    assert [[n["value"] for n in row] for row in count_rounds(engine, [1, 2])] == [[2] * 6, [3] * 6]
    ray.kill(engine.states.slots[0].actor)
    with pytest.raises(RoundLost):
        engine.states.checkpoint(tmp_path, dict.fromkeys(range(6), (2, 0)))


# Sums at the workers


def joined(engine, count=CLIENTS, rule=None):
    network = engine.place.network
    fleet, server = fleet_of(engine.place, engine), Server(0, network.initial(0), network)
    merged = fleet.join(
        rule or Mean(), server, (fleet.task(client, {"model": server.tensors}) for client in range(count))
    ).result()
    ledger = [
        {key: value for key, value in row.items() if key not in ("seconds", "virtual_seconds", "peak_memory_bytes")}
        for row in fleet.ledger
    ]
    return merged, ledger


@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_the_tree_agrees_with_the_local_engine(engine_with, tmp_path, weights):
    engine, rule = engine_with(places.trained, reduce="tree"), Mean(weights=weights)
    place = Far(places.trained, tmp_path)
    (exact, expected), (found, ledger) = joined(Local(lambda: place), rule=rule), joined(engine, rule=rule)
    assert ledger == expected  # mad and broken clients are left out by both
    assert {row["failed"] for row in ledger} == {"", "raised", "nonsense"}
    for name, tensor in exact.items():
        assert torch.allclose(tensor, found[name], rtol=1e-6, atol=1e-6)
    again, _ = joined(engine, rule=rule)
    assert all(torch.equal(tensor, again[name]) for name, tensor in found.items())


def test_reports_that_do_not_count_are_not_in_the_sums(engine_with):
    """The server decides, here by a virtual deadline, after a worker has done its part."""
    engine = engine_with(places.trained, reduce="tree")
    network = engine.place.network
    fleet, server = fleet_of(engine.place, engine, quorum=0.1), Server(0, network.initial(0), network)
    fleet.columns["up"] = torch.arange(1, CLIENTS + 1).double().numpy()
    fleet.columns["speed"] = fleet.columns["up"] * 0 + 1
    fleet.deadline = 30.0
    merged = fleet.join(
        Mean(weights="equal"), server, (fleet.task(c, {"model": server.tensors}) for c in range(CLIENTS))
    )
    counted = [row["client"] for row in fleet.ledger if not row["failed"]]
    assert 0 < len(counted) < CLIENTS * 0.8
    expected = server.tensors["last.weight"].double() + 0.1 * sum(client + 1 for client in counted) / len(counted)
    assert torch.allclose(merged.result()["last.weight"].double(), expected, atol=1e-5)


def test_no_tensors_of_reports_come_to_the_server_with_a_tree(engine_with, monkeypatch):
    engine = engine_with(places.trained, reduce="tree")
    sizes, plain = [], engine_module.wire.unpack
    monkeypatch.setattr(
        engine_module.wire, "unpack", lambda frame, *rest: sizes.append(len(frame)) or plain(frame, *rest)
    )
    joined(engine, 20)
    small = sum(sizes)
    sizes.clear()
    engine.close()
    flat = engine_with(places.trained)
    joined(flat, 20)
    assert sum(sizes) - small > 16 * 111 * 4  # the tensors of those who trained


def test_a_worker_that_dies_with_its_sums_costs_the_round(engine_with):
    engine = engine_with(places.deadly_once, reduce="tree")
    with pytest.raises(RoundLost) as lost:
        joined(engine)
    assert not lost.value.before


# Sentences


def test_without_ray_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'fedloom\[ray\]'"):
        Ray.check()


def test_more_workers_than_the_cluster_has_room_for(engine_with, cluster):
    import ray

    until = time.monotonic() + 60
    # A raylet that another test killed counts as alive until its silence is noticed.
    while sum(node["Alive"] for node in ray.nodes()) > len(cluster.list_all_nodes()) and time.monotonic() < until:
        time.sleep(0.2)
    with pytest.raises(InputError, match="room for 2"):
        engine_with(places.echo, workers=3)
    with pytest.raises(InputError, match="1 GPUs"):
        engine_with(places.echo, gpus=1.0)


def test_sums_that_die_cannot_fail_client_by_client():
    with pytest.raises(InputError, match=r"engine\.lost = 'fail' needs engine\.reduce = 'flat'"):
        Ray.check(reduce="tree", lost="fail")


def unbuildable():
    raise InputError("data set 'mnist' is not here")


def test_a_worker_that_finds_no_data_says_so(engine_with, cluster, tmp_path):
    place = Far(places.echo, tmp_path)
    place.build = unbuildable
    with pytest.raises(InputError, match="a worker could not begin: data set 'mnist' is not here"):
        Ray(lambda: place, 1)
