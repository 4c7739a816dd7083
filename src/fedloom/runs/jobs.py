"""Whole runs as jobs on a Ray cluster: each takes its share of a machine, and its folder comes back here.

Where a job sees the folder of the comparison (one machine, or a shared file system) it runs in it, and what was done
survives any interruption. Elsewhere it runs in a folder of its own, which is packed and sent back when it ends.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from fedloom.engine.cluster import connect, library
from fedloom.engine.ray import dismiss
from fedloom.errors import FedloomError
from fedloom.registry import own_modules
from fedloom.runs.start import resume, start
from fedloom.runs.study import EngineOf, Study
from fedloom.runs.world import FOLDER

__all__ = ["as_job", "run_jobs"]

RETRIES = 2  # times that a job is started again whose worker or machine died
CLUSTER = ("address", "cpus", "gpus")  # what the engine `ray` says of the cluster; the rest is about rounds

Ended = tuple[int, FedloomError | None]


def as_job(study: Study) -> Study:
    """The study as a job does it: its clients are run where the job is."""
    kept = study.engine.model_dump(include=set(EngineOf.model_fields))
    return study.model_copy(update={"engine": EngineOf.model_validate(kept | {"name": "local"})})


def run_jobs(studies: Sequence[Study], labels: Sequence[str], folder: Path, engine: EngineOf) -> Iterator[Ended]:
    """Run studies side by side, as many as fit; gives the number of each that ended, and why if it failed."""
    ray = library()
    address, cpus, gpus = (engine.fields.get(key) for key in CLUSTER)
    own = connect(address or "local")
    dismiss()
    mark = folder / f".shared-{uuid4().hex}"
    mark.touch()
    try:
        options = {"num_cpus": cpus or 1, "num_gpus": gpus if gpus is not None else float(engine.device == "cuda")}
        # What a run itself finds wrong would be as wrong again; what breaks beside that deserves another try.
        job = ray.remote(**options, max_retries=RETRIES, retry_exceptions=True)(_job)
        around = own_modules(), os.environ.get(FOLDER)
        calls = {
            job.remote(study.model_dump_json(), label, str(mark), _packed(folder / label), *around): number
            for number, (study, label) in enumerate(zip(studies, labels, strict=True))
        }
        while calls:
            (done,), _ = ray.wait(list(calls), num_returns=1)
            number = calls.pop(done)
            try:
                failure, packed = ray.get(done)
            except ray.exceptions.RayError as error:
                failure, packed = f"its job failed: {str(error).strip().splitlines()[-1]}", b""
            if packed:
                _unpack(packed, folder)
                _at_home(folder / labels[number])
            yield number, FedloomError(failure) if failure else None
    finally:
        mark.unlink()
        if own:
            ray.shutdown()


def _job(
    study_json: str, label: str, mark: str, begun: bytes, modules: Sequence[str], data: str | None
) -> tuple[str, bytes]:
    """One run, from its start or from where it was left: why it failed, and its folder if nobody sees it from afar."""
    for module in modules:
        import_module(module)
    if data is not None:
        os.environ.setdefault(FOLDER, data)
    if Path(mark).exists():
        return _run(study_json, label, Path(mark).parent), b""
    with TemporaryDirectory() as place:
        folder = Path(place)
        _unpack(begun, folder)
        failure = _run(study_json, label, folder)
        return failure, _packed(folder / label)


def _run(study_json: str, label: str, folder: Path) -> str:
    study = Study.model_validate_json(study_json)
    try:
        if (folder / label / "study.json").exists():
            resume(folder / label)
        else:
            start(study.model_copy(update={"run": study.run.model_copy(update={"out": str(folder)})}), label=label)
    except FedloomError as error:
        return str(error)
    return ""


def _packed(folder: Path) -> bytes:
    """A run's folder as bytes; nothing if there is none."""
    if not folder.exists():
        return b""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, folder.name)
    return buffer.getvalue()


def _unpack(packed: bytes, folder: Path) -> None:
    if packed:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")


def _at_home(folder: Path) -> None:
    """The summary of a run that came from elsewhere names the folder where it lies now."""
    path = folder / "summary.json"
    if path.is_file():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"run_dir": str(folder)}, indent=1))
