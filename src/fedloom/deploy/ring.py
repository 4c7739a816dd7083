"""Peers without a server: the same `stages` and `work` as in simulation, among neighbours.

Every peer keeps its data, its state and its reports; a neighbour fetches a report from whoever made it. Somebody has to
say when a stage begins. That is the first peer alive, in the order of their numbers; it sees no model. It keeps the
run's notebook (which round, whose report counted, what was measured) and gives everybody a copy after each round, or at
least as many as a round needs. When it dies, the next one goes on from the newest copy of all that are there: a round
that was not finished is begun again from the versions of state that counted. So the round itself is
`runs.serverless.pass_round`, as in a simulation.

Whoever begins to lead takes the next *term*, a number that all its orders bear. Peers obey the newest term they heard
of, and of two leaders in one term the first in the order; so a leader that was only slow, and wakes up beside its
successor, is told with its next order and follows.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from fedloom import __version__, wire
from fedloom.deploy.calls import Calls, Unreachable
from fedloom.deploy.device import Device, Disk
from fedloom.deploy.engine import GRACE, PATIENCE, Flower
from fedloom.deploy.folder import table
from fedloom.deploy.messages import SMALL
from fedloom.deploy.notebook import Notebook, piece_of
from fedloom.deploy.roster import Roster
from fedloom.deploy.serve import Deployment, Meeting, Say, columns_of, enough, fix, gather, has_server, study_of
from fedloom.deploy.worlds import ServerWorld, server_data, told
from fedloom.errors import InputError, Interrupted, RunError, line
from fedloom.fleet.nonsense import nonsense
from fedloom.fleet.outgoing import arrived
from fedloom.runs.experiment import Watch, experiment
from fedloom.runs.start import DEPLOYMENT, plain
from fedloom.runs.store import LINES, STATUS, Store
from fedloom.runs.study import Study
from fedloom.types import NEVER, Failure, Moment, Named, Outcome, Report, Server, Task, Tensors

__all__ = ["Peer", "join_peers"]

PING = 10.0  # seconds in which a busy peer says that it is alive; a dead one is known at once
ORDERS = ("notebook", "setup", "work", "ask", "keep", "end")  # what only the leader may send
MADE = ("round", "stage")  # numbers of a report that stays with its maker: which one it was


class Deposed(Exception):
    """Another peer leads."""


class Circle(Roster):
    """The list of peers, reached by calls."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(None, {name: name.encode() for name in peer.calls.addresses})
        self.peer = peer

    def look(self) -> list[Any]:
        """Who answers; gives those whose process is new."""
        new = []
        for member, answer in zip(self.members, self.peer.ping(), strict=True):
            if answer is None:
                if member.state == "connected":
                    member.state, member.greeted = "absent", ""
                continue
            member.last_seen, member.activated = time.time(), str(answer["session"])
            if member.greeted != member.activated:
                new.append(member)
        return new

    def ask(self, kind: str, bodies: Mapping[int, dict[str, Any]], seconds: float) -> dict[int, dict[str, Any] | str]:
        """Call several peers at once."""

        def call(number: int) -> dict[str, Any] | str:
            try:
                return self.peer.order(self.members[number].name, kind, bodies[number], seconds)
            except Unreachable as error:
                return str(error)

        with ThreadPoolExecutor(max(1, len(bodies))) as pool:
            return dict(zip(bodies, pool.map(call, bodies), strict=True))


class Ring(Flower):
    """The engine of whoever leads: peers do the work, and fetch from each other what they need for it."""

    roster: Circle

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks; reports in them are empty, since models stay where they are."""
        with ThreadPoolExecutor(64) as pool:
            yield from [future.result() for future in [pool.submit(self._call, task) for task in tasks]]

    def _call(self, task: Task) -> Outcome:
        roster, member = self.roster, self.roster.members[task.client]
        roster.peer.still_leads()
        roster.round = task.round
        if member.state != "connected" or not member.ready:
            return self._failed(task, "lost", f"{member.name} is {member.state}")
        whole = arrived(task, self.place.network)
        inbox = {sender: made(report) for sender, report in whole.inbox.items()}
        body = {"run": self.id, "task": replace(whole, inbox={}), "inbox": inbox,
                "safe": self._remote.safe.get(task.client, NEVER)}  # fmt: skip
        at = time.monotonic()
        try:
            answer = roster.peer.order(member.name, "work" if task.job == "work" else "ask", body, self.seconds)
        except Unreachable as error:
            late = "deadline" in str(error)
            return self._failed(task, "late" if late else "lost", str(error))
        member.last_seen = time.time()
        if "refuses" in answer:
            return self._failed(task, "lost", str(answer["refuses"]))
        outcome = self._outcome(task, at, answer)
        roster.write()
        if outcome.report is None or task.job != "work":
            return outcome
        return replace(outcome, report=stub(outcome.report, (task.round, task.stage)))


def stub(report: Report, moment: Moment) -> Report:
    """All of a report but the model, which stays with its maker, and when it was made."""
    numbers = {**report.numbers, MADE[0]: float(moment[0]), MADE[1]: float(moment[1])}
    return replace(report, tensors={}, where=None, classes=None, extra={}, numbers=numbers)


def made(report: Report) -> Moment:
    """When a report that stayed with its maker was made."""
    return int(report.numbers[MADE[0]]), int(report.numbers[MADE[1]])


@dataclass(frozen=True, eq=False)
class RingWorld(ServerWorld):
    """The leader's world: no images, and reports that lie with their makers."""

    fetch: Callable[[int, Moment], Report] = field(default=lambda client, moment: Report())

    def shown(self, server: Server) -> Tensors:
        """What clients are shown to evaluate; a report of which a method needs the tensors is fetched, if it can be."""
        last = _Fetched(server.memory.get("last", {}), self.fetch)
        try:
            return super().shown(replace(server, memory={**server.memory, "last": last}))
        except Unreachable:
            return {}


class _Fetched(dict[int, Report]):
    """Reports by maker, whole once they are looked at."""

    def __init__(self, stubs: Mapping[int, Report], fetch: Callable[[int, Moment], Report]) -> None:
        super().__init__(stubs)
        self._fetch = fetch

    def __getitem__(self, client: int) -> Report:
        return self._fetch(client, made(super().__getitem__(client)))


class Peer:
    """One participant: answers the others, and leads when it is its turn."""

    def __init__(self, study: Study, device: Device, keys: Path, addresses: Mapping[str, str], say: Say) -> None:
        self.study, self.device, self.keys, self.say = study, device, keys, say
        self.names = sorted(addresses)
        if device.name not in self.names:
            raise InputError(f"{keys / 'peers.toml'} does not list '{device.name}'")
        self.number, self.session = self.names.index(device.name), token_hex(8)
        known = json.dumps([told(study), study.fleet.model_dump(), self.names], sort_keys=True)
        self.digest = hashlib.sha256(known.encode()).hexdigest()[:32]
        self.notebook = Notebook(keys / "state" / f"notebook-{self.digest}")
        self.leading = self.over = False
        self.term = 0  # in which it leads; 0 while it does not, or still waits for enough others
        self.obeyed = 0, -len(self.names)  # newest term it heard of, and minus the number of who leads in it
        self.deposed_by = ""
        self._strange: set[tuple[str, Any]] = set()  # peers about something else, said once
        self._busy, self._shelf = threading.Lock(), threading.Lock()  # for work, and for its own reports
        self._heeding = threading.Lock()
        self._reports: dict[str, Disk] = {}
        self.network = ServerWorld(study, device.dataset, device.split).network
        limit = SMALL + 8 * sum(part.nbytes for part in self.network.module.state_dict().values())
        listed = {name: addresses[name] for name in self.names}
        self.calls = Calls(device.name, keys, listed, self.answer, limit, device.device)

    def answer(self, caller: str, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Whatever another peer asks."""
        if kind == "ping":
            return {"session": self.session, "digest": self.digest, "fedloom": __version__, "leading": self.leading,
                    "run": self.notebook.run, "over": self.notebook.over, "term": self.term,
                    "heard": self.obeyed[0]}  # fmt: skip
        if kind == "fetch":
            return self._fetched(str(body["run"]), (int(body["moment"][0]), int(body["moment"][1])))
        if kind == "rows":
            return {"rows": self.notebook.piece(str(body["edition"]), str(body["name"]), int(body["start"]))}
        if kind in ORDERS and (leader := self._obeys(caller, int(body.get("term", 0)))):
            return {"refuses": f"{leader} leads in term {self.obeyed[0]}", "leader": leader}
        body = {name: value for name, value in body.items() if name != "term"}
        if kind == "notebook":
            return {"head": self.notebook.head}
        if kind == "keep":
            self._follow(caller, body["head"])
            return {}
        if kind == "end":
            self.over = True
            return {}
        with self._busy:
            return self._work(body) if kind == "work" else self.device.answer(kind, body)

    def _obeys(self, caller: str, term: int) -> str:
        """Who leads instead of the caller, if somebody does; else the caller is who leads from here on."""
        with self._heeding:
            order = term, -self.names.index(caller)
            if order < self.obeyed:
                return self.names[-self.obeyed[1]]
            self.obeyed = order
            if caller != self.device.name and self.leading:
                self.deposed_by = caller
            return ""

    def order(self, name: str, kind: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Ask as the leader; Deposed if the other one heard of a newer leader."""
        answer = self.calls.call(name, kind, {**body, "term": self.term}, seconds)
        if leader := str(answer.get("leader", "")):
            raise Deposed(leader)
        return answer

    def _work(self, body: dict[str, Any]) -> dict[str, Any]:
        """A task: fetch what the neighbours made, do the work, keep the report here."""
        task, run = body["task"], str(body["run"])
        inbox: dict[int, Report] = {}
        for sender, moment in sorted(body["inbox"].items()):
            with suppress(Unreachable):  # a dead neighbour is skipped
                inbox[int(sender)] = self.fetch(run, int(sender), (int(moment[0]), int(moment[1])))
        outcome = self.device.answer("work", {**body, "task": replace(task, inbox=inbox)})["outcome"]
        if outcome.report is None:
            return {"outcome": outcome}
        if reason := nonsense(outcome.report, self.network):
            failure = Failure(task.client, task.round, task.stage, "nonsense", reason)
            return {"outcome": replace(outcome, report=None, failure=failure)}
        moment = task.round, task.stage
        with self._shelf:
            disk = self._disk(run)
            disk.propose(self.number, moment, {"report": outcome.report})
            disk.forget(self.number, (task.round - 2, 0))
        return {"outcome": replace(outcome, report=stub(outcome.report, moment))}

    def _disk(self, run: str) -> Disk:
        if run not in self._reports:
            self._reports = {run: Disk(self._reports_of(run))}
            self._reports[run].take(self.number)
        return self._reports[run]

    def _reports_of(self, run: str) -> Path:
        return self.device.folder(run) / "reports"

    def _fetched(self, run: str, moment: Moment) -> dict[str, Any]:
        with self._shelf:
            known = self._reports_of(run).is_dir()  # nobody has folders made here by asking
            found = self._disk(run).at(self.number, moment) if known else None
        if found is None:
            return {"refuses": f"{self.device.name} has no report of round {moment[0] + 1}, stage {moment[1]}"}
        return found

    def fetch(self, run: str, client: int, moment: Moment) -> Report:
        """A neighbour's report, from the neighbour; Unreachable if there is none that can be used."""
        body = {"run": run, "moment": moment}
        answer = self.calls.call(self.names[client], "fetch", body, 60.0)
        report = answer.get("report")
        if not isinstance(report, Report):
            raise Unreachable(f"{self.names[client]} sent no report: {answer.get('refuses', 'nor a reason')}")
        if reason := nonsense(report, self.network):
            self.say(f"a report of {self.names[client]} is left out: {reason}")
            raise Unreachable(f"{self.names[client]}: {reason}")
        return report

    def ping(self) -> list[dict[str, Any] | None]:
        """What each peer says of itself; None for one that does not answer or is about another study."""

        def one(name: str) -> dict[str, Any] | None:
            try:
                answer = self.calls.call(name, "ping", {}, PING)
            except Unreachable:
                return None
            if "refuses" in answer:
                return None
            same = (answer.get("digest"), answer.get("fedloom")) == (self.digest, __version__)
            if not same and (name, answer.get("digest")) not in self._strange:
                self._strange.add((name, answer.get("digest")))
                self.say(f"{name} runs another study, other peers or fedloom {answer.get('fedloom')}; it is left out")
            return answer if same else None

        with ThreadPoolExecutor(len(self.names)) as pool:
            return list(pool.map(one, self.names))

    def still_leads(self) -> None:
        """Raise if another peer took over."""
        if self.deposed_by:
            raise Deposed(self.deposed_by)

    def _follow(self, name: str, head: dict[str, Any]) -> None:
        """Take over a peer's notebook, with the rows that are missing here."""

        def piece(rows: str, start: int) -> np.ndarray:
            body = {"edition": head["edition"], "name": rows, "start": start}
            answer = self.calls.call(name, "rows", body, 30.0)
            part = answer.get("rows")
            if not (isinstance(part, np.ndarray) and part.dtype == np.uint8):
                raise Unreachable(f"{name} sent no rows: {_refusal(answer) or 'nor a reason'}")
            return part

        self.notebook.follow(head, piece)

    def take_part(self, least: int, watch: Watch) -> Path | None:
        """Until the run is over: lead when it is one's turn, else be there. Gives the run's folder to who led last."""
        said = ""
        while not self.over:
            alive = self.ping()
            leader = next((name for name, answer in zip(self.names, alive, strict=True)
                           if answer and answer["leading"] and name != self.device.name), "")  # fmt: skip
            first = next(number for number, answer in enumerate(alive) if answer or number == self.number)
            if leader or first < self.number:
                leader = leader or self.names[first]
                if leader != said:
                    self.say(f"{leader} leads")
                    said = leader
                time.sleep(0.5)
                continue
            try:
                said, self.leading, self.deposed_by = "", True, ""
                return self._lead(least, watch)
            except Deposed as other:
                self.say(f"{other} leads now")
            except Unreachable as error:
                self.say(f"{error}; trying again")
                time.sleep(0.5)
            finally:
                self.leading, self.term = False, 0
        self.notebook.end()
        return None

    def _lead(self, least: int, watch: Watch) -> Path:
        """Run the study from the newest notebook of all that are there."""
        roster, study, edition = Circle(self), self.study, token_hex(8)
        self.say(f"{self.device.name} leads")
        needed = max(1, ceil(study.engine.quorum * len(self.names)))  # no splinter goes on by itself
        gather(roster, needed, self.say)
        if not self._has_begun():
            gather(roster, max(least, needed), self.say)
        self._begin_term()
        book = self._caught_up(roster)
        if book:
            self.say(f"{self.device.name} leads from round {book['round'] + 1}")
        fixed = Deployment(**book["fixed"]) if book else fix(roster, study, None)
        world = RingWorld(
            study, *server_data(None, None, fixed.shape, fixed.class_names, len(roster)), normal=fixed.normal,
            joined=columns_of(roster, study), fetch=lambda client, moment: self.fetch(fixed.run, client, moment),
        )  # fmt: skip
        world.check()
        store = self._open(world, fixed, book)
        roster.file = store.folder / STATUS
        seconds = study.engine.deadline
        meet = Meeting(roster, study, fixed, world, self.say, needed)
        engine = Ring(roster, world, fixed.run, limit=0, deadline=seconds, arrivals=meet)
        engine.seconds = PATIENCE if seconds is None else seconds + GRACE

        def told_all(row: Mapping[str, Any]) -> None:
            try:
                self._hand_out(store, {**self._head(store, fixed), "edition": edition}, roster, needed)
            finally:
                self.still_leads()  # whatever failed, the run is another's now
            watch(row)

        try:
            experiment(store, world, told_all, engine)
        finally:
            roster.write(now=True)
        roster.ask("end", {member.number: {} for member in roster.connected}, 10.0)
        self.notebook.end()
        return store.folder

    def _has_begun(self) -> bool:
        """Whether anybody who is here knows of a run that nobody saw end."""
        told = [answer for answer in self.ping() if answer]
        return bool({answer["run"] for answer in told} - {answer["over"] for answer in told} - {""})

    def _caught_up(self, roster: Circle) -> dict[str, Any]:
        """The head of the newest notebook here, if a run has begun; from now on nobody here obeys an older leader."""
        heads = {self.number: self.notebook.head}
        for number, answer in self._asked(roster, "notebook", {}).items():
            if isinstance(answer, str) or "head" not in answer:
                raise Unreachable(f"{self.names[number]} does not show its notebook: {_refusal(answer)}")
            heads[number] = answer["head"]
        over = {head.get("over") for head in heads.values()}
        begun = {n: head for n, head in heads.items() if "fixed" in head and head["fixed"]["run"] not in over}
        if not begun:
            return {}
        newest = max(begun, key=lambda number: (begun[number]["round"], number == self.number))
        if newest != self.number:
            self._follow(self.names[newest], begun[newest])
        return begun[newest]

    def _hand_out(self, store: Store, head: dict[str, Any], roster: Circle, needed: int) -> None:
        """Give everybody the notebook; RunError if too few have it now, before anybody forgets what came before."""
        ends = head["bytes"]
        self.notebook.follow(head, lambda name, start: piece_of(store.folder / f"{name}.jsonl", start, ends[name]))
        answers = self._asked(roster, "keep", {"head": head})
        reasons = {self.names[number]: reason for number, each in answers.items() if (reason := _refusal(each))}
        for name, reason in reasons.items():
            self.say(f"{name} does not keep the notebook: {reason}")
        if (kept := 1 + len(answers) - len(reasons)) < needed:
            raise RunError(
                f"round {head['round']}: {kept} of {len(self.names)} peers have the notebook, the quorum is {needed}; "
                "join again: the run goes on from the newest one"
            )

    def _asked(self, roster: Circle, kind: str, body: dict[str, Any]) -> dict[int, dict[str, Any] | str]:
        """What all others who are here answer."""
        others = [member.number for member in roster.connected if member.number != self.number]
        return roster.ask(kind, dict.fromkeys(others, body), 30.0)

    def _begin_term(self) -> None:
        """Take the next term, unless somebody leads whom nobody here could reach before."""
        heard = []
        for name, answer in zip(self.names, self.ping(), strict=True):
            if answer and answer["term"] and name != self.device.name:
                raise Deposed(name)
            heard.append(answer["heard"] if answer else 0)
        with self._heeding:
            self.still_leads()
            self.term = max(self.obeyed[0], *heard) + 1
            self.obeyed = self.term, -self.number

    def _open(self, world: RingWorld, fixed: Deployment, book: dict[str, Any]) -> Store:
        """A folder for the run as it stands in the notebook."""
        study = self.study
        store = Store.create(
            Path(study.run.out), plain(f"{study.method.name}-peers-{study.run.seed}"), study.model_dump_json(indent=1),
            world.split,
        )  # fmt: skip
        store.write(DEPLOYMENT, asdict(fixed))
        if book:
            from fedloom.engine.states import States
            from fedloom.fleet.fleet import Fleet

            names = Named(study.method.name), Named(study.model.name)
            nobody: Any = None  # a fleet that is only written down needs no engine
            fleet = Fleet(book["columns"], nobody, world.network, world.home(), seed=0, names=names)
            fleet.columns = dict(book["columns"])
            for name in LINES:
                (store.folder / f"{name}.jsonl").write_bytes(self.notebook.lines(name))
            server = Server(book["round"], world.network.initial(study.run.seed), world.network, book["memory"])
            store.checkpoint(server, fleet, States())
        return store

    @staticmethod
    def _head(store: Store, fixed: Deployment) -> dict[str, Any]:
        """The head of the notebook as the run stands."""
        manifest = store.manifest() or {}
        folder = store.folder / "checkpoints"
        memory = wire.load(folder / manifest["files"]["server"])["memory"]
        return {
            "round": manifest["round"], "memory": memory, "columns": wire.load(folder / manifest["files"]["fleet"]),
            "bytes": manifest["bytes"], "fixed": asdict(fixed),
        }  # fmt: skip


def _refusal(answer: Mapping[str, Any] | str) -> str:
    """Why somebody did not do as it was asked; empty if it did."""
    return answer if isinstance(answer, str) else line(answer.get("refuses", ""))


def join_peers(
    study_file: Path, name: str, keys: Path, device: Device, *, least: int = 0, watch: Watch, say: Say
) -> Path | None:
    """Be a peer of a study without a server until it is over."""
    addresses = {key: str(value) for key, value in table(keys / "peers.toml").items()}
    least, study = enough(least, len(addresses)), study_of(study_file, len(addresses), say)
    if has_server(study):
        raise InputError(f"{study.method.name} has a server; start it with: fedloom serve {study_file}")
    # Every finished round goes into the notebook, and what this peer trains on is its own matter.
    own = {"run": study.run.model_copy(update={"checkpoint_every": 1}),
           "engine": study.engine.model_copy(update={"device": device.device})}  # fmt: skip
    study = study.model_copy(update=own)
    peer = Peer(study, device, keys, addresses, say)
    try:
        folder = peer.take_part(least, watch)
    except Interrupted as stop:
        again = f"Go on with: fedloom join {study_file} --name {name} ..., as before"
        raise Interrupted(stop.folder, stop.exit_code - 128, again) from None
    finally:
        peer.calls.close()
    return folder
