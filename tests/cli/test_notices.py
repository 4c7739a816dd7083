"""What a study says without effect is told in one line when a run starts, and a comparison says it once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedloom.runs.notices import tell
from tests.cli.conftest import SMALL

NO_NORMS = "fedbn: share 'fedbn' keeps norm layers at the clients, but model 'mlp' has none: everything travels"


@pytest.fixture(autouse=True)
def unsaid():
    tell.cache_clear()


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "fedloom.study"]


@pytest.mark.parametrize(("words", "told"), [
    (["fedbn"], NO_NORMS),
    (["fedsgd", "--set", "train.batch_size=8", "--set", "train.steps=3"],
     "fedsgd does not go by train.batch_size and train.steps"),
    (["fedavg", "--set", "train.steps=3", "--set", "train.epochs=2"], "train.steps = 3 counts, train.epochs = 2 does"),
    (["fedavg", "--set", "train.schedule=step", "--set", "train.milestones=[1, 40]"],
     "train.milestones: the last of 1 rounds comes before 1 and 40"),
    (["fedavg", "--set", "evaluate.test_stats=model"], "evaluate.test_stats is about statistics of each client's own"),
    (["fedala", "--set", "start.top=9"], "start.top is 9, but the model has 4 tensors"),
    (["fedavg", "--set", "train.steps=3"], ""),
    (["fedbn", "--model", "lenet5_bn"], ""),
])  # fmt: skip
def test_a_setting_without_effect_is_told(command, caplog, words, told):
    assert command("run", *SMALL, "--rounds", 1, *words).code == 0
    found = said(caplog)
    assert len(found) == bool(told)
    assert all(told in sentence for sentence in found)


def test_a_comparison_says_it_once(command, caplog):
    assert command("compare", "fedavg", "fedbn", *SMALL, "--rounds", 1, "--seeds", 2, "--jobs", 1).code == 0
    (sentence,) = said(caplog)
    assert NO_NORMS in sentence


def test_a_global_model_that_no_image_tests_is_not_said_to_be_missing(command, tmp_path):
    x, y = np.random.default_rng(0).integers(256, size=(60, 8, 8), dtype=np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "untested.npz", x_train=x, y_train=y)
    words = ["--dataset", "untested.npz", "--model", "mlp", "--clients", 2, "--engine", "local", "--rounds", 1]
    ended = command("run", "fedavg", *words)
    assert "the global model was not measured: there are no test images" in ended.out
    assert "no global model;" not in ended.out
    assert "no global model;" in command("run", "local", "--clients", 2, *SMALL[:2], "--rounds", 1).out


OWN = """
from fedloom.methods.fedavg import FedAvg
class Oops(FedAvg):
    def work(self, client, task):
        if client.id or task.round:
            return {}["oops"]
        return (yield from super().work(client, task))
"""


def test_a_run_that_failed_keeps_the_traceback_of_its_client(command, tmp_path):
    (tmp_path / "oopsmethod.py").write_text(OWN)
    ended = command("run", "oopsmethod:Oops", *SMALL, "--rounds", 2, "--set", "engine.quorum=0.5")
    (folder,) = (tmp_path / "runs").iterdir()
    assert ended.code == 1
    assert "raised: KeyError: 'oops'. A new run with engine.quorum=0 lets such rounds pass" in ended.err
    assert ended.err.rstrip().endswith(f"its traceback: runs/{folder.name}/failure.json")
    failure = json.loads((folder / "failure.json").read_text())
    assert 'oopsmethod.py", line 6, in work' in failure["trace"]
    assert command("run", "oopsmethod:Oops", *SMALL, "--rounds", 2, "--set", "engine.quorum=0").code == 0
