"""A deployment on this machine: a server and clients in processes of their own, each in its own folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from fedloom import network
from fedloom.data import dataset as datasets
from fedloom.data.export import export
from fedloom.data.split import split
from fedloom.deploy.device import Device
from fedloom.deploy.folder import init

# Clients that are threads of one process share torch's number of threads and its generator, so one works at a time.
# Real clients are processes, as in the tests that start some.
torch.set_num_threads(1)
ALONE = threading.RLock()

# Run before a client's own code: it works for so long in a round, and says when it begins.
SLEEPY = """
import time
from fedloom.deploy.device import Device
answer = Device.answer
def slow(self, kind, body):
    if kind == "work" and body["task"].round == {round}:
        print("working", flush=True)
        time.sleep({seconds})
    return answer(self, kind, body)
Device.answer = slow
"""


def one_at_a_time(function: Any) -> Any:
    def alone(*given: Any) -> Any:
        with ALONE:
            return function(*given)

    return alone


network.initialise = one_at_a_time(network.initialise)
Device.answer = one_at_a_time(Device.answer)

BASE: dict[str, dict[str, Any]] = {
    "method": {"name": "fedavg"},
    "model": {"name": "lenet5_bn"},
    "train": {"batch_size": 16, "momentum": 0.5, "lr": 0.05},
    "run": {"rounds": 2, "seed": 3, "checkpoint_every": 1},
}
SPLIT = {"partition": "dirichlet:1.0", "validation": 0.2}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Federation:
    """Files of a deployment, and the processes that were started on them."""

    def __init__(self, folder: Path, clients: int = 3, limit: int = 300, **sections: dict[str, Any]) -> None:
        self.folder, self.port, self.clients, self.limit = folder, free_port(), clients, limit
        self.sections = {name: dict(values) for name, values in BASE.items()}
        for name, values in sections.items():
            self.sections.setdefault(name, {}).update(values)
        self.sections["run"]["out"] = "runs"
        data = datasets.load("digits", limit=limit)
        dealt = split(
            data, SPLIT["partition"], clients, validation=SPLIT["validation"], seed=self.sections["run"]["seed"]
        )
        export(data, dealt, folder / "data")
        init(folder / "deploy", [f"client_{number}" for number in range(clients)], port=self.port)
        (folder / "study.toml").write_text(toml(self.sections))
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *words: object, log: str = "log", code: str = "") -> subprocess.Popen[str]:
        """Start fedloom; `code` is run first in its process, to make it misbehave."""
        program = f"{code}\nimport sys; sys.argv[0] = 'fedloom'\nfrom fedloom.cli import main; main()"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_HOME": str(self.folder / "flwr")}
        file = (self.folder / log).open("a")
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, words)],
            cwd=self.folder, env=environment, stdout=file, stderr=file, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def serve(self, *words: object, target: object = "study.toml", code: str = "") -> subprocess.Popen[str]:
        own = ["--test", "data/test.npz"] if target == "study.toml" else []  # a run that goes on knows it
        return self.start("serve", target, *own, *words, log="serve.log", code=code)

    def join(self, number: int, *words: object, code: str = "") -> subprocess.Popen[str]:
        name = f"client_{number}"
        return self.start("join", "--name", name, "--data", f"data/{name}.npz", *words, log=f"{name}.log", code=code)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.is_file() else ""

    def wait_for(self, what: Any, seconds: float = 300) -> Any:
        """Wait until `what()` is true; on failure all logs are shown."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := what():
                return found
            time.sleep(0.05)
        logs = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))
        raise AssertionError(f"it did not come to that within {seconds} s\n{logs}")

    def finish(self, process: subprocess.Popen[str], seconds: float = 300) -> int:
        """Wait for a process to end; its exit code."""
        self.wait_for(lambda: process.poll() is not None, seconds)
        return int(process.returncode)

    def run_dir(self) -> Path:
        found: Path = self.wait_for(lambda: next(iter((self.folder / "runs").glob("[a-z]*")), None))
        return found

    def rounds(self) -> list[dict[str, Any]]:
        path = next(iter((self.folder / "runs").glob("[a-z]*/metrics.jsonl")), None)
        text = path.read_text() if path else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir() / "clients.jsonl").read_text().splitlines()]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir() / "summary.json").read_text()))

    def status(self) -> dict[str, Any]:
        return {row["name"]: row for row in json.loads((self.run_dir() / "status.json").read_text())["clients"]}

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def toml(sections: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def simulated(federation: Federation, out: Path, **sections: dict[str, Any]) -> Any:
    """The same study in simulation, on the same split."""
    from fedloom.runs.start import start
    from fedloom.runs.study import resolve

    told = {name: dict(values) for name, values in federation.sections.items()}
    told["data"] = {
        **told.get("data", {}),
        "name": "digits",
        "limit": federation.limit,
        "validation": SPLIT["validation"],
    }
    told["partition"] = {"name": SPLIT["partition"]}
    told["fleet"] = {**told.get("fleet", {}), "clients": federation.clients, **sections.get("fleet", {})}
    told["run"]["out"] = str(out)
    told["engine"] = {**told.get("engine", {}), "name": "local"}
    return start(resolve(told))


def together(federation: Federation, **options: Any) -> tuple[Any, list[str]]:
    """Server and clients as threads of this process, over real connections; the result, and what was said."""
    from fedloom.deploy.join import join
    from fedloom.deploy.serve import serve

    folder, said, failed = federation.folder, [], []

    def be(number: int) -> None:
        name = f"client_{number}"
        try:
            join(
                name, folder / "data" / f"{name}.npz", folder / "deploy" / "clients" / name, say=said.append,
                **{key: value[number] for key, value in options.items() if isinstance(value, list)},
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 (shown by whoever called)
            failed.append(error)

    threads = [threading.Thread(target=be, args=(number,), daemon=True) for number in range(federation.clients)]
    for thread in threads:
        thread.start()
    here = os.getcwd()
    os.chdir(folder)
    try:
        result = serve(
            Path("study.toml"), folder / "deploy" / "server", host="127.0.0.1", test=folder / "data" / "test.npz",
            say=said.append,
        )  # fmt: skip
        result = type(result)(type(result._store)(folder / result.folder), result.summary)
    finally:
        os.chdir(here)
    for thread in threads:
        thread.join(20)
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads)
    return result, said


def tensors_of(result: Any) -> dict[str, Any]:
    """The server's tensors at the end."""
    from fedloom import wire

    return dict(wire.load(next((result.folder / "checkpoints").glob("server-*")))["tensors"])


def peers(federation: Federation, **options: Any) -> tuple[list[Any], list[str]]:
    """All clients as peers in threads of this process; the folders they give back, and what was said."""
    from fedloom.deploy.join import join

    folder, said, found = federation.folder, [], []
    addresses = "".join(f'client_{number} = "127.0.0.1:{free_port()}"\n' for number in range(federation.clients))

    def be(number: int) -> None:
        name = f"client_{number}"
        keys = folder / "deploy" / "clients" / name
        (keys / "peers.toml").write_text(addresses)
        try:
            join(name, folder / "data" / f"{name}.npz", keys, study=folder / "study.toml", say=said.append, **options)
        except Exception as error:  # noqa: BLE001 (shown by whoever called)
            found.append(error)

    here = os.getcwd()
    os.chdir(folder)
    try:
        threads = [threading.Thread(target=be, args=(number,), daemon=True) for number in range(federation.clients)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 120
        while any(thread.is_alive() for thread in threads) and not found and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        os.chdir(here)
    assert found or not any(thread.is_alive() for thread in threads), said
    return found, said
