"""What TensorBoard and MLflow read is what the runs wrote; without them, a sentence says what to install."""

from __future__ import annotations

import builtins
import json

import pytest

from tests.cli.conftest import command  # noqa: F401 (a fixture)


def last(runs, name="heterofl-digits-0"):
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard(command, runs, tmp_path):  # noqa: F811
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = command("export", runs, "--tensorboard", "board")
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in (tmp_path / "board").iterdir()) == sorted(path.name for path in runs.iterdir())
    events = EventAccumulator(str(tmp_path / "board" / "heterofl-digits-0"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("global_accuracy")]
    assert found == [(row["round"], pytest.approx(row["global_accuracy"])) for row in last(runs)]
    assert "class_accuracy/3" in events.Tags()["scalars"]
    assert "holds event files already" in command("export", runs, "--tensorboard", "board").sentence()


def test_mlflow(command, runs, tmp_path):  # noqa: F811
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    from mlflow.tracking import MlflowClient

    ended = command("export", runs / "heterofl-digits-0", "--mlflow", tmp_path / "ml")
    assert ended.code == 0, ended.err
    client = MlflowClient(tracking_uri=str(tmp_path / "ml"))
    experiment = client.get_experiment_by_name("fedloom")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "global_accuracy")
    assert [(each.step, each.value) for each in history] == [
        (row["round"], row["global_accuracy"]) for row in last(runs)
    ]
    assert found.data.params["method.name"] == "heterofl"
    assert found.data.metrics["result/upload_bytes"] > 0
    assert "MLflow does not take" in command("export", runs, "--mlflow", "nothing://x").sentence()


@pytest.mark.parametrize(("option", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")])
def test_without_them(command, runs, tmp_path, monkeypatch, option, module):  # noqa: F811
    plain = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith(module):
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert f"pip install 'fedloom[{option}]'" in command("export", runs, f"--{option}", "there").sentence()
    assert not (tmp_path / "there").exists()


def test_nothing_to_export(command, runs):  # noqa: F811
    assert "export needs a file" in command("export", runs).sentence()
