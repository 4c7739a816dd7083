"""Who may join, who has, what they said, and how to reach them: the server's list of clients, over Flower's grid."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from fedloom import __version__, wire
from fedloom.deploy.folder import extra
from fedloom.deploy.messages import KINDS, PROTOCOL, SMALL, Letter, body_of, read, write
from fedloom.errors import InputError, line
from fedloom.hints import misfit

__all__ = ["Member", "Roster", "Sent", "Traffic", "agreed", "registered"]

HELLO = 60.0  # seconds a client has to say who it is
PAUSES = (0.01, 0.25)  # seconds between looks for answers, growing


class Facts(TypedDict):
    """What a client tells of itself when it joins."""

    name: str
    protocol: int
    fedloom: str
    torch: str
    python: str
    samples: int
    capacity: float
    shape: list[int]
    class_names: list[str]
    levels: np.ndarray


@dataclass
class Traffic:
    """What one key was seen to send and to get, headers included."""

    last_seen: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass
class Member:
    """A registered client, as the server knows it."""

    name: str
    number: int
    state: str = "expected"  # expected | connected | absent | refused
    reason: str = ""
    node: int = 0
    activated: str = ""  # which node it is and when it came; another value means that its process is another one
    greeted: str = ""  # the same, when it last said who it is
    joined: float = 0.0
    last_seen: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    ready: bool = False  # whether it was told the study
    reports: int = 0
    failures: int = 0
    last: str = ""


@dataclass(frozen=True)
class Sent:
    """A letter under way."""

    member: Member
    ticket: str
    activated: str
    at: float


def registered(folder: Path) -> dict[str, bytes]:
    """Names and public keys (PEM) of the clients that may join, sorted by name."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    except ImportError as error:
        raise extra("deploy", error) from error
    keys: dict[str, bytes] = {}
    for path in sorted((folder / "clients").glob("*.pub")):
        try:
            key: Any = load_ssh_public_key(path.read_bytes())
            keys[path.stem] = public_key_to_bytes(key)
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise InputError(f"{path} is not a public key: {error}") from error
    if not keys:
        raise InputError(f"{folder} knows no client; write one with: fedloom deploy init DIR --clients N")
    return keys


class Roster:
    """Registered clients and Flower's nodes, brought together by public key."""

    def __init__(self, grid: Any, keys: Mapping[str, bytes], traffic: Mapping[bytes, Traffic] | None = None) -> None:
        self.grid, self.traffic, self._keys = grid, traffic or {}, dict(keys)
        self.members = [Member(name, number) for number, name in enumerate(keys)]
        self._by_key = {key: self.members[number] for number, key in enumerate(keys.values())}
        self.file: Path | None = None
        self.round = 0
        self._written, self._writing = 0.0, threading.Lock()

    def __len__(self) -> int:
        return len(self.members)

    @property
    def connected(self) -> list[Member]:
        """Those who are here and said who they are."""
        return [member for member in self.members if member.state == "connected"]

    def look(self) -> list[Member]:
        """Compare with Flower's list of nodes; gives those who are new or came back and were not greeted yet."""
        nodes = {node.public_key: node for node in self.grid.get_nodes()}
        new = []
        for key, member in self._by_key.items():
            node = nodes.get(key)
            if node is None:
                if member.state == "connected":
                    member.state, member.greeted = "absent", ""
                continue
            member.node, member.activated = node.node_id, f"{node.node_id} {node.last_activated_at}"
            if member.greeted != member.activated:
                new.append(member)
        return new

    def greet(self) -> None:
        """Ask whoever is new who it is."""
        new = self.look()
        answers = self.ask("hello", {member.number: {"fedloom": __version__} for member in new}, HELLO)
        for member in new:
            answer = answers[member.number]
            reason = answer if isinstance(answer, str) else _flaw(member, answer)
            member.ready = False
            if isinstance(answer, str):
                member.state, member.reason = "absent", reason
                continue
            member.greeted, member.reason = member.activated, reason
            member.state = "refused" if reason else "connected"
            if reason:
                continue
            member.facts = answer
            member.joined = member.joined or time.time()
        if new:
            self.write(now=True)

    def set_up(self, bodies: Mapping[int, dict[str, Any]]) -> None:
        """Tell clients what the run is about."""
        for number, answer in self.ask("setup", bodies, HELLO).items():
            member = self.members[number]
            refused = answer if isinstance(answer, str) else line(answer.get("refuses", ""))
            member.ready = not refused
            if refused:
                member.state, member.reason = "refused", refused
            if isinstance(answer, str):  # it may answer yet
                member.state, member.greeted = "absent", ""

    def post(self, letters: Mapping[int, Letter], ttl: float) -> dict[str, Sent]:
        """Send letters to clients by number; gives what is under way, by message."""
        from flwr.app import Message

        under_way: dict[str, Sent] = {}
        for number, letter in letters.items():
            member = self.members[number]
            message = Message(
                write(letter.frame), member.node, KINDS[letter.kind], ttl=ttl, group_id=str(self.round + 1)
            )
            (name,) = self.grid.push_messages([message]) or [""]
            if name:
                under_way[name] = Sent(member, letter.ticket, member.activated, time.monotonic())
        return under_way

    def collect(
        self, under_way: dict[str, Sent], limit: int, device: torch.device | str = "cpu"
    ) -> Iterable[tuple[str, Sent, dict[str, Any] | str]]:
        """Answers that have come, and sentences for those that cannot come any more; removes them from `under_way`."""
        if not under_way:
            return
        for reply in self.grid.pull_messages(list(under_way)):
            name = reply.metadata.reply_to_message_id
            if name not in under_way:
                continue
            sent = under_way.pop(name)
            if reply.has_error():
                yield name, sent, _trouble(reply.error)
                continue
            sent.member.last_seen = time.time()
            try:
                yield name, sent, body_of(read(reply.content, limit, device), sent.ticket)
            except wire.WireError as error:
                yield name, sent, {"nonsense": str(error)}
        self.look()
        for name, sent in [(name, sent) for name, sent in under_way.items() if sent.member.activated != sent.activated]:
            del under_way[name]
            yield name, sent, f"{sent.member.name} was started anew while it worked"
        self.write()

    def ask(self, kind: str, bodies: Mapping[int, dict[str, Any]], seconds: float) -> dict[int, dict[str, Any] | str]:
        """Send small letters and wait for all answers; a sentence for whoever does not answer."""
        letters = {number: Letter(kind, body) for number, body in bodies.items()}
        answers: dict[int, dict[str, Any] | str] = dict.fromkeys(letters, "it cannot be reached")
        under_way, until, pause = self.post(letters, seconds), time.monotonic() + seconds, PAUSES[0]
        for sent in under_way.values():
            answers[sent.member.number] = f"it did not answer within {seconds:g} s"
        while under_way and time.monotonic() < until:
            found = False
            for _, sent, answer in self.collect(under_way, SMALL):
                found = True
                if not isinstance(answer, str) and "nonsense" in answer:
                    answer = {"refuses": f"its answer makes no sense: {answer['nonsense']}"}
                answers[sent.member.number] = answer
            pause = PAUSES[0] if found else min(PAUSES[1], pause * 1.5)
            time.sleep(pause if under_way else 0)
        return answers

    def write(self, *, now: bool = False) -> None:
        """Keep the status file true, at most once a second: who is connected, last seen, what they sent."""
        with self._writing:
            if self.file is None or (not now and time.monotonic() - self._written < 1):
                return
            self._written = time.monotonic()
            partial = self.file.with_suffix(".partial")
            partial.write_text(json.dumps(self.status(), indent=1))
            partial.replace(self.file)

    def status(self) -> dict[str, Any]:
        """The deployment as others may show it."""
        told = ("samples", "capacity", "fedloom", "torch")
        clients = []
        for member, key in zip(self.members, self._keys.values(), strict=True):
            seen = self.traffic.get(key, Traffic(last_seen=member.last_seen))
            row = {name: getattr(member, name) for name in ("name", "number", "state", "reason", "joined", "reports",
                                                            "failures", "last")}  # fmt: skip
            clients.append(row | asdict(seen) | {name: member.facts.get(name) for name in told})
        return {"updated": time.time(), "round": self.round, "clients": clients}


def _trouble(error: Any) -> dict[str, Any] | str:
    """An error of Flower's: a node that is gone, an app that raised, an answer that cannot be used."""
    from flwr.common.constant import ErrorCode

    if error.code in (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION):
        return {"raised": str(error.reason)}
    if error.code == ErrorCode.UNKNOWN:
        return {"nonsense": str(error.reason)}
    return f"the device is gone: {error.reason}"


def _flaw(member: Member, facts: Mapping[str, Any]) -> str:
    """Why what a client says of itself cannot be used; empty if it can."""
    if "refuses" in facts:
        return line(facts["refuses"])
    version = line(facts.get("fedloom"))
    if version != __version__ or str(facts.get("protocol")) != str(PROTOCOL):
        return f"'{member.name}' runs fedloom {version[:20]}, the server {__version__}; install the same version"
    if wrong := misfit(facts, Facts):
        return f"'{member.name}' tells no '{wrong}', or one that makes no sense"
    if facts["name"] != member.name:
        return f"a client with the key of '{member.name}' calls itself '{line(facts['name'])[:64]}'"
    if not 0 < facts["samples"] < 2**40:
        return f"'{member.name}' has {facts['samples']} samples to train on"
    if not 0 < facts["capacity"] <= 1:
        return f"'{member.name}' has capacity {facts['capacity']}; allowed: above 0, at most 1"
    if len(facts["shape"]) != 3 or min(facts["shape"]) < 1:
        return f"'{member.name}' has images of shape {line(facts['shape'])}"
    if not facts["class_names"]:
        return f"'{member.name}' does not name its classes"
    counts = facts["levels"]
    if counts.shape != (facts["shape"][0], 256) or counts.dtype.kind != "i":
        return f"'{member.name}' does not count the grey levels of its images"
    if counts.min() < 0 or counts.max() >= 2**53 or not counts.sum(1).all():
        return f"'{member.name}' counts grey levels below zero, none or too many"
    return ""


def agreed(members: Sequence[Member]) -> tuple[list[int], list[str]]:
    """Shape and classes that all clients share; InputError if they differ."""
    first = members[0]
    for member in members[1:]:
        for what in ("shape", "class_names"):
            if member.facts[what] != first.facts[what]:
                raise InputError(
                    f"'{first.name}' and '{member.name}' do not hold the same kind of data: {what} is "
                    f"{first.facts[what]} and {member.facts[what]}"
                )
    return first.facts["shape"], first.facts["class_names"]
