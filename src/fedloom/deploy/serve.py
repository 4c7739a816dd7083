"""The server half of a deployment: wait for clients, run a study with them, tell them when it is over."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from fedloom import __version__
from fedloom.data.levels import count_levels, moments
from fedloom.deploy.engine import Flower
from fedloom.deploy.folder import Port, ServerSettings, settings
from fedloom.deploy.messages import SMALL
from fedloom.deploy.roster import Member, Roster, agreed, registered
from fedloom.deploy.worlds import ServerWorld, server_data, suits, told
from fedloom.errors import InputError, Interrupted
from fedloom.runs.experiment import Watch, experiment
from fedloom.runs.result import Result
from fedloom.runs.start import DEPLOYMENT, goes_on, plain
from fedloom.runs.store import STATUS, Store
from fedloom.runs.study import Study, method_of, read, resolve
from fedloom.runs.world import must_be_there
from fedloom.settings import value_of

__all__ = [
    "Deployment", "Meeting", "Say", "columns_of", "conduct", "enough", "fix", "gather", "has_server",
    "rounds_of", "serve", "study_of",
]  # fmt: skip

KEPT = ("weak", "deadline")  # settings of a fleet that real clients have too
Say = Callable[[str], None]


def _quietly(sentence: object) -> None:
    """Say nothing."""


watching: ContextVar[Watch] = ContextVar("watching", default=_quietly)
saying: ContextVar[Say] = ContextVar("saying", default=_quietly)


def serve(
    target: Path,
    keys: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    least: int = 0,
    test: Path | None = None,
    public: Path | None = None,
    watch: Watch = _quietly,
    say: Say = _quietly,
) -> Result:
    """Run a study, or go on with a run's folder, with the clients that join."""
    own = settings(keys / "server.toml", ServerSettings)
    port = own.port if port is None else value_of("--port", port, Port)
    if port is None:
        raise InputError(f"{keys / 'server.toml'} does not say the port to listen on; give --port")
    known = registered(keys)
    if not target.is_dir():
        _served(target, len(known))  # whatever is wrong with it is said before anybody waits
    from flwr.app import Context, RecordDict

    from fedloom.deploy.apps import server_app
    from fedloom.deploy.link import link

    where = host or own.host, port
    config: dict[str, Any] = {
        "study": str(target),
        "keys": str(keys),
        "min": least,
        "test": str(test or ""),
        "public": str(public or ""),
    }
    watching.set(watch)
    saying.set(say)
    with link(known, keys, *where, rate=own.rate) as grid:
        say(f"listening on {where[0]}:{where[1]}")
        context = Context(grid.run.run_id, 1, {}, RecordDict(), config)
        server_app(grid, context)
    folder = Path(str(context.state["fedloom"]["run_dir"]))
    store = Store.open(folder)
    return Result(store, store.read("summary.json") or {})


def rounds_of(target: Path) -> tuple[str, int]:
    """The method's name and the number of rounds of a study or a run's folder."""
    study = Store.open(target).study() if target.is_dir() else resolve(read(target), str(target))
    return study.method.name, study.run.rounds


def study_of(path: Path, clients: int, say: Say = _quietly) -> Study:
    """The study of a file, about real clients: its fleet is who is registered, and it says nothing of a partition."""
    sections = read(path)
    fleet = sections.pop("fleet", {})
    if not isinstance(fleet, dict):
        raise InputError(f"'fleet' must be a section with settings; got {fleet!r} ({path})")
    kept = {key: value for key, value in fleet.items() if key in KEPT}
    ignored = [f"fleet.{key}" for key in fleet if key not in KEPT]
    if sections.pop("partition", None) is not None:
        ignored.append("partition")
    study = resolve({**sections, "fleet": {**kept, "clients": clients}}, str(path))
    suits(study)
    if ignored:
        say(f"{path}: clients hold their own data and tell their capacities; not used: {', '.join(ignored)}")
    return study


def has_server(study: Study) -> bool:
    """Whether the method has one, or is peers among themselves."""
    return not method_of(study).serverless


def enough(asked: int, known: int) -> int:
    """How many clients to wait for; 0 asks for all."""
    if not 0 <= asked <= known:
        raise InputError(f"--min must be between 1 and the {known} registered clients; got {asked}")
    return asked or known


def _served(path: Path, clients: int, say: Say = _quietly) -> Study:
    """A study for a server."""
    study = study_of(path, clients, say)
    if not has_server(study):
        raise InputError(
            f"{study.method.name} has no server; start every client as a peer: "
            f"fedloom join {path} --name NAME --data FILE"
        )
    return study


@dataclass(frozen=True)
class Deployment:
    """What is fixed once the first clients are there, and outlives the server's process."""

    run: str
    names: list[str]
    shape: list[int]
    class_names: list[str]
    mean: list[float]
    std: list[float]
    files: dict[str, dict[str, str]] = field(default_factory=dict)  # test, public -> where the server has it, its hash

    @cached_property
    def normal(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation as arrays."""
        return np.array(self.mean), np.array(self.std)


def _own_files(given: Mapping[str, Any], before: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The server's own files: what is given, else what the run began with, which must be as it was then."""
    files = {}
    for name in ("test", "public"):
        known = before.get(name, {})
        path = Path(str(given.get(name) or known.get("path", "")))
        if not (given.get(name) or known):
            continue
        if not path.is_file():
            again = f", with which the run began; give --{name} if it lies elsewhere now" if known else ""
            raise InputError(f"data '{path}' does not exist{again}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != known.get("sha256", found):
            raise InputError(
                f"{path} is not what it was when the run began, with --{name} {known['path']}; "
                f"put that file back, or start a new run"
            )
        files[name] = {"path": str(path.resolve()), "sha256": found}
    return files


def conduct(grid: Any, config: Mapping[str, Any]) -> Path:
    """Run a study over a grid from wherever it stands; gives the run's folder."""
    target, keys = Path(str(config["study"])), Path(str(config["keys"]))
    known = registered(keys)
    say, store, fixed = saying.get(), None, None
    if target.is_dir():
        store = Store.open(target)
        written = store.read(DEPLOYMENT)
        if written is None:
            raise InputError(f"{target} is not the folder of a served run; go on with: fedloom resume {target}")
        if store.read("summary.json") is not None:
            return target
        if not has_server(store.study()):
            raise InputError(f"{target} is a run of peers, without a server; go on with: {goes_on(store)}")
        fixed = Deployment(**written)
        if gone := set(fixed.names) - known.keys():
            raise InputError(f"{keys} no longer knows {', '.join(sorted(gone))}, who took part in {target}")
        known = {name: known[name] for name in fixed.names}
    files = _own_files(config, fixed.files if fixed else {})
    test, public = (Path(files[name]["path"]) if name in files else None for name in ("test", "public"))
    roster = Roster(grid, known, getattr(grid, "traffic", None))
    least = enough(int(config.get("min") or 0), len(roster))
    study = store.study() if store else _served(target, len(roster), say)
    must_be_there("engine.device", study.engine.device)
    roster.file = store.folder / STATUS if store else None
    gather(roster, least, say)
    fixed = replace(fixed or fix(roster, study, public), files=files)
    data = server_data(public, test, fixed.shape, fixed.class_names, len(roster))
    world = ServerWorld(study, *data, normal=fixed.normal, joined=columns_of(roster, study))
    world.check()
    if store is None:
        name = plain(f"{study.method.name}-served-{study.run.seed}")
        store = Store.create(Path(study.run.out), name, study.model_dump_json(indent=1), world.split)
        roster.file = store.folder / STATUS
    store.write(DEPLOYMENT, asdict(fixed))
    limit = SMALL + 4 * sum(tensor.nbytes for tensor in world.network.initial(0).values())
    if guard := getattr(grid, "guard", None):
        guard.limit = limit
    meet = Meeting(roster, study, fixed, world, say)
    engine = Flower(roster, world, fixed.run, limit=limit, deadline=study.engine.deadline, arrivals=meet)
    try:
        experiment(store, world, watching.get(), engine)
    except Interrupted as stop:
        raise Interrupted(stop.folder, stop.exit_code - 128, f"Go on with: fedloom serve {stop.folder}") from None
    finally:
        roster.write(now=True)
    roster.ask("end", {member.number: {"run": fixed.run} for member in roster.connected}, 10.0)
    return store.folder


def gather(roster: Roster, least: int, say: Say) -> None:
    """Wait until enough clients are there; say who comes and who is refused."""
    said: dict[str, str] = {}
    while True:
        roster.greet()
        for member in roster.members:
            if member.state in ("connected", "refused") and said.get(member.name) != member.activated:
                said[member.name] = member.activated
                say(_arrival(member))
        if len(roster.connected) >= least:
            return
        if "" not in said:
            said[""] = ""
            say(f"waiting for {least} of {len(roster)} registered clients")
        roster.write()
        time.sleep(0.1)


def _arrival(member: Member) -> str:
    if member.state == "refused":
        return f"{member.name} was refused: {member.reason}"
    facts = member.facts
    return f"{member.name} joined: {facts['samples']} samples, capacity {facts['capacity']:g}, torch {facts['torch']}"


def fix(roster: Roster, study: Study, public: Path | None) -> Deployment:
    """Agree on the kind of data and on how to normalise it, from what the first clients said."""
    shape, class_names = agreed(roster.connected)
    if study.data.normalise == "fixed" and not method_of(study).personal:
        mean, std = [0.5] * shape[0], [0.5] * shape[0]
    else:
        counts = sum(member.facts["levels"] for member in roster.connected)
        if public is not None:
            dataset, split = server_data(public, None, shape, class_names, 1)
            counts = counts + count_levels(dataset.x, split.public)
        mean, std = (value.tolist() for value in moments(counts))
    return Deployment(token_hex(16), [member.name for member in roster.members], shape, class_names, mean, std)


def columns_of(roster: Roster, study: Study) -> dict[str, np.ndarray]:
    """What the clients said, as the fleet's columns; those never seen are absent."""
    facts = [member.facts for member in roster.members]
    capacity = np.array([float(each.get("capacity", 1.0)) for each in facts])
    whole = not method_of(study).adapts
    return {
        "samples": np.array([float(each.get("samples", 0)) for each in facts]),
        "capacity": capacity,
        "excluded": (capacity < 1) & (study.fleet.weak == "exclude") & whole,
        "absent": np.array([not (member.state == "connected" and member.ready) for member in roster.members]),
    }


@dataclass(frozen=True)
class Meeting:
    """The roll call before each round: greet whoever came, tell it the study, wait if nobody is there."""

    roster: Roster
    study: Study
    fixed: Deployment
    world: ServerWorld
    say: Say
    least: int = 1

    def __call__(self) -> dict[str, np.ndarray]:
        """The fleet's columns as they are now."""
        waiting = False
        while True:
            self.roster.greet()
            new = [member for member in self.roster.connected if not member.ready]
            for member in new:
                self._judge(member)
            bodies = {member.number: self._body(member) for member in new if member.state == "connected"}
            self.roster.set_up(bodies)
            for member in new:
                if member.state == "refused":
                    self.say(f"{member.name} was refused: {member.reason}")
            columns = columns_of(self.roster, self.study)
            if (~columns["absent"] & ~columns["excluded"]).sum() >= self.least:
                self.roster.write(now=True)
                return columns
            if not waiting:
                waiting = True
                self.say("too few are connected; waiting")
            self.roster.write()
            time.sleep(0.2)

    def _judge(self, member: Member) -> None:
        """Refuse a client that does not fit a run that has begun."""
        weak = member.facts["capacity"] < 1 and not self.world.method.adapts and self.study.fleet.weak == "refuse"
        if (member.facts["shape"], member.facts["class_names"]) != (self.fixed.shape, self.fixed.class_names):
            member.state, member.reason = "refused", f"'{member.name}' holds other images or classes than the others"
        elif weak:
            member.state = "refused"
            member.reason = f"{self.study.method.name} trains whole models, which '{member.name}' cannot train"

    def _body(self, member: Member) -> dict[str, Any]:
        fixed = self.fixed
        return {
            "run": fixed.run, "client": member.number, "fedloom": __version__, "study": told(self.study),
            "shape": fixed.shape, "class_names": fixed.class_names, "mean": fixed.mean, "std": fixed.std,
        }  # fmt: skip
