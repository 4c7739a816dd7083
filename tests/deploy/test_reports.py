"""What a client may send, and what becomes of it: the round goes on whatever it is."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fedloom import wire
from fedloom.encoding import Sparse, Ternary
from tests.deploy.federation import Federation, toml
from tests.deploy.near import near

HUGE = 2**40
INTS = torch.tensor([0, 1])


def numbers(**told):
    return lambda report: replace(report, numbers={**report.numbers, **told})


def without(name):
    return lambda report: replace(report, numbers={key: n for key, n in report.numbers.items() if key != name})


def first(change):
    """Another value for the first tensor."""

    def spoiled(report):
        name = min(report.tensors)
        return replace(report, tensors={**report.tensors, name: change(report.tensors[name])})

    return spoiled


def also(name):
    return lambda report: replace(report, tensors={**report.tensors, name: torch.zeros(3)})


def made(**fields):
    return lambda report: replace(report, **fields)


ANYWHERE = {
    "no tensors": (made(tensors=5), "'tensors' of a Report"),
    "a tensor that is a number": (first(lambda value: 3.0), "'tensors' of a Report"),
    "tensors without names": (made(tensors={3: torch.zeros(3)}), "'tensors' of a Report"),
    "another shape": (first(lambda value: torch.zeros(7)), "has shape (7,)"),
    "another type": (first(lambda value: torch.zeros(value.shape, dtype=torch.int8)), "is of torch.int8"),
    "not finite": (first(lambda value: torch.full(tuple(value.shape), torch.inf)), "not finite"),
    "a huge claim": (first(lambda value: Sparse((HUGE, HUGE), torch.ones(1), INTS)), "has shape"),
    "a huge ternary claim": (first(lambda value: Ternary((HUGE, HUGE), INTS.byte(), torch.ones(1))), "has shape"),
    "a shape of letters": (first(lambda value: Sparse("xy", torch.ones(1), INTS)), "'shape' of a Sparse"),
    "places that do not fit": (
        first(lambda value: Sparse(tuple(value.shape), torch.ones(2), torch.tensor([-9, 2**30]))),
        "cannot be read",
    ),
    "a name that cannot be shown": (also("\ud800\n"), "tensor '??' "),
    "no numbers": (made(numbers={}), "does not tell"),
    "numbers that are a list": (made(numbers=[1.0]), "'numbers' of a Report"),
    "a number without a name": (made(numbers={("a", 1): 1.0}), "'numbers' of a Report"),
    "a number's name that cannot be shown": (numbers(**{"\udfff": 1.0}), "no text"),
    "a number of a thousand bits": (numbers(loss=10**300), "'numbers' of a Report"),
    "a number of a hundred bits": (numbers(loss=10**30), "'numbers' of a Report"),
    "a number that floats do not hold": (numbers(loss=2**60), "'numbers' of a Report"),
    "a truth for a number": (numbers(loss=True), "'numbers' of a Report"),
    "a tensor for a number": (numbers(loss=torch.ones(1)), "'numbers' of a Report"),
    "a loss that is none": (numbers(loss=float("nan")), "a number is not finite"),
    "a square below zero": (numbers(squared_loss=-1.0), "at least 0 is possible"),
    "a loss left out": (without("loss"), "does not tell 'loss'"),
    "a truth for a weight": (made(weight=True), "'weight' of a Report"),
    "no weight": (made(weight=None), "'weight' of a Report"),
    "a weight beyond its samples": (made(weight=1e308), "its weight is 1e+308, but it has"),
    "a weight below zero": (made(weight=-1.0), "its weight is -1"),
    "units of nothing": (made(where={"fist": INTS}), ""),
    "units that are a list": (made(where=[1]), "'where' of a Report"),
    "classes that are no whole numbers": (made(classes=torch.tensor([0.5, 1.0])), "classes that do not exist"),
    "classes that do not exist": (made(classes=torch.tensor([0, 99])), "classes that do not exist"),
    "a part that nobody asked for": (made(extra={"more": {}}), "further parts are"),
    "parts that are tensors": (made(extra={"control": torch.ones(1)}), "'extra' of a Report"),
}
OF_THEIR_OWN = {
    "fedavg": {"units though nothing is cut": (made(where={"features.0": INTS}), "trained whole")},
    "scaffold": {
        "no control": (made(extra={}), "expected ['control']"),
        "an empty control": (made(extra={"control": {}}), "holds no"),
        "a control of a buffer": (
            lambda report: replace(report, extra={"control": {**report.extra["control"], **report.tensors}}),
            "was not asked for",
        ),
    },
    "fednova": {"no normaliser": (without("normaliser"), "does not tell 'normaliser'")},
    "fedes": {
        "no winner": (without("won"), "does not tell 'won'"),
        "a gene left out": (lambda report: without(gene_of(report))(report), "does not tell"),
        "units that are masks": (
            lambda report: replace(report, where={name: kept > 0 for name, kept in report.where.items()}),
            "rising numbers",
        ),
    },
    "fedamp": {"no tensors at all": (made(tensors={}), "holds no")},
    "heterofl": {"classes twice": (made(classes=torch.tensor([0, 0])), "classes that do not exist")},
    "tfedavg": {
        "codes left out": (
            lambda report: replace(report, tensors={
                name: replace(value, packed=value.packed[:1]) if isinstance(value, Ternary) else value
                for name, value in report.tensors.items()
            }),
            "cannot be read",
        ),
    },
}  # fmt: skip


def gene_of(report):
    return next(name for name in report.numbers if name.startswith("units of"))


def federation(folder, method, rounds):
    return Federation(
        folder, method={"name": method}, run={"rounds": rounds, "checkpoint_every": 10}, train={"steps": 1},
        evaluate={"every": 1000},
    )  # fmt: skip


def packed(answer, **changes):
    """An answer whose outcome says something else."""
    outcome = replace(answer["body"]["outcome"], **changes)
    return wire.pack({**answer, "body": {**answer["body"], "outcome": outcome}})


@pytest.mark.parametrize("method", OF_THEIR_OWN)
def test_a_report_that_is_not_what_was_asked_for_costs_its_client_the_round_and_nobody_else(method, tmp_path):
    cases = list((ANYWHERE | OF_THEIR_OWN[method]).items())

    def spoil(request, answer):
        if request["kind"] != "work":
            return wire.pack(answer)
        _, (change, _) = cases[request["body"]["task"].round]
        return packed(answer, report=change(answer["body"]["outcome"].report))

    store = near(federation(tmp_path, method, len(cases)), spoil)
    work = [row for row in store.rows("clients") if row["job"] == "work"]
    assert not any(row["failed"] for row in work if row["client"] != 1)
    bad = [row for row in work if row["client"] == 1]
    for (kind, (_, reason)), row in zip(cases, bad, strict=True):
        assert row["failed"] == "nonsense", (kind, row)
        assert reason in row["reason"], (kind, row["reason"])
        assert row["parameters"] == 0, kind
    assert len(store.rows("metrics")) == len(cases)
    assert all(row["train_loss"] is not None for row in store.rows("metrics"))


COSTS = {
    "seconds": [float("nan"), float("inf"), -1.0, 1e308],
    "macs": [2**62, -1],
    "forward_macs": [2**62],
    "parameters": [2**62],
    "peak_memory_bytes": [-1, 2**62],
    "step_memory_bytes": [2**62],
}
WRONG_COSTS = {"macs": [10**300, "many", 1.5], "seconds": ["long", None], "peak_memory_bytes": [True]}


def test_what_a_client_claims_of_costs_cannot_be_more_than_fits_into_a_column(tmp_path):
    claims = [(name, value) for name, values in COSTS.items() for value in values]
    wrong = [(name, value) for name, values in WRONG_COSTS.items() for value in values]

    def spoil(request, answer):
        if request["kind"] != "work":
            return wire.pack(answer)
        name, value = [*claims, *wrong][request["body"]["task"].round]
        return packed(answer, **{name: value})

    store = near(federation(tmp_path, "fedavg", len(claims) + len(wrong)), spoil)
    bad = [row for row in store.rows("clients") if row["job"] == "work" and row["client"] == 1]
    assert [row["failed"] for row in bad] == [""] * len(claims) + ["nonsense"] * len(wrong)
    assert all(0 <= row["seconds"] < 60 for row in bad)
    assert all(row["macs"] < 2**53 for row in bad)


def test_failures_are_told_in_a_line_that_can_be_written_down(tmp_path):
    """Half a letter is no text for a column, and a terminal obeys what it is shown."""

    def spoil(request, answer):
        if request["kind"] != "work":
            return wire.pack(answer)
        said = "\ud800\x1b[2J" + 1000 * "no"
        return wire.pack({**answer, "body": [{"raised": said}, {"nonsense": said}][request["body"]["task"].round]})

    store = near(federation(tmp_path, "fedavg", 2), spoil)
    bad = [row for row in store.rows("clients") if row["failed"]]
    assert [(row["client"], row["failed"]) for row in bad] == [(1, "raised"), (1, "nonsense")]
    assert all(row["reason"].startswith("??[2Jnono") and len(row["reason"]) == 500 for row in bad)


RUBBISH = [
    None, True, -1, 0, 2**53 + 1, 2**63, 10**300, 1.5, float("nan"), float("-inf"), "", "x", "\ud800", [], [[]], {},
    {"": {}}, {"a": 1}, {"~tensor": 0}, {"~tensor": 999}, {"~array": 1}, {"~tuple": []}, {"~tuple": [1, 2]},
    {"~dict": [[[1], 2]]}, {"~dict": [[1, 2.0]]},
    {"~Sparse": [{"~tuple": [HUGE]}, {"~tensor": 0}, {"~tensor": 0}, True]},
    {"~Ternary": [{"~tuple": [3]}, {"~tensor": 0}, {"~tensor": 1}]}, {"~Named": ["x", {}]}, {"~Report": []},
    {"~Report": [{}, 1.0, {}, None, None, {}, 1]}, {"~Nothing": [1]},
]  # fmt: skip


def places(tree, path=()):
    """All paths in a tree of JSON."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def harmed(frame, chance):
    """A frame in which something, somewhere, is something else, is gone or is called otherwise."""
    (length,) = struct.unpack_from("<Q", frame)
    kinds, skeleton = json.loads(frame[8 : 8 + length])
    for _ in range(chance.choice([1, 1, 2])):
        *path, last = chance.choice(list(places(skeleton)))
        parent = skeleton
        for key in path:
            parent = parent[key]
        how = chance.choice(["put", "put", "put", "drop", "rename"])
        if how == "put":
            parent[last] = chance.choice(RUBBISH)
        elif how == "drop" or isinstance(parent, list):
            del parent[last]
        else:
            parent[chance.choice(["", "x", "\udfff", "~tuple", "~Report"])] = parent.pop(last)
    header = json.dumps([kinds, skeleton]).encode()
    return struct.pack("<Q", len(header)) + header + frame[8 + length :]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedes", "heterofl"])
def test_whatever_is_sent_the_round_goes_on_and_what_is_not_used_has_a_reason(method, tmp_path):
    chance, rounds = random.Random(method), 24

    def spoil(request, answer):
        frame = wire.pack(answer)
        return harmed(frame, chance) if request["kind"] in ("work", "ask") else frame

    study = federation(tmp_path, method, rounds)
    study.sections["evaluate"]["every"] = 4
    (study.folder / "study.toml").write_text(toml(study.sections))
    store = near(study, spoil)
    rows = store.rows("clients")
    assert not any(row["failed"] for row in rows if row["client"] != 1)
    failed = [row for row in rows if row["failed"]]
    assert len(failed) > rounds / 2
    assert all(row["reason"] and row["failed"] in ("nonsense", "raised", "late") for row in failed)
    assert len(store.rows("metrics")) == rounds
    assert all(np.isfinite(row["train_loss"]) for row in store.rows("metrics"))
