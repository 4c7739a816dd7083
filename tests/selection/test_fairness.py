"""Who was chosen, by hand and from a run's folder."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.report.fairness import Chosen, fairness, jain, read
from tests.methods.tiny import run

NAN = np.nan
# Four clients, three rounds; two classes: client 0 and 1 hold the first, 2 holds both, 3 the second.
HAND = Chosen(
    4, 3, [np.array([0, 1]), np.array([0, 2]), np.array([0, 1])],
    losses={1: np.array([1.0, 2.0, 3.0, 2.0]), 2: np.array([4.0, NAN, 1.0, 1.0]), 3: np.ones(4)},
    accuracies={1: np.full(4, 0.1), 3: np.array([0.5, 0.7, NAN, 0.9])},
    samples=np.array([[6.0, 0], [2, 0], [2, 4], [0, 6]]),
)  # fmt: skip


def test_counts_by_hand():
    assert HAND.counts.tolist() == [3, 2, 1, 0]
    assert not HAND.everybody
    numbers = HAND.numbers()
    assert (numbers["never_chosen"], numbers["most_chosen"]) == (1, 3)
    assert numbers["jain_index"] == jain(HAND.counts) == pytest.approx(36 / (4 * 14))


def test_coverage_by_hand():
    assert HAND.coverage.tolist() == [[0.8, 0.0], [1.0, 0.4], [1.0, 0.4]]
    assert HAND.present.tolist() == [0.5, 1.0, 0.5]
    assert HAND.numbers()["least_covered_class"] == 0.4


def test_skew_by_hand():
    """The second round took losses 1 and 3 of mean 2; the third 4 and an unknown one of mean 2; nobody came after."""
    assert HAND.skew == {2: pytest.approx(2 / 2), 3: pytest.approx(4 / 2)}


def test_accuracy_is_that_of_the_last_evaluation():
    assert HAND.accuracy == pytest.approx([0.5, 0.7, NAN, 0.9], nan_ok=True)
    assert HAND.numbers()["deviation_of_accuracy"] == pytest.approx(np.std([0.5, 0.7, 0.9]))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    plan = {"fleet": {"clients": 6}, "select": {"name": "chfl", "fraction": 0.34}, "run": {"rounds": 4}}
    return run("fedavg", tmp_path_factory.mktemp("fair"), evaluate={"every": 2}, **plan)


def test_a_run_is_read_from_its_folder(result):
    chosen, ledger = read(result.folder), result.rows("clients")
    asked = [entry for entry in ledger if entry["job"] == "work"]
    assert chosen.counts.tolist() == [sum(entry["client"] == client for entry in asked) for client in range(6)]
    assert chosen.counts.sum() == 8
    assert sorted(chosen.accuracies) == [2, 4]
    assert result.summary["local_accuracy"] == pytest.approx(chosen.accuracy.mean())
    assert chosen.samples.sum() == 120
    trained = {entry["client"]: entry["samples"] for entry in asked}
    assert trained == {client: chosen.samples[client].sum() for client in trained}
    assert sorted(chosen.skew) == [3]


def test_pictures_of_runs_large_and_small(result, tmp_path):
    assert fairness(result.folder) == result.folder / "fairness.png"
    crowd = run("tests.methods.tiny:Idle", tmp_path, fleet={"clients": 250}, select={"fraction": 0.1},
                data={"limit": 1000}, partition={"name": "iid"}, evaluate={"clients": 20})  # fmt: skip
    picture = crowd.fairness(tmp_path / "crowd.png")
    for path in (result.folder / "fairness.png", picture):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_without_the_data_set_the_rest_is_still_shown(result, tmp_path, monkeypatch):
    from fedloom.errors import InputError
    from fedloom.report import fairness as module

    def gone(*_):
        raise InputError("no data here")

    monkeypatch.setattr(module, "world_of", gone)
    chosen = read(result.folder)
    assert chosen.samples is chosen.coverage is chosen.present is None
    assert chosen.counts.sum() == 8
    assert fairness(result.folder, tmp_path / "bare.png").is_file()
