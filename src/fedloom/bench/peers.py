"""fedloom against its peers and against a loop written by hand, on the workloads of `bench/peers/workload.py`.

Each runs as a script of the repository's `bench/peers/` in a process of its own, with the interpreter of its own
environment, and prints one JSON line. Repeats are interleaved: every repeat runs all of them one after another, and a
ratio is the median over repeats of the ratio within one, so that a machine that slows down slows down everybody.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from fedloom.bench.federation import device_of
from fedloom.errors import InputError, choose

__all__ = ["PEERS", "Peer", "compared", "peers", "plot"]

SCRIPTS = Path(__file__).parents[3] / "bench" / "peers"
WORKS = ("W0", "W1", "W2", "W3")
ENVIRONMENTS = "FEDLOOM_PEERS"
LIMIT = 300  # seconds that one script may take


@dataclass(frozen=True)
class Peer:
    """Who runs the workloads: its script, its environment's name, the package that must be importable."""

    name: str
    script: str
    package: str
    environment: str = ""  # empty: the interpreter that runs this
    launcher: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")


PEERS = (
    Peer("fedloom", "with_fedloom.py", "fedloom"),
    Peer("by hand", "with_torch.py", "torch"),
    Peer("pfl-research", "with_pfl.py", "pfl", "pfl"),
    Peer("pfl-research on all cores", "with_pfl.py", "pfl", "pfl",
         ("-m", "torch.distributed.run", "--nproc_per_node", str(os.cpu_count() or 1)), ("cpu",)),
    Peer("FedLab", "with_fedlab.py", "fedlab", "fedlab"),
    Peer("Flower simulation", "with_flower.py", "flwr", "flower"),
)  # fmt: skip


def peers(
    device: str | None = None,
    works: str = "W1,W2,W3",
    rounds: int = 6,
    repeats: int = 5,
    environments: Path | None = None,
    only: str = "",
) -> list[dict[str, object]]:
    """Median seconds a round, and how many times as long as fedloom's; the first round of every run is left out."""
    where, given = device_of(device), environments or os.environ.get(ENVIRONMENTS)
    if not SCRIPTS.is_dir():
        raise InputError("bench peers needs the repository's folder bench/peers; run it from a source checkout")
    chosen = [work.strip() for work in works.split(",")]
    for work in chosen:
        if work not in WORKS:
            raise choose("workload", work, WORKS)
    asked = {name.strip() for name in only.split(",") if name.strip()}
    for name in asked:
        if name not in {peer.name for peer in PEERS}:
            raise choose("peer", name, [peer.name for peer in PEERS])
    taking_part = [peer for peer in PEERS if where in peer.devices and (not asked or peer.name in asked | {"fedloom"})]
    rows: list[dict[str, object]] = []
    for work in chosen:
        found: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in taking_part}
        for _ in range(repeats):
            for peer in taking_part:
                result = _run(peer, work, rounds, where, Path(given) if given else None)
                told = f"{_round(result):.3f} s a round" if _round(result) else result["status"]
                sys.stderr.write(f"{work} {peer.name}: {told}\n")
                found[peer.name].append(result)
        rows += compared(work, found)
    return rows


def _run(peer: Peer, work: str, rounds: int, device: str, folder: Path | None) -> dict[str, Any]:
    """What its script printed; or why there is nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    interpreter = sys.executable
    if peer.environment:
        own = folder / peer.environment if folder else None
        if own is not None and (own / "bin" / "python").exists():
            interpreter = str(own / "bin" / "python")
        elif own is not None and own.is_dir():  # unpacked packages, beside this interpreter's torch
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(own), os.environ.get("PYTHONPATH")]))
        elif find_spec(peer.package) is None:
            return {"status": "not installed"}
    arguments = [str(SCRIPTS / peer.script), work, "--rounds", str(rounds), "--device", device]
    command = [interpreter, *peer.launcher, *arguments, "--started", str(time.time())]
    try:
        ended = subprocess.run(
            command, cwd=SCRIPTS, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"status": f"failed: no result after {LIMIT} s"}
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"work"')]
    if not lines:
        why = [line for line in ended.stderr.splitlines() if line.strip()] or [f"exit code {ended.returncode}"]
        return {"status": f"failed: {why[-1].strip()[:200]}"}
    return {"status": "ran", **json.loads(lines[-1])}


def compared(work: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, object]]:
    """One row a peer: medians over the repeats; ratios to fedloom within a repeat."""
    ours = [_round(result) for result in found["fedloom"]]
    rows: list[dict[str, object]] = []
    for name, results in found.items():
        times = [_round(result) for result in results]
        ran = [result for result in results if result["status"] == "ran"]
        pairs = [theirs / own for theirs, own in zip(times, ours, strict=True) if theirs and own]
        failed = [result["status"] for result in results if result["status"] != "ran"]
        rows.append(
            {
                "work": work, "peer": name, "version": ran[0]["version"] if ran else None,
                "seconds": _median([seconds for seconds in times if seconds]), "times fedloom's": _median(pairs),
                "cpu_seconds": _median([median(result["cpu"][1:]) for result in ran if len(result["cpu"]) > 1]),
                "first_round_s": _median([result["first_round_s"] for result in ran]),
                "peak_mb": _median([result["peak_bytes"] / 1e6 for result in ran]),
                "status": f"{len(failed)} of {len(results)} {failed[0]}" if failed and ran else (failed or ["ran"])[0],
            }
        )  # fmt: skip
    return rows


def _round(result: dict[str, Any]) -> float | None:
    """The median round of a run, without its first."""
    return median(result["rounds"][1:]) if len(result.get("rounds", ())) > 1 else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Times of a round as bars, one panel a workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = list(dict.fromkeys(row["work"] for row in rows))
    figure, axes = pyplot.subplots(1, len(works), figsize=(4.2 * len(works), 3), layout="constrained", squeeze=False)
    for axis, work in zip(axes[0], works, strict=True):
        own = [row for row in rows if row["work"] == work and row["seconds"] is not None][::-1]
        bars = axis.barh([row["peer"] for row in own], [row["seconds"] for row in own])
        axis.bar_label(bars, [f"{row['seconds']:.3g}" for row in own], padding=2, fontsize=8)
        axis.set(title=work, xlabel="seconds a round")
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
