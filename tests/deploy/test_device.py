"""A device: what it takes of what a server tells it, and which versions of its state it keeps."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from fedloom import wire
from fedloom.deploy.device import Device, Disk, StateLost
from fedloom.deploy.worlds import heard, told
from fedloom.errors import InputError
from fedloom.registry import find
from fedloom.runs.study import resolve
from fedloom.types import NEVER, Failure, Named, Outcome, Task
from tests.deploy.federation import free_port  # noqa: F401 (torch's threads are set there)

RUN = "0123456789abcdef"


@pytest.fixture
def device(tmp_path):
    drawn, labels = np.random.default_rng(0), np.arange(40) % 10
    pictures = drawn.integers(0, 255, (40, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=pictures, y_train=labels, x_test=pictures[:20], y_test=labels[:20])
    return Device("one", tmp_path / "own.npz", tmp_path / "state")


def setup(device, study, **more):
    facts = device.facts()
    return device.answer("setup", {
        "run": RUN, "client": 0, "study": study, "shape": facts["shape"], "class_names": facts["class_names"],
        "mean": [0.5], "std": [0.5], **more,
    })  # fmt: skip


def study_of(**sections):
    return told(resolve({"method": {"name": "fedavg"}, "model": {"name": "mlp"}, **sections}))


def test_what_a_server_tells_is_understood(device):
    sections = {
        "method": {"name": "fedbn"}, "data": {"augment": "randaugment:2:5", "normalise": "fixed"},
        "evaluate": {"model": "trained"}, "engine": {"deadline": 4.0}, "run": {"seed": 7, "rounds": 3},
        "partition": {"name": "dirichlet:0.5"}, "fleet": {"clients": 3},
    }  # fmt: skip
    assert setup(device, study_of(**sections)) == {}
    assert device._world.study.run.seed == 7
    assert device._world.study.data.augment == "randaugment:2:5"


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that notes when it is imported."""
    (tmp_path / "trap.py").write_text("def load(*given, **named):\n    raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "trap"
    sys.modules.pop("trap", None)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "public_from", "trap:load"),
        ("data", "name", "trap:load"),
        ("partition", "name", "trap:load:1"),
        ("fleet", "name", "trap:load"),
        ("engine", "name", "trap:load"),
        ("method", "name", "trap:load"),
        ("method", "name", "trap:!"),
        ("method", "name", "trap:load.more"),
        ("method", "name", "trap:"),
        ("merge", "name", " trap:load"),
        ("objective", "to", "trap:load"),
        ("model", "name", "trap:load"),
        ("model", "others", [{"name": "trap:load"}]),
        ("train", "optimizer", "trap:load"),
    ],
)
def test_nothing_that_a_server_names_is_imported(device, trap, section, key, value):
    study = study_of()
    study[section] = {**study.get(section, {}), key: value}
    assert setup(device, study)["refuses"]
    assert "trap" not in sys.modules


def test_an_import_path_is_taken_where_it_is_allowed(trap):
    study = {**study_of(), "model": {"name": "trap:load"}}
    with pytest.raises(InputError, match="names 'trap:load', which is not part of fedloom and not allowed here"):
        heard(study, ["trap:other"], "cpu")
    assert heard(study, ["trap:load"], "cpu").model.name == "trap:load"


def test_more_than_clients_are_told_is_refused(device):
    for section, key, value in (("data", "public", 5), ("run", "out", "/tmp/elsewhere"), ("engine", "device", "cuda")):
        answer = setup(device, {**study_of(), section: {key: value}})
        assert f"the server tells {key} of [{section}], which are this client's own matter" in answer["refuses"]


def test_a_device_refuses_what_a_server_refuses(device):
    for name in ("dsfl", "fedmd"):
        assert "cannot be deployed" in setup(device, study_of(method={"name": name}))["refuses"]
    models = {"name": "mlp", "others": [{"name": "lenet5"}]}
    assert setup(device, {**study_of(), "model": models})["refuses"]


def test_an_import_path_is_checked_before_it_is_imported(trap):
    for path in ("trap:!", "trap:", "trap:load.more", "trap.:load"):
        with pytest.raises(InputError, match="is no import path; expected package"):
            find("method", path)
    assert "trap" not in sys.modules


def test_a_device_that_is_none_is_refused(device, monkeypatch):
    with pytest.raises(InputError, match="unknown --device 'foo'; allowed: cpu or cuda"):
        Device("one", device.state, device.state, device="foo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--device is 'cuda' but this machine has no CUDA device; use cpu"):
        Device("one", device.state, device.state, device="cuda")


def version(number):
    return {"v": torch.tensor(float(number))}


def disk(folder):
    """As a new process finds it."""
    made = Disk(folder)
    made.take(0)
    return made


def files(folder):
    return sorted(path.name for path in folder.glob("state-*"))


def test_a_version_that_was_refused_does_not_come_back_with_a_new_process(tmp_path):
    first = disk(tmp_path)
    first.propose(0, (3, 0), version(3))
    first.load(0, (3, 0))
    first.propose(0, (5, 0), version(5))  # its report never counted
    first.load(0, (3, 0))  # round 7, whose report counts and changes no state
    assert files(tmp_path) == ["state-3-0.safetensors"]
    assert disk(tmp_path).load(0, (7, 0)) == version(3)


def test_who_never_had_a_state_that_counted_begins_without(tmp_path):
    first = disk(tmp_path)
    assert first.load(0, NEVER) == {}
    first.propose(0, (0, 0), version(0))
    first.forget(0, NEVER)
    assert first.load(0, NEVER) == {}  # it was late
    assert disk(tmp_path).load(0, (4, 0)) == {}


@pytest.mark.parametrize("accepted", [NEVER, (1, 1), (3, 0)])
def test_a_state_that_was_forgotten_is_an_error_and_newer_ones_stay(tmp_path, accepted):
    first = disk(tmp_path)
    for moment in [(1, 1), (4, 1), (5, 0)]:
        first.propose(0, moment, version(moment[0]))
    first.forget(0, (4, 1))
    for each in (first, disk(tmp_path)):
        with pytest.raises(StateLost, match="is gone: the client has gone on since"):
            each.load(0, accepted)
        assert files(tmp_path) == ["state-4-1.safetensors", "state-5-0.safetensors"]
    assert disk(tmp_path).load(0, (5, 0)) == version(5)


def test_a_client_whose_state_is_gone_is_lost_and_does_not_begin_anew(device):
    assert setup(device, study_of(method={"name": "fedbn"})) == {}

    def outcome(round, accepted):
        tensors = {"model": device._world.network.initial(0)}
        task = Task(0, round, method=Named("fedbn"), model=Named("mlp"), tensors=tensors, accepted=accepted)
        found = device.answer("work", {"run": RUN, "task": task, "safe": accepted})["outcome"]
        assert isinstance(found, Outcome)
        return found

    device._disk.propose(0, (2, 0), version(2))
    device._disk.propose(0, (3, 0), version(3))
    assert outcome(4, (3, 0)).failure is None
    failure = outcome(3, (2, 0)).failure  # as an older copy of the run would ask
    assert (failure.kind, failure.round) == ("lost", 3)
    assert "its state as of round 3, stage 0 is gone" in failure.message


def test_versions_are_read_onto_the_device(tmp_path, monkeypatch):
    disk(tmp_path).propose(0, (1, 0), version(1))
    where = []
    monkeypatch.setattr(wire, "load", lambda path, device="cpu": where.append(device) or {})
    for read in ("load", "at"):
        made = Disk(tmp_path, "elsewhere")
        made.take(0)
        getattr(made, read)(0, (1, 0))
    assert where == ["elsewhere", "elsewhere"]


def test_frames_are_unpacked_onto_the_device(monkeypatch):
    pytest.importorskip("flwr")
    from flwr.app import Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fedloom.deploy import apps
    from fedloom.deploy.messages import Letter, write
    from fedloom.deploy.roster import Member, Roster, Sent

    class Elsewhere:
        device = "meta"

        def answer(self, kind, body):
            return {"where": body["tensor"].device.type}

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(apps, "_device", lambda config: Elsewhere())
    letter = Letter("work", {"tensor": torch.zeros(2)})
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    reply = apps.client_app(Message(write(letter.frame), 1, "train.work"), context)
    assert wire.unpack(reply.content["fedloom"]["frame"])["body"] == {"where": "meta"}

    class Grid:
        def pull_messages(self, names):
            return [answer]

        def get_nodes(self):
            return []

    answer = Message(write(letter.frame), 1, "train.work")
    answer.metadata.__dict__["_reply_to_message_id"] = "one"
    under_way = {"one": Sent(Member("one", 0), letter.ticket, "", 0.0)}
    ((_, _, body),) = Roster(Grid(), {"one": b"key"}).collect(under_way, 2**20, "meta")
    assert body["tensor"].device.type == "meta"


def test_a_state_that_is_gone_is_lost_in_the_ledger_too():
    pytest.importorskip("flwr")
    from fedloom.deploy.engine import Flower
    from fedloom.deploy.roster import Roster

    engine = Flower(Roster(None, {"one": b"key"}), None, RUN, limit=0, deadline=None, arrivals=dict)
    told = Outcome(0, 3, 0, "work", failure=Failure(0, 3, 0, "lost", "its state is gone"))
    assert engine._outcome(Task(0, 3), 0.0, {"outcome": told}).failure == told.failure
