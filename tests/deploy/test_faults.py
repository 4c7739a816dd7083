"""What happens when something is wrong: strangers stay out, rubbish is refused, what dies comes back."""

from __future__ import annotations

import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.deploy.folder import init
from fedloom.encoding import Sparse
from fedloom.errors import InputError
from tests.deploy.federation import SLEEPY, Federation, free_port, simulated, tensors_of, together

httpx = pytest.importorskip("httpx")
pytest.importorskip("flwr")


@pytest.fixture(scope="module")
def listening(tmp_path_factory):
    """A server that listens and asks nothing."""
    from fedloom.deploy.link import link
    from fedloom.deploy.roster import registered

    folder, port = tmp_path_factory.mktemp("listening"), free_port()
    init(folder / "deploy", ["one", "two"], port=port)
    with link(
        registered(folder / "deploy" / "server"), folder / "deploy" / "server", "127.0.0.1", port, rate=50
    ) as grid:
        yield folder, port, grid


def node(folder: Path, port: int, name: str = "one"):
    from fedloom.deploy.node import Node

    return Node(f"127.0.0.1:{port}", folder / "deploy" / "clients" / name, {}, lambda sentence: None)


def test_a_key_that_is_not_registered_is_refused(listening, tmp_path):
    folder, port, _ = listening
    init(tmp_path / "deploy", ["one"], port=port)
    own = tmp_path / "deploy" / "clients" / "one"
    (own / "ca.crt").write_bytes((folder / "deploy" / "ca.crt").read_bytes())
    with pytest.raises(InputError, match="refused this client: its key is not registered"):
        node(tmp_path, port)._activate()


def test_a_server_of_another_authority_is_refused(listening, tmp_path):
    folder, port, _ = listening
    init(tmp_path / "deploy", ["one"], port=port)
    (tmp_path / "deploy" / "clients" / "one" / "client.key").unlink()
    key = (folder / "deploy" / "clients" / "one" / "client.key").read_bytes()
    (tmp_path / "deploy" / "clients" / "one" / "client.key").write_bytes(key)
    with pytest.raises(InputError, match="cannot prove who it is"):
        node(tmp_path, port)._activate()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/control/start-run", 404), ("/v1/control/list-nodes", 404), ("/v1/runtime/acquire-task", 404),
        ("/docs", 404), ("/v1/fleet/register-node", 404), ("/v1/fleet/pull-messages", 401),
    ],
)  # fmt: skip
def test_without_a_key_nothing_answers(listening, path, status):
    folder, port, _ = listening
    context = ssl.create_default_context(cafile=str(folder / "deploy" / "ca.crt"))
    assert httpx.post(f"https://127.0.0.1:{port}{path}", verify=context).status_code == status


def test_without_tls_nothing_answers(listening):
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://127.0.0.1:{listening[1]}/v1/fleet/pull-messages")


def test_a_stolen_public_key_is_no_key(listening):
    """The header names a registered key, but the signature is another's."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    folder, port, _ = listening
    one, two = node(folder, port, "one"), node(folder, port, "two")
    thief = next(each for each in one.client._interceptors if isinstance(each, NodeAuthHttpInterceptor))
    thief._public_key_bytes = two._public
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        one.client.ActivateNode(ActivateNodeRequest(public_key=two._public, heartbeat_interval=10))


def test_too_many_requests_are_refused(listening):
    folder, port, _ = listening
    context = ssl.create_default_context(cafile=str(folder / "deploy" / "ca.crt"))
    with httpx.Client(verify=context) as client:
        found = {client.post(f"https://127.0.0.1:{port}/v1/fleet/pull-messages").status_code for _ in range(120)}
    assert found == {401, 429}


def test_large_requests_are_refused_unread(listening):
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import PushObjectRequest

    folder, port, grid = listening
    one = node(folder, port)
    one._activate()
    before = grid.traffic[one._public].received_bytes
    with pytest.raises(httpx.HTTPStatusError, match="413"):
        one.client.PushObject(PushObjectRequest(object_content=bytes(grid.guard.limit + 2**20)))
    with pytest.raises(httpx.HTTPStatusError, match="413"):
        one.client.PushMessages(PushMessagesRequest(clientapp_runtime_list=[1.0] * 2**18))
    assert grid.traffic[one._public].received_bytes - before < 10_000


def spoil(monkeypatch, faults):
    """Let client_2 do something else in each round."""
    from fedloom.deploy.device import Device
    from fedloom.deploy.node import Node

    answer, push, old = Device.answer, Node._push, []

    def spoiled(self, kind, body):
        given = answer(self, kind, body)
        if self.name != "client_2" or kind != "work":
            return given
        outcome, fault = given["outcome"], faults[body["task"].round]
        tensors = dict(outcome.report.tensors)
        name = next(iter(tensors))
        if fault == "nan":
            tensors[name] = torch.full_like(tensors[name], torch.nan)
        elif fault == "renamed":
            tensors["os.system"] = tensors.pop(name)
        elif fault == "type":
            tensors[name] = tensors[name].double()
        elif fault == "bomb":
            tensors[name] = Sparse((10**6, 10**6), torch.ones(1), torch.zeros(1, dtype=torch.int32))
        elif fault == "large":
            tensors[name] = torch.ones(10**7)
        elif fault == "other task":
            return {"outcome": replace(outcome, client=0)}
        elif fault == "raises":
            raise RuntimeError("broken device")
        return {"outcome": replace(outcome, report=replace(outcome.report, tensors=tensors))}

    def replayed(self, reply):
        from fedloom.deploy.messages import read

        if self.config["name"] == "client_2" and reply.has_content():
            record = reply.content["fedloom"]
            outcome = read(reply.content, 2**31)["body"].get("outcome")
            if outcome is not None and outcome.job == "work":
                old.append(record["frame"])
                if faults[outcome.round] == "replay":
                    record["frame"] = old[0]
        push(self, reply)

    monkeypatch.setattr(Device, "answer", spoiled)
    monkeypatch.setattr(Node, "_push", replayed)


def test_rubbish_is_refused_and_the_round_goes_on(tmp_path, monkeypatch):
    expected = {
        "good": ("", ""),
        "nan": ("nonsense", "a tensor is not finite"),
        "renamed": ("nonsense", "tensor 'os.system' is not in the model"),
        "type": ("nonsense", "is of torch.float64, expected torch.float32"),
        "bomb": ("nonsense", "has shape (1000000, 1000000), expected"),
        "large": ("nonsense", "it is larger than the limit"),
        "other task": ("nonsense", "it reports on another task"),
        "raises": ("raised", "broken device"),
        "replay": ("nonsense", "an old report was sent again"),
    }
    faults = [*expected, "good"]
    spoil(monkeypatch, faults)
    federation = Federation(tmp_path, run={"rounds": len(faults)}, evaluate={"every": 20})
    result, _ = together(federation)
    work = [row for row in result.rows("clients") if row["job"] == "work"]
    assert [row["failed"] for row in work if row["client"] != 2] == [""] * 2 * len(faults)
    for fault, row in zip(faults, [row for row in work if row["client"] == 2], strict=True):
        kind, reason = expected[fault]
        assert row["failed"] == kind, (fault, row["reason"])
        assert reason in row["reason"], (fault, row["reason"])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors_of(result).values())


@pytest.mark.slow
def test_a_slow_client_is_late_and_the_round_goes_on(tmp_path, monkeypatch):
    from fedloom.deploy import engine
    from fedloom.deploy.device import Device

    answer = Device.answer

    def slow(self, kind, body):
        if self.name == "client_1" and kind == "work" and body["task"].round == 0:
            time.sleep(4)
        return answer(self, kind, body)

    monkeypatch.setattr(Device, "answer", slow)
    monkeypatch.setattr(engine, "GRACE", 1.0)
    federation = Federation(tmp_path, engine={"deadline": 2.0}, evaluate={"every": 20})
    result, _ = together(federation)
    failed = [(row["client"], row["round"], row["failed"]) for row in result.rows("clients") if row["failed"]]
    assert failed[0] == (1, 0, "late")  # and in the next round too, if it still sleeps
    assert set(failed) <= {(1, 0, "late"), (1, 1, "late")}


def test_another_version_is_refused_with_a_sentence(tmp_path, monkeypatch):
    from fedloom.deploy import serve

    federation, said = Federation(tmp_path, clients=1), []
    monkeypatch.setattr(serve.Roster, "ask", asking(serve.Roster.ask, said))
    with pytest.raises(TimeoutError):
        together(federation)
    assert said == ["the server runs fedloom 9.9, 'client_0' 0.1.0; install the same version"]


def asking(ask, said):
    """A server of another version, that gives up once it has refused somebody."""

    def other(self, kind, bodies, seconds):
        answers = ask(self, kind, {n: {**body, "fedloom": "9.9"} for n, body in bodies.items()}, seconds)
        if any(isinstance(answer, dict) and "refuses" in answer for answer in answers.values()):
            said.extend(answer["refuses"] for answer in answers.values())
            raise TimeoutError
        return answers

    return other


@pytest.fixture
def processes(tmp_path):
    made = []

    def make(**sections):
        made.append(Federation(tmp_path, **sections))
        return made[0]

    yield make
    made[0].close()


@pytest.mark.slow
def test_a_client_killed_while_it_works_is_lost_and_comes_back(processes):
    federation = processes(run={"rounds": 6}, method={"name": "fedbn"})
    slow = SLEEPY.format(round=3, seconds=4)
    server = federation.serve()
    others = [federation.join(number, code=slow) for number in (0, 1)]
    victim = federation.join(2, code=SLEEPY.format(round=1, seconds=600))
    federation.wait_for(lambda: "working" in federation.log("client_2"))
    victim.kill()
    victim.wait()
    again = federation.join(2)  # at once: nobody waits for a time-out
    assert federation.finish(server) == 0
    assert [federation.finish(each, 60) for each in (*others, again)] == [0, 0, 0]
    mine = [(row["round"], row["failed"]) for row in federation.ledger() if row["client"] == 2 and row["job"] == "work"]
    assert (1, "lost") in mine
    assert [failed for round, failed in mine if round >= 4] == ["", ""]
    assert federation.summary()["rounds"] == 6


@pytest.mark.slow
def test_a_client_that_stays_away_costs_one_failure_and_is_absent(processes):
    federation = processes(run={"rounds": 3})
    server = federation.serve()
    for number in (0, 1):
        federation.join(number)
    victim = federation.join(2, code=SLEEPY.format(round=1, seconds=600))
    federation.wait_for(lambda: "working" in federation.log("client_2"))
    victim.kill()
    assert federation.finish(server) == 0
    lost = [row for row in federation.ledger() if row["failed"]]
    assert [(row["client"], row["round"], row["failed"]) for row in lost] == [(2, 1, "lost")]
    assert federation.status()["client_2"]["state"] == "absent"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_a_server_killed_and_restarted_goes_on_and_nothing_is_lost(processes, tmp_path, method):
    federation = processes(run={"rounds": 6, "checkpoint_every": 2}, method={"name": method})
    server = federation.serve()
    clients = [federation.join(number, code=SLEEPY.format(round=3, seconds=2)) for number in range(3)]
    federation.wait_for(lambda: len(federation.rounds()) >= 3)  # one round beyond the last checkpoint
    server.kill()
    server.wait()
    folder = federation.run_dir()
    restarted = federation.serve(target=folder.relative_to(federation.folder))
    assert federation.finish(restarted) == 0
    assert [federation.finish(client, 60) for client in clients] == [0, 0, 0]
    served = federation.rounds()
    plain = simulated(federation, tmp_path / "simulated")
    for one, two in zip(served, plain.rows("metrics"), strict=True):
        assert one["local_accuracy"] == two["local_accuracy"]
        assert one["global_accuracy"] == two["global_accuracy"]
        assert one["train_loss"] == two["train_loss"]


@pytest.mark.slow
def test_a_server_stopped_by_signal_says_how_to_go_on(processes):
    federation = processes(run={"rounds": 50})
    server = federation.serve()
    for number in range(3):
        federation.join(number)
    federation.wait_for(lambda: len(federation.rounds()) >= 1)
    server.terminate()
    assert federation.finish(server) == 143
    assert f"fedloom serve runs/{federation.run_dir().name}" in federation.log("serve")
