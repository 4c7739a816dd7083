"""Peers over gRPC with mutual TLS: the same result as the simulation; the dead are skipped, the returned taken back."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.deploy.device import Device, Disk
from fedloom.deploy.folder import init
from fedloom.errors import InputError, RunError
from fedloom.runs.result import Result
from fedloom.runs.store import Store
from fedloom.types import Report, Server
from tests.contract.study import rows
from tests.deploy.federation import SLEEPY, Federation, free_port, peers, simulated

grpc = pytest.importorskip("grpc")
pytest.importorskip("flwr")

from fedloom.deploy.calls import Unreachable  # noqa: E402 (needs grpc)

MEASURED = ("local_accuracy", "worst_local_accuracy", "train_loss", "upload_bytes", "download_bytes", "train_macs")


def finished(federation):
    """The run of who led last; another may have begun to lead at the same time, and left a folder without a round."""
    (summary,) = (federation.folder / "runs").glob("*/summary.json")
    return Result(Store.open(summary.parent), {})


def equal(federation, tmp_path):
    found, said = peers(federation)
    assert not found, found
    served = finished(federation)
    plain = simulated(federation, tmp_path / "simulated")
    for one, two in zip(rows(served), rows(plain), strict=True):
        assert {name: one[name] for name in MEASURED} == {name: two[name] for name in MEASURED}
    return said


def test_fedrkd_among_peers_equals_its_simulation(tmp_path):
    said = equal(Federation(tmp_path, method={"name": "fedrkd"}, model={"name": "lenet5"}), tmp_path)
    assert any(line.endswith(" leads") for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["metafed", "gossip", "fedrkd"])
def test_others_equal_their_simulation(method, tmp_path):
    own = {"warm_up": 1} if method == "metafed" else {}
    equal(Federation(tmp_path, clients=4, method={"name": method, **own}, run={"rounds": 3}), tmp_path)


def made_by(federation, count=2):
    """Peers of a federation that listen and do nothing by themselves."""
    from fedloom.deploy.ring import Peer
    from fedloom.runs.study import read, resolve

    names = [f"client_{number}" for number in range(count)]
    addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
    study, folder, said = resolve(read(federation.folder / "study.toml")), federation.folder, []
    made = []
    for name in names:
        keys = folder / "deploy" / "clients" / name
        device = Device(name, folder / "data" / f"{name}.npz", keys / "state")
        made.append(Peer(study, device, keys, addresses, said.append))
    return made, said


RUN = "0123456789abcdef"


@pytest.fixture
def pair(tmp_path):
    two, said = made_by(Federation(tmp_path, clients=2, method={"name": "fedrkd"}, model={"name": "lenet5"}))
    yield *two, said
    for each in two:
        each.calls.close()


def spoilt(report, fault):
    tensors = dict(report.tensors)
    name = next(iter(tensors))
    if fault == "nan":
        tensors[name] = torch.full_like(tensors[name], torch.nan)
    elif fault == "renamed":
        tensors["os.system"] = tensors.pop(name)
    return replace(report, tensors=tensors)


def test_a_report_that_is_fetched_is_checked(pair):
    one, two, said = pair
    good = Report(one.network.initial(0))
    for round, report in enumerate([good, spoilt(good, "nan"), spoilt(good, "renamed")]):
        two._disk(RUN).propose(1, (round, 0), {"report": report})
    assert one.fetch(RUN, 1, (0, 0)).tensors.keys() == good.tensors.keys()
    for round, reason in ((1, "a tensor is not finite"), (2, "'os.system' is not in the model")):
        with pytest.raises(Unreachable, match=reason):
            one.fetch(RUN, 1, (round, 0))
        assert reason in said[-1]
    with pytest.raises(Unreachable):
        one.fetch(RUN, 1, (3, 0))


def test_rubbish_of_a_peer_is_refused_and_the_round_goes_on(tmp_path, monkeypatch):
    expected = {
        "good": ("", ""),
        "nan": ("nonsense", "a tensor is not finite"),
        "renamed": ("nonsense", "tensor 'os.system' is not in the model"),
        "other task": ("nonsense", "it reports on another task"),
    }
    faults, answer = [*expected, "good"], Device.answer

    def spoiled(self, kind, body):
        given = answer(self, kind, body)
        if self.name != "client_2" or kind != "work":
            return given
        outcome, fault = given["outcome"], faults[body["task"].round]
        if fault == "other task":
            return {"outcome": replace(outcome, client=0)}
        return {"outcome": replace(outcome, report=spoilt(outcome.report, fault))}

    monkeypatch.setattr(Device, "answer", spoiled)
    run = {"rounds": len(faults)}
    federation = Federation(tmp_path, method={"name": "gossip"}, model={"name": "lenet5"}, run=run)
    found, _ = peers(federation)
    assert not found, found
    work = [row for row in finished(federation).rows("clients") if row["job"] == "work"]
    assert [row["failed"] for row in work if row["client"] != 2] == [""] * 2 * len(faults)
    for fault, row in zip(faults, [row for row in work if row["client"] == 2], strict=True):
        kind, reason = expected[fault]
        assert row["failed"] == kind, (fault, row["reason"])
        assert reason in row["reason"], (fault, row["reason"])


def test_who_cannot_be_reached_shows_no_model(pair):
    from fedloom.deploy.ring import RingWorld, stub
    from fedloom.methods.metafed import MetaFed

    one, two, _ = pair
    report = Report(one.network.initial(0), numbers={"loss": 1.0})
    two._disk(RUN).propose(1, (0, 2), {"report": report})
    last = {0: stub(report, (0, 1)), 1: stub(report, (0, 2))}
    place = RingWorld(
        one.study, one.device.dataset, one.device.split, fetch=lambda client, moment: one.fetch(RUN, client, moment)
    )
    place.__dict__["method"] = MetaFed()
    server = Server(1, {}, one.network, {"last": last})
    assert place.shown(server).keys() == report.tensors.keys()
    two.calls.close()
    assert place.shown(server) == {}


@pytest.mark.parametrize("run", ["../../client_0/state", "/tmp", "", "ABCDEF00", "0123456789abcdef0"])
def test_a_fetch_reaches_reports_of_runs_only(pair, run):
    """Neither another folder nor a new one."""
    one, two, _ = pair
    before = sorted(two.keys.rglob("*"))
    (two.keys / "reports").mkdir()
    answer = one.calls.call("client_1", "fetch", {"run": run, "moment": (0, 0)})
    assert answer["refuses"] in (
        "the server named the run in a way that cannot be a folder",
        "client_1 has no report of round 1, stage 0",
    )
    assert two._reports == {}
    (two.keys / "reports").rmdir()
    assert sorted(two.keys.rglob("*")) == before


def test_reports_of_two_runs_are_fetched_at_once(pair, monkeypatch):
    one, two, _ = pair
    report, runs, take = Report(one.network.initial(0)), [RUN, RUN[::-1]], Disk.take
    for run in runs:
        two._disk(run).propose(1, (0, 0), {"report": report})
    two._reports = {}

    def slowly(self, client):
        take(self, client)
        time.sleep(0.2)  # the other one comes in between

    monkeypatch.setattr(Disk, "take", slowly)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda run: one.fetch(run, 1, (0, 0)), runs))
    assert [each.tensors.keys() for each in found] == [report.tensors.keys()] * 2


FIXED = {
    "run": RUN, "names": ["client_0", "client_1", "client_2"], "shape": [1, 8, 8],
    "class_names": [str(number) for number in range(10)], "mean": [0.5], "std": [0.5],
}  # fmt: skip


def row_of(round, client=0):
    """A line of a ledger, as long as they are."""
    numbers = dict.fromkeys(("download_bytes", "upload_bytes", "macs", "seconds", "peak_memory_bytes"), 123456.789)
    return json.dumps({"client": client, "round": round, "job": "work", **numbers, "failed": "", "reason": ""}) + "\n"


def noted(peer, rounds, each=1, edition="", run=RUN):
    """Let a peer's notebook stand after so many rounds, with so many rows of the ledger in each."""
    edition = edition or f"{peer.number:016x}"
    rows = {
        "metrics": "".join(row_of(round) for round in range(rounds)).encode(),
        "clients": "".join(row_of(round, number) for round in range(rounds) for number in range(each)).encode(),
    }
    sizes = {name: len(lines) for name, lines in rows.items()}
    head = {"round": rounds, "memory": {}, "columns": {}, "fixed": {**FIXED, "run": run}, "bytes": sizes}
    head["edition"] = edition
    peer.notebook.follow(head, lambda name, start: np.frombuffer(rows[name][start:], np.uint8))
    return head


def met(peer):
    """Whom a peer that leads can reach."""
    from fedloom.deploy.ring import Circle

    leads(peer)
    circle = Circle(peer)
    circle.greet()
    return circle


def test_a_notebook_of_any_length_reaches_everybody_and_only_what_is_new_travels(pair):
    one, two, _ = pair
    circle, sent, piece = met(one), [], one.notebook.piece

    def counted(*where):
        found = piece(*where)
        sent.append(len(found))
        return found

    one.notebook.piece = counted
    noted(one, 200, 90)
    assert len(one.notebook.lines("clients")) > 2 * one.calls.limit
    for rounds in (200, 201):
        sent.clear()
        head = noted(one, rounds, 90)
        assert circle.ask("keep", {1: {"head": head}}, 30.0) == {1: {}}
        assert two.notebook.head["round"] == rounds
        assert two.notebook.lines("clients") == one.notebook.lines("clients")
    assert sum(sent) < 91 * 250  # the last one's, and not again those of 200 rounds


def test_the_newest_notebook_of_all_is_taken_over_whatever_its_size(pair):
    one, two, _ = pair
    noted(one, 2)
    noted(two, 201, 90)
    assert one._caught_up(met(one))["round"] == 201
    assert one.notebook.lines("clients") == two.notebook.lines("clients")


def test_a_notebook_that_cannot_be_fetched_is_said_and_not_passed_over(pair, monkeypatch):
    from fedloom.deploy.ring import Peer

    one, two, said = pair
    noted(one, 2)
    noted(two, 6)
    circle = met(one)

    def broken(*where):
        raise InputError("this disk is broken")

    monkeypatch.setattr(two.notebook, "piece", broken)
    with pytest.raises(Unreachable, match="client_1 sent no rows: this disk is broken"):
        one._caught_up(circle)
    assert one.notebook.head["round"] == 2
    two.calls.close()
    with pytest.raises(Unreachable, match="client_1 does not show its notebook: "):
        one._caught_up(circle)

    def led(self, least, watch):
        if any(line.endswith("trying again") for line in said):
            self.over = True
            return None
        raise Unreachable("client_1 does not show its notebook")

    monkeypatch.setattr(Peer, "_lead", led)
    assert one.take_part(1, print) is None
    assert said[-1] == "client_1 does not show its notebook; trying again"


def test_a_run_that_somebody_saw_end_is_not_gone_on_with(pair):
    one, two, _ = pair
    for peer in (one, two):
        noted(peer, 2)
    one.notebook.end()  # the other one was away then
    assert not one._has_begun()
    assert one._caught_up(met(one)) == {}
    noted(two, 1, run=RUN[::-1])
    assert one._has_begun()
    assert one._caught_up(met(one))["fixed"]["run"] == RUN[::-1]


def test_a_notebook_that_too_few_keep_ends_the_run(pair, tmp_path):
    one, two, said = pair
    circle, head = met(one), noted(one, 4)
    (tmp_path / "run").mkdir()
    store = Store(tmp_path / "run")
    for name in ("metrics", "clients"):
        (store.folder / f"{name}.jsonl").write_bytes(one.notebook.lines(name))
    noted(two, 6)
    one._hand_out(store, head, circle, 1)
    assert said[-1] == "client_1 does not keep the notebook: its notebook is of round 6, newer than round 4"
    with pytest.raises(RunError, match="round 4: 1 of 2 peers have the notebook, the quorum is 2"):
        one._hand_out(store, head, circle, 2)
    two.notebook.end()
    one._hand_out(store, head, circle, 2)
    assert two.notebook.head["round"] == 4


def test_who_arrives_while_a_leader_waits_is_asked_too(tmp_path, monkeypatch):
    """The first one alive has an old notebook; those with newer ones come a moment later."""
    from fedloom.deploy.ring import Peer

    class Stood(Exception):
        pass

    def opened(self, world, fixed, book):
        raise Stood(book["round"])

    monkeypatch.setattr(Peer, "_open", opened)
    federation = Federation(tmp_path, method={"name": "fedrkd"}, model={"name": "lenet5"})
    all_of, said = made_by(federation, 3)
    try:
        for peer, rounds in zip(all_of, (2, 6, 6), strict=True):
            noted(peer, rounds)
        answer = all_of[1].calls.answer
        for later in all_of[1:]:
            later.calls.answer = lambda *given: {"refuses": "not yet there"}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(all_of[0].take_part, 3, print)
            while "waiting for 2 of 3 registered clients" not in said:
                time.sleep(0.01)
            all_of[1].calls.answer = answer
            with pytest.raises(Stood, match="6"):
                waiting.result(60)
        assert "client_0 leads from round 7" in said
    finally:
        for peer in all_of:
            peer.calls.close()


def test_who_finds_another_leading_when_it_hands_out_its_notebook_follows(pair, tmp_path, monkeypatch):
    from fedloom.deploy import ring

    one, _, _ = pair

    def newer(self, *given):
        self.deposed_by = "client_1"
        raise InputError("its notebook is of round 6, newer than round 4")

    monkeypatch.setattr(ring.Peer, "_hand_out", newer)
    monkeypatch.setattr(ring.Peer, "_head", lambda *given: {})
    monkeypatch.setattr(ring.Peer, "_open", lambda *given: Store(tmp_path))
    monkeypatch.setattr(ring, "experiment", lambda store, world, watch, engine: watch({}))
    with pytest.raises(ring.Deposed, match="client_1"):
        one._lead(2, print)


def test_reports_are_fetched_onto_the_device(pair):
    one, two, _ = pair
    two._disk(RUN).propose(1, (0, 0), {"report": Report(one.network.initial(0))})
    one.calls.device = "meta"
    answer = one.calls.call("client_1", "fetch", {"run": RUN, "moment": (0, 0)})
    assert {tensor.device.type for tensor in answer["report"].tensors.values()} == {"meta"}


def leads(peer):
    """As at the start of its term."""
    peer.leading, peer.deposed_by = True, ""
    peer._begin_term()


def test_who_woke_up_beside_its_successor_follows(pair):
    """Nobody obeys an older term, and the first order of a newer one ends it."""
    from fedloom.deploy.ring import Deposed

    one, two, _ = pair
    leads(one)
    assert one.order("client_1", "keep", {"head": noted(one, 4)}, 5.0) == {}
    assert two.notebook.head["round"] == 4
    one.term = 0  # it does not answer; the other one takes over
    leads(two)
    one.term = 1
    assert two.term == 2
    with pytest.raises(Deposed, match="client_1"):
        one.order("client_1", "keep", {"head": noted(one, 5)}, 5.0)
    assert two.notebook.head["round"] == 4
    two.order("client_0", "keep", {"head": noted(two, 6)}, 5.0)
    assert one.notebook.head["round"] == 6
    with pytest.raises(Deposed, match="client_1"):
        one.still_leads()


def test_of_two_leaders_in_one_term_the_first_one_stays(pair):
    from fedloom.deploy.ring import Circle, Deposed

    one, two, _ = pair
    circle = Circle(two)
    circle.greet()
    assert [member.state for member in circle.members] == ["connected", "connected"]
    for peer in (one, two):  # at the same time: neither knew of the other
        peer.leading, peer.term, peer.obeyed = True, 1, (1, -peer.number)
    with pytest.raises(Deposed, match="client_0"):
        circle.set_up({0: {"run": RUN}})
    assert (one.order("client_1", "keep", {"head": noted(one, 0)}, 5.0), two.deposed_by) == ({}, "client_0")
    assert one.deposed_by == ""


def test_who_was_cut_off_does_not_take_over_from_who_leads(pair):
    from fedloom.deploy.ring import Deposed

    one, two, _ = pair
    leads(one)
    two.leading = True
    with pytest.raises(Deposed, match="client_0"):
        two._begin_term()
    assert (one.deposed_by, two.term) == ("", 0)


@pytest.mark.slow
def test_metafed_goes_on_when_the_last_of_the_circle_dies(tmp_path):
    own = {"name": "metafed", "warm_up": 1}
    federation = Federation(tmp_path, method=own, model={"name": "lenet5"}, run={"rounds": 4})
    try:
        all_of = join_all(federation, lambda number: SLEEPY.format(round=1, seconds=600) if number == 2 else "")
        federation.wait_for(lambda: "working" in federation.log("client_2"))
        all_of[2].kill()
        all_of[2].wait()
        assert [federation.finish(all_of[number], 60) for number in range(2)] == [0, 0]
        result = finished(federation)
        assert len(result.rows("metrics")) == 4
        assert [row["client"] for row in result.rows("clients") if row["failed"]] == [2]
    finally:
        federation.close()


@pytest.mark.slow
def test_a_leader_that_was_asleep_finds_its_successor_leading(tmp_path):
    federation = Federation(tmp_path, method={"name": "fedrkd"}, model={"name": "lenet5"}, run={"rounds": 6})
    hasty = "from fedloom.deploy import ring; ring.PING = 2.0\n"
    try:
        all_of = join_all(federation, lambda number: hasty + SLEEPY.format(round=1 if number else 4, seconds=2))
        federation.wait_for(lambda: "working" in federation.log("client_1"))
        all_of[0].send_signal(signal.SIGSTOP)
        federation.wait_for(lambda: "client_1 leads from round" in federation.log("client_1"))
        before = federation.log("client_1").count("working")
        federation.wait_for(lambda: federation.log("client_1").count("working") > before)  # for itself: it really leads
        all_of[0].send_signal(signal.SIGCONT)
        assert [federation.finish(process, 90) for process in all_of.values()] == [0, 0, 0]
        assert "client_1 leads now" in federation.log("client_0")
        assert [row["round"] for row in finished(federation).rows("metrics")] == [1, 2, 3, 4, 5, 6]
    finally:
        federation.close()


def join_all(federation, code):
    """Three peers in processes of their own, each with this code before fedloom's; the first one leads."""
    addresses = "".join(f'client_{number} = "127.0.0.1:{free_port()}"\n' for number in range(3))
    for number in range(3):
        (federation.folder / "deploy" / "clients" / f"client_{number}" / "peers.toml").write_text(addresses)
    joined = {}
    for number in range(3):
        joined[number] = federation.start(
            "join", "study.toml", "--name", f"client_{number}", "--data", f"data/client_{number}.npz",
            log=f"client_{number}.log", code=code(number),
        )  # fmt: skip
        federation.wait_for(lambda: "client_0 leads" in federation.log("client_0"))  # whoever is first would
    return joined


def lines(folder, names, answer, limit=2**28):
    from fedloom.deploy.calls import Calls

    addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
    return [Calls(name, folder / "clients" / name, addresses, answer, limit) for name in names]


@pytest.mark.slow  # a busy machine says nothing about a time
def test_a_hop_of_fifty_megabytes_takes_less_than_half_a_second(tmp_path):
    init(tmp_path / "d", ["one", "two"])
    report = Report({f"layer{number}": torch.randn(1250, 1000) for number in range(10)})
    one, two = lines(tmp_path / "d", ["one", "two"], lambda caller, kind, body: {"report": report})
    try:
        one.call("two", "ping", {})
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            found = one.call("two", "fetch", {}, 30.0)["report"]
            times.append(time.perf_counter() - begin)
        assert torch.equal(found.tensors["layer9"], report.tensors["layer9"])
        assert min(times) < 0.5, times
    finally:
        one.close()
        two.close()


def test_strangers_stay_out_and_neighbours_are_who_they_say(tmp_path):
    from fedloom.deploy.calls import Calls

    init(tmp_path / "d", ["one", "two", "three"])
    init(tmp_path / "other", ["one", "two"])
    heard = []
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("one", "two")}

    def answer(caller, kind, body):
        heard.append(caller)
        return {}

    def made(folder, name, **more):
        return Calls(name, folder / "clients" / name, {**addresses, **more}, answer, 2**20)

    one = made(tmp_path / "d", "one")
    two = made(tmp_path / "d", "two")
    wrong_authority = made(tmp_path / "other", "two", two=f"127.0.0.1:{free_port()}")
    not_a_peer = made(tmp_path / "d", "three", three=f"127.0.0.1:{free_port()}")
    liar = made(tmp_path / "d", "two", one=addresses["two"], two=f"127.0.0.1:{free_port()}")
    try:
        assert two.call("one", "ping", {}) == {}
        assert heard == ["two"]
        for caller in (wrong_authority, not_a_peer):
            with pytest.raises(Unreachable):
                caller.call("one", "ping", {})
        with pytest.raises(Unreachable):
            liar.call("one", "ping", {})  # at the address of "one" answers "two"
        assert "larger" in two.call("one", "ping", {"much": torch.zeros(2**20)})["refuses"]
        plain = grpc.insecure_channel(addresses["one"]).stream_stream("/fedloom.Peer/Call")
        with pytest.raises(grpc.RpcError):
            list(plain(iter([b""]), timeout=3))
        assert heard == ["two"]
    finally:
        for each in (one, two, wrong_authority, not_a_peer, liar):
            each.close()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])  # who leads, and who does not
def test_a_neighbour_cut_off_is_skipped_and_taken_back(victim, tmp_path):
    federation = Federation(tmp_path, method={"name": "fedrkd"}, model={"name": "lenet5"}, run={"rounds": 6})
    try:
        slow = SLEEPY.format(round=4, seconds=8)
        dying = SLEEPY.format(round=1, seconds=600)
        all_of = join_all(federation, lambda number: dying if number == victim else slow)
        federation.wait_for(lambda: "working" in federation.log(f"client_{victim}"))
        all_of[victim].kill()
        all_of[victim].wait()
        others = [number for number in range(3) if number != victim]
        federation.wait_for(lambda: "working" in federation.log(f"client_{others[0]}"))
        name = f"client_{victim}"
        again = federation.start("join", "study.toml", "--name", name, "--data", f"data/{name}.npz", log=f"{name}.log")
        assert [federation.finish(all_of[number]) for number in others] == [0, 0]
        assert federation.finish(again, 60) == 0
        folder = max((tmp_path / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
        ledger = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
        worked = {(row["client"], row["round"]) for row in ledger if row["job"] == "work" and not row["failed"]}
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6
        assert {(number, round) for number in others for round in range(6)} <= worked
        assert (victim, 0) in worked
        assert (victim, 2) not in worked
        assert (victim, 5) in worked
    finally:
        federation.close()
