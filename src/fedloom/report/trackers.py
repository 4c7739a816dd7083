"""Runs for other boards: TensorBoard's event files and MLflow's runs, made from run folders, finished or not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedloom.errors import InputError
from fedloom.report.gather import Run, flat, read_runs

__all__ = ["to_mlflow", "to_tensorboard"]

BATCH = 500  # numbers that MLflow takes at a time


def _numbers(run: Run) -> Iterator[tuple[str, float, int]]:
    """(name, value, round) of every number of every round; of lists, each place has its own name."""
    for row in run.rows:
        for name, value in row.items():
            if name == "round":
                continue
            if isinstance(value, list):
                yield from ((f"{name}/{k}", float(v), row["round"]) for k, v in enumerate(value) if v is not None)
            elif value is not None:
                yield name, float(value), row["round"]


def _results(run: Run) -> dict[str, float]:
    return {key: float(value) for key, value in run.summary.items() if isinstance(value, int | float)}


def to_tensorboard(paths: Sequence[Path], folder: Path) -> int:
    """Write event files, one sub-folder a run; gives the number of runs."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "--tensorboard needs TensorBoard; install it with: pip install 'fedloom[tensorboard]'"
        ) from None
    runs = read_runs(paths)
    for run in runs:
        place = folder / run.store.folder.name
        if any(place.glob("events.out.tfevents.*")):
            raise InputError(f"{place} holds event files already; choose another folder or remove it")
    for run in runs:
        events: Any = SummaryWriter  # untyped, or not there when types are checked
        with events(str(folder / run.store.folder.name)) as writer:
            for name, value, round in _numbers(run):
                writer.add_scalar(name, value, round)
            lines = [f"| {key} | {value} |" for key, value in flat(run.study).items()]
            text = "\n".join(["| setting | value |", "|---|---|", *lines])
            writer.add_text("study", text)
    return len(runs)


def to_mlflow(paths: Sequence[Path], address: str, experiment: str = "fedloom") -> int:
    """Send runs to a tracking server, or to a folder; gives the number of runs."""
    # A folder is all that is wanted here; MLflow asks for this word before it writes to one.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise InputError("--mlflow needs MLflow; install it with: pip install 'fedloom[mlflow]'") from None
    runs = read_runs(paths)
    try:
        client: Any = MlflowClient(tracking_uri=address)
        known = client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else client.create_experiment(experiment)
        for run in runs:
            began = client.create_run(place, run_name=run.store.folder.name, tags={"state": run.state})
            name, at = began.info.run_id, began.info.start_time
            metrics = [Metric(key, value, at, round) for key, value, round in _numbers(run)]
            metrics += [Metric(f"result/{key}", value, at, len(run.rows)) for key, value in _results(run).items()]
            for first in range(0, len(metrics), BATCH):
                client.log_batch(name, metrics=metrics[first : first + BATCH])
            settings = flat(run.study) | {"run.seed": run.seed}
            client.log_batch(name, params=[Param(key, str(value)[:6000]) for key, value in settings.items()])
            client.set_terminated(name, "FINISHED" if run.state == "finished" else "RUNNING")
    except MlflowException as error:
        raise InputError(f"MLflow does not take '{address}': {str(error).splitlines()[0]}") from error
    return len(runs)
