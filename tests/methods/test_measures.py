"""How good is it? The numbers of a round and of a run, from rows made by hand and counted again."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.func import functional_call

from fedloom.engine.local import Local
from fedloom.engine.reference import Reference
from fedloom.models.resolve import build
from fedloom.readings import Accuracy
from fedloom.runs.evaluation import costs, summarise, to_target
from fedloom.types import Measure
from tests.contract.study import rows
from tests.methods.tiny import NORMED, run, server_of, world


def row(round, accuracy="missing", local="missing", up=10, down=20, virtual=2.0, seconds=1.0, **more):
    made = {"round": round, "seconds": seconds, "upload_bytes": up, "download_bytes": down, "train_macs": 5,
            "virtual_seconds": virtual, "clients": 3, "failures": 1, "train_loss": 1.0}  # fmt: skip
    if accuracy != "missing":
        made |= {"global_accuracy": accuracy, "local_accuracy": local, "worst_local_accuracy": 0.1}
    return made | {"evaluation_seconds": 0.5} | more if accuracy != "missing" else made | more


ROWS = [row(1, 0.2, 0.1), row(2), row(3, 0.7, 0.6), row(4, 0.9, 0.5), row(5), row(6, 0.9, 0.4), row(7, 0.8, 0.3)]


def test_last_and_best_round():
    found = summarise(ROWS, None)
    assert (found["global_accuracy"], found["local_accuracy"], found["worst_local_accuracy"]) == (0.8, 0.3, 0.1)
    assert (found["best_global_accuracy"], found["best_round"]) == (0.9, 4), "the first of equals"
    assert "rounds_to_target" not in found


def test_totals_and_medians():
    found = summarise([row(1, 0.5, 0.5, seconds=9.0), row(2, seconds=1.0), row(3, 0.5, 0.5, seconds=2.0)], None)
    assert (found["upload_bytes"], found["download_bytes"], found["train_macs"]) == (30, 60, 15)
    assert (found["virtual_seconds"], found["failures"]) == (6.0, 3)
    assert found["seconds"] == 9 + 1 + 2 + 2 * 0.5
    assert found["seconds_per_round"] == 2.0, "the median, without evaluation"


@pytest.mark.parametrize(("target", "rounds"), [(0.1, 1), (0.2, 1), (0.21, 3), (0.7, 3), (0.9, 4), (0.91, None)])
def test_to_target(target, rounds):
    found = to_target(ROWS, target)
    assert found["rounds_to_target"] == rounds
    assert found["bytes_to_target"] == (None if rounds is None else 30 * rounds)
    assert found["virtual_seconds_to_target"] == (None if rounds is None else 2.0 * rounds)
    assert found["target_measure"] == "global_accuracy"
    assert summarise(ROWS, target).items() >= found.items()


def test_to_target_without_a_global_model_is_about_the_clients_own():
    local = [row(1, None, 0.4), row(2), row(3, None, 0.6)]
    assert to_target(local, 0.6)["rounds_to_target"] == 3
    assert summarise(local, 0.6)["target_measure"] == "local_accuracy"
    found = summarise(local, 0.9)
    assert found["global_accuracy"] is found["best_global_accuracy"] is found["best_round"] is None
    assert found["local_accuracy"] == 0.6
    assert found["rounds_to_target"] is None


def entry(client, loss=None, samples=None, failed="", **more):
    numbers = {} if loss is None else {"loss": loss, "samples": samples}
    costs_of_one = {"upload_bytes": 1, "download_bytes": 2, "macs": 3, "forward_macs": 5 * (client + 1)}
    costs_of_one["parameters"] = 10 * (client + 1)
    return {"client": client, "failed": failed, "job": "work"} | costs_of_one | numbers | more


def test_costs_of_a_round():
    ledger = [entry(0, 1.0, 10), entry(1, 4.0, 30), entry(2, 99.0, 50, "late"), entry(3, failed="raised"), entry(0)]
    assert costs(ledger, 7.5, 2) == {
        "train_loss": (10 + 120) / 40, "upload_bytes": 5, "download_bytes": 10, "train_macs": 15,
        "virtual_seconds": 7.5, "clients": 4, "failures": 2, "mean_parameters": 15.0,
        "mean_forward_macs": 7.5,
    }  # fmt: skip
    assert costs([], 0.0, 0)["train_loss"] is None


def test_a_question_of_the_round_costs_traffic_and_is_no_training():
    ledger = [entry(0, 1.0, 10), entry(1, 9.0, 90, job="loss")]
    found = costs(ledger, 1.0, 0)
    assert (found["train_loss"], found["clients"], found["mean_parameters"]) == (1.0, 1, 10)
    assert (found["upload_bytes"], found["download_bytes"]) == (2, 4)


@pytest.fixture
def answers(monkeypatch):
    """What every client answered when it was evaluated."""
    kept, plain = [], Local.run

    def record(self, tasks):
        for outcome in plain(self, tasks):
            if outcome.job == "evaluate" and outcome.report is not None:
                kept.append(dict(outcome.report.numbers))
            yield outcome

    monkeypatch.setattr(Local, "run", record)
    return kept


def logits(place, tensors, indices):
    data, model = place.dataset, place.study.model
    module = build(model.name, channels=data.channels, classes=data.classes, size=data.size, **model.fields).eval()
    batch = place.images.batch(torch.from_numpy(np.ascontiguousarray(indices)))
    return functional_call(module, tensors, (batch.x,)), batch.y


@pytest.mark.parametrize("clients", [4, 25])
def test_accuracies_counted_again(clients, answers, tmp_path):
    study = {"fleet": {"clients": clients}, "partition": {"name": "iid"}, "run": {"rounds": 1}, "data": {"limit": 300}}
    result = run("fedavg", tmp_path, **study)
    (found,) = result.rows("metrics")
    place, tensors = world(**study), server_of(result)
    local = []
    for client in range(clients):
        scores, labels = logits(place, tensors, place.split.test[client])
        local.append(float((scores.argmax(1) == labels).double().mean()))
    assert [answer["accuracy"] for answer in answers] == local
    assert found["local_accuracy"] == pytest.approx(np.mean(local))
    assert found["worst_local_accuracy"] == pytest.approx(np.mean(sorted(local)[: max(1, clients // 10)]))
    assert found["spread_local_accuracy"] == pytest.approx(np.std(local))
    scores, labels = logits(place, tensors, place.dataset.test_rows)
    right = scores.argmax(1) == labels
    assert found["global_accuracy"] == pytest.approx(float(right.double().mean()))
    assert found["global_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, labels)))
    assert found["class_accuracy"] == pytest.approx([float(right[labels == c].double().mean()) for c in range(10)])


def test_a_class_without_test_pictures_has_no_accuracy(tmp_path):
    """Nothing was measured; 0 would say that all of it was wrong."""
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (60, 8, 8), np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "three.npz", x_train=x, y_train=y, x_test=x[y != 2], y_test=y[y != 2])
    data = {"name": str(tmp_path / "three.npz"), "limit": None}
    (found,) = rows(run("fedavg", tmp_path, data=data, partition={"name": "iid"}, run={"rounds": 1}))
    assert found["class_accuracy"][2] is None
    assert all(value is not None for value in found["class_accuracy"][:2])


def test_evaluation_happens_when_asked_and_at_the_end(tmp_path):
    result = run("fedavg", tmp_path, evaluate={"every": 2}, run={"rounds": 5}, data={"limit": 30})
    assert [row["round"] for row in rows(result) if "global_accuracy" in row] == [2, 4, 5]
    assert result.summary["global_accuracy"] == rows(result)[-1]["global_accuracy"]


def test_a_target_is_in_the_summary(tmp_path):
    result = run("fedavg", tmp_path, evaluate={"target": 0.01}, run={"rounds": 2})
    first = rows(result)[0]
    assert result.summary["rounds_to_target"] == 1
    assert result.summary["bytes_to_target"] == first["upload_bytes"] + first["download_bytes"]


DOUBLED = {
    "perfedavg": {"train": {"steps": 2, "batch_size": 4}}, "ditto": {}, "fedrep": {"method": {"head_epochs": 3}},
    "fedckd": {"method": {"mu0": 0.0}},
    "fedrkd": {}, "fedcpn": {"start": {"most": 3}}, "fedmd": {"method": {"public_epochs": 1, "private_epochs": 1}},
    "fedes": {"method": {"first": 1.0, "sigma": 0.0}},
}  # fmt: skip


@pytest.mark.parametrize("method", DOUBLED)
def test_a_forward_pass_costs_what_the_model_costs_whatever_training_does_with_it(method, tmp_path):
    """Several gradients a step, teachers, second models and other fits of the round are in `train_macs` alone."""
    changes = {"data": {"validation": 0.2, "public": 10}, **DOUBLED[method]}
    summary = run(method, tmp_path, **changes).summary
    plain = run("fedavg", tmp_path, **{name: changes[name] for name in ("data", "train") if name in changes}).summary
    assert summary["mean_forward_macs"] == summary["last_forward_macs"] == 64 * 8 + 8 * 10
    assert summary["train_macs"] > plain["train_macs"]


def test_what_a_client_reads_of_its_data_costs_what_it_computes(tmp_path):
    """FedDSE's clients run the whole model over all their training samples before they train a part of it."""
    federation = {"fleet": {"name": "low", "clients": 5}, "model": {"hidden": [16]}, "run": {"rounds": 1}}
    result = run("feddse", tmp_path, **federation)
    worked = [entry for entry in result.rows("clients") if entry["job"] == "work"]
    assert len(worked) == 5
    for entry in worked:
        samples, whole = int(entry["samples"]), 64 * 16 + 16 * 10
        assert entry["forward_macs"] < whole
        assert entry["macs"] == 3 * entry["forward_macs"] * samples + whole * samples


def test_asking_candidates_for_their_loss_costs_their_passes(tmp_path):
    asked = {"select": {"name": "powd", "fraction": 0.4, "candidates": 4}, "fleet": {"clients": 5}}
    asking, silent = (
        run("fedavg", tmp_path / str(ask), **{**asked, "select": {**asked["select"], "ask": ask}}, run={"rounds": 1})
        for ask in (True, False)
    )
    questions = [entry for entry in asking.rows("clients") if entry["job"] == "loss"]
    assert questions
    held = world("fedavg", **asked).split.train.sizes
    forward = 64 * 8 + 8 * 10
    assert all(entry["macs"] == forward * held[entry["client"]] for entry in questions)
    work = sum(entry["macs"] for entry in asking.rows("clients") if entry["job"] == "work")
    assert asking.summary["train_macs"] == work + sum(entry["macs"] for entry in questions)
    assert silent.summary["train_macs"] == sum(
        entry["macs"] for entry in silent.rows("clients") if entry["job"] == "work"
    )


def test_the_model_that_is_kept_is_the_one_that_was_evaluated(tmp_path):
    """Also where clients that tell norm statistics are drawn anew each time they are asked."""
    drawn = {"share": {"name": "static", "asked": 0.4}, "fleet": {"clients": 5}, **NORMED}
    result = run("fedavg", tmp_path, **drawn, run={"rounds": 3})
    told = [entry for entry in result.rows("clients") if entry["job"] == "statistics" and entry["round"] == 2]
    assert len(told) == 2, "asked for once"
    kept = safetensors.torch.load_file(result.folder / "model.safetensors")
    place = world("fedavg", **drawn)
    (read,) = Reference(place.network).solve([Measure(kept, Accuracy(), place.home().test)])
    assert float(read["right"].sum() / read["samples"].sum()) == result.summary["global_accuracy"]
    assert float(read["loss"] / read["samples"].sum()) == rows(result)[-1]["global_loss"]
