"""The server's list of clients, without a network."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fedloom import __version__
from fedloom.deploy.messages import PROTOCOL
from fedloom.deploy.roster import Roster
from fedloom.deploy.serve import fix
from fedloom.runs.study import resolve


class Answering(Roster):
    """A list with one client that is connected, and answers that are told beforehand."""

    def __init__(self, **answers):
        node = SimpleNamespace(public_key=b"key", node_id=7, last_activated_at="now")
        super().__init__(SimpleNamespace(get_nodes=lambda: [node]), {"one": b"key"})
        self.answers, self.asked = answers, []

    def ask(self, kind, bodies, seconds):
        self.asked += [kind] * len(bodies)
        return dict.fromkeys(bodies, self.answers.get(kind, ""))


def connected(**answers):
    roster = Answering(**answers)
    member = roster.members[0]
    roster.look()
    member.state, member.greeted = "connected", member.activated
    return roster, member


def test_who_does_not_answer_the_setup_is_greeted_again():
    roster, member = connected(setup="it did not answer within 60 s", hello="it did not answer within 60 s")
    roster.greet()
    assert roster.asked == []
    roster.set_up({0: {}})
    assert (member.state, member.ready) == ("absent", False)
    roster.greet()
    assert roster.asked == ["setup", "hello"]


def test_who_refuses_the_setup_is_not_asked_again():
    roster, member = connected(setup={"refuses": "too old"})
    roster.set_up({0: {}})
    assert (member.state, member.reason, member.ready) == ("refused", "too old", False)
    roster.greet()
    assert roster.asked == ["setup"]


def test_the_status_file_is_written_from_many_threads(tmp_path):
    roster, _ = connected()
    roster.file = tmp_path / "status.json"
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: roster.write(now=True), range(400)))
    assert json.loads(roster.file.read_text())["clients"][0]["name"] == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


FACTS = {
    "name": "one", "protocol": PROTOCOL, "fedloom": __version__, "torch": "2.13", "python": "3.11", "samples": 5,
    "capacity": 1, "shape": [1, 8, 8], "class_names": ["a", "b"], "levels": np.ones((1, 256), np.int64),
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, ""),
        *(({name: torch.ones(2)}, "one") for name in FACTS),
        *(({name: None}, "one") for name in FACTS),
        ({"refuses": torch.ones(2)}, "tensor"),
        ({"refuses": "\ud800 no"}, r"\? no"),
        ({"fedloom": "\x1b[2J0.0"}, r"runs fedloom \?\[2J0.0, the server"),
        ({"name": "two"}, "calls itself 'two'"),
        ({"samples": 0}, "has 0 samples"),
        ({"samples": True}, "'samples'"),
        ({"samples": 2**62}, "samples to train on"),
        ({"capacity": float("nan")}, "capacity nan"),
        ({"shape": [8, 8]}, r"shape \[8, 8\]"),
        ({"shape": [1, 8, 0]}, "shape"),
        ({"class_names": []}, "name its classes"),
        ({"levels": np.ones((3, 256), np.int64)}, "grey levels"),
        ({"levels": np.full((1, 256), -1)}, "grey levels"),
        ({"levels": np.full((1, 256), 2**62)}, "grey levels"),
    ],
)
def test_who_says_nonsense_of_itself_is_refused_with_a_sentence(facts, reason, tmp_path):
    roster = Answering(hello=FACTS | facts)
    roster.file = tmp_path / "status.json"
    roster.greet()
    member = roster.members[0]
    assert (member.state, bool(member.reason)) == (("refused", True) if facts else ("connected", False))
    assert re.search(reason, member.reason)
    assert member.reason.isprintable()
    assert json.loads(roster.file.read_text())["clients"][0]["state"] == member.state


@pytest.mark.parametrize("left_out", FACTS)
def test_who_does_not_say_all_is_refused_with_a_sentence(left_out):
    roster = Answering(hello={name: fact for name, fact in FACTS.items() if name != left_out})
    roster.greet()
    assert roster.members[0].state == "refused"


def test_who_refuses_in_another_way_than_by_a_sentence_is_refused_too():
    roster, member = connected(setup={"refuses": torch.ones(2)})
    roster.set_up({0: {}})
    assert (member.state, member.reason) == ("refused", "tensor([1., 1.])")


@pytest.mark.parametrize(("method", "mean"), [("fedavg", 0.5), ("fedcpn", 51 / 255)])
def test_fixed_numbers_hold_where_clients_have_none_of_their_own(method, mean):
    levels = np.zeros((1, 256), np.int64)
    levels[0, [0, 102]] = 5
    member = SimpleNamespace(name="one", facts={"shape": [1, 8, 8], "class_names": ["a", "b"], "levels": levels})
    study = resolve({"method": {"name": method}, "data": {"normalise": "fixed"}})
    fixed = fix(SimpleNamespace(connected=[member], members=[member]), study, None)
    assert fixed.mean == fixed.std == [pytest.approx(mean)]
