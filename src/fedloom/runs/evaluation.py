"""How good is it, and what did it cost? The rows of a run's metrics, and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np

from fedloom.copies import on_host
from fedloom.fleet.fleet import Fleet
from fedloom.fleet.nonsense import Form
from fedloom.method import Method
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.gap import WHOLE
from fedloom.readings import Accuracy
from fedloom.seeds import SERVER, numpy_generator
from fedloom.types import Measure, Server

__all__ = ["costs", "evaluate", "gaps", "summarise", "to_target"]

Row = Mapping[str, Any]
SUMS = ("upload_bytes", "download_bytes", "train_macs", "virtual_seconds", "failures")
TO_TARGET = ("rounds_to_target", "bytes_to_target", "virtual_seconds_to_target", "macs_to_target")


def costs(ledger: Sequence[Row], virtual_seconds: float, failures: int) -> dict[str, Any]:
    """What the training of a round cost, from its ledger: all that was sent and computed before it was evaluated."""
    asked = [entry for entry in ledger if entry["job"] == "work"]
    done = [entry for entry in asked if not entry["failed"] and {"loss", "samples"} <= entry.keys()]
    weight = sum(entry["samples"] for entry in done)
    return {
        "train_loss": sum(entry["loss"] * entry["samples"] for entry in done) / weight if weight else None,
        "mean_parameters": fmean(entry["parameters"] for entry in done) if done else None,
        "mean_forward_macs": fmean(entry["forward_macs"] for entry in done) if weight else None,
        "upload_bytes": sum(entry["upload_bytes"] for entry in ledger),
        "download_bytes": sum(entry["download_bytes"] for entry in ledger),
        "train_macs": sum(entry["macs"] for entry in ledger),
        "virtual_seconds": virtual_seconds,
        "clients": len({entry["client"] for entry in asked}),
        "failures": failures,
    }


def evaluate(method: Method, server: Server, fleet: Fleet, most: int = 1000) -> tuple[Server, dict[str, Any]]:
    """The global model on the test set, and every client's own model on its own test part.

    The server comes back completed: with what the method asks for before an evaluation.
    """
    begin, server = perf_counter(), method.evaluated(server, fleet)
    row: dict[str, Any] = {"global_accuracy": None, "global_loss": None, "class_accuracy": None}
    tensors = method.model(server)
    if tensors is not None and len(fleet.home.test):
        tested = fleet.home.groups or {"": fleet.home.test}
        reads: list[Any] = on_host(fleet.solve(*(Measure(tensors, Accuracy(), part) for part in tested.values())))
        right, samples, loss = (sum(read[key] for read in reads) for key in ("right", "samples", "loss"))
        row["global_accuracy"] = float(right.sum() / samples.sum())
        row["global_loss"] = float(loss / samples.sum())
        row |= {
            f"global_accuracy_{name}": float(read["right"].sum() / read["samples"].sum())
            for name, read in zip(tested, reads, strict=True)
            if name
        }
        per_class = zip(right.tolist(), samples.tolist(), strict=True)
        row["class_accuracy"] = [hits / count if count else None for hits, count in per_class]
    asked = fleet.present
    if len(asked) > most:
        asked = np.sort(numpy_generator(fleet.seed, 0, 0, SERVER, "evaluate").choice(asked, most, replace=False))
    looking_on = fleet.columns.get("onlooker", np.zeros(fleet.size, bool))[asked]
    if looking_on.any():
        row["onlooker_accuracy"] = None  # nobody can use a model that is complete at no place
    if looking_on.any() and tensors is not None:
        # The global model, which is of the first architecture. What clients are shown to evaluate may be nothing, where
        # everybody has a model of its own; who never trained has none.
        parts = {"model": tensors}
        made = (fleet.task(client, parts) for client in asked[looking_on])
        asked_of = (replace(task, kind=0, model=fleet.models[0]) for task in made)
        told = list(fleet.ask("test", asked_of, Form({"right": 0.0, "samples": 0.0})))
        seen = sum(answer.numbers["samples"] for answer in told)
        row["onlooker_accuracy"] = sum(answer.numbers["right"] for answer in told) / seen if seen else None
    answers = fleet.ask("evaluate", fleet.show(server, asked[~looking_on]), Form({"accuracy": 0.0}))
    accuracies = np.sort([answer.numbers["accuracy"] for answer in answers])
    if len(accuracies):
        row["local_accuracy"] = float(accuracies.mean())
        row["worst_local_accuracy"] = float(accuracies[: max(1, len(accuracies) // 10)].mean())
        row["spread_local_accuracy"] = float(accuracies.std())
    return server, row | {"evaluation_seconds": perf_counter() - begin}


def gaps(method: FedAvg, server: Server, fleet: Fleet) -> dict[str, float]:
    """How far the round's sub-models ended from the whole model trained alike, on average; `server` is as it began."""
    trained = sorted({entry["client"] for entry in fleet.ledger if entry["job"] == "work" and not entry["failed"]})
    whole = {WHOLE: method.sent(server)}
    made = (method.task(server, fleet, client) for client in trained)
    tasks = (replace(task, tensors={**task.tensors, **whole}) for task in made)
    told = [answer.numbers for answer in fleet.ask("gap", tasks, Form({"gap": 0.0, "update": 0.0}))]
    return {name: fmean(each[name] for each in told) for name in ("gap", "update")} if told else {}


def to_target(rows: Sequence[Row], target: float) -> dict[str, Any]:
    """Rounds, bytes, virtual seconds and training MACs until the accuracy first reached a target; None if it never did.

    The accuracy is the global model's; where a method has none, the mean of the clients' own: `target_measure`.
    """
    has_global = any(row.get("global_accuracy") is not None for row in rows)
    measure = "global_accuracy" if has_global else "local_accuracy"
    spent = dict.fromkeys(("upload_bytes", "download_bytes", "virtual_seconds", "train_macs"), 0.0)
    for row in rows:
        for name in spent:
            spent[name] += row[name]
        reached = row.get(measure)
        if reached is not None and reached >= target:
            traffic = int(spent["upload_bytes"] + spent["download_bytes"])
            found = (row["round"], traffic, spent["virtual_seconds"], int(spent["train_macs"]))
            return {"target_measure": measure, **dict(zip(TO_TARGET, found, strict=True))}
    return {"target_measure": measure, **dict.fromkeys(TO_TARGET)}


def summarise(rows: Sequence[Row], target: float | None) -> dict[str, Any]:
    """A run in a few numbers: last and best round, totals, medians."""
    evaluated = [row for row in rows if "global_accuracy" in row]
    last: Row = evaluated[-1] if evaluated else {}
    found = [(row["global_accuracy"], -row["round"]) for row in evaluated if row["global_accuracy"] is not None]
    best, at = max(found) if found else (None, None)
    names = ("global_accuracy", "local_accuracy", "worst_local_accuracy")
    summary: dict[str, Any] = {name: last.get(name) for name in names}
    summary |= {name: last[name] for name in ("onlooker_accuracy",) if name in last}
    summary |= {"best_global_accuracy": best, "best_round": None if at is None else -at}
    summary |= {name: sum(row[name] for row in rows) for name in SUMS}
    for name in ("mean_parameters", "mean_forward_macs"):
        known = [row[name] for row in rows if row.get(name) is not None]
        summary[name] = fmean(known) if known else None
        summary[f"last_{name.removeprefix('mean_')}"] = known[-1] if known else None
    summary["bytes_per_round"] = (summary["upload_bytes"] + summary["download_bytes"]) / len(rows)
    for name, total in (("gap", "accumulated_gap"), ("update", "accumulated_update")):
        if any(name in row for row in rows):
            summary[total] = sum(row.get(name, 0.0) for row in rows)
    summary["seconds"] = sum(row["seconds"] + row.get("evaluation_seconds", 0) for row in rows)
    summary["seconds_per_round"] = median(row["seconds"] for row in rows)
    return summary | ({"target": target} | to_target(rows, target) if target is not None else {})
