"""Star, peer to peer, ring: who carries how much, read from the ledgers of runs (FedRKD, table 3.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fedloom.errors import InputError
from fedloom.method import Method
from fedloom.policies.topology import Star
from fedloom.registry import name_of
from fedloom.report.tables import Rows, quantity
from fedloom.runs.result import Result
from fedloom.runs.study import method_of

__all__ = ["traffic_rows"]


def traffic_rows(runs: Mapping[str, Result]) -> Rows:
    """One line a run: links, what a participant and the busiest of all nodes sent and received a round.

    With a server, what participants send and receive passes through it; so it carries everything, and whoever takes it
    away stops all others. Without one, the busiest node is a participant, and the others go on without it, even where
    all traffic went through it: whoever was joined through somebody absent is joined anew.
    """
    return {label: _row(result) for label, result in runs.items()}


def _row(result: Result) -> dict[str, str]:
    study, rounds = result.study, len(result.rows("metrics"))
    method: Method = method_of(study)
    entries = [entry for entry in result.rows("clients") if entry["job"] == "work"]
    if not entries or not rounds:
        raise InputError(f"{result.folder} has no round yet")
    sent, received = Counter[int](), Counter[int]()
    for entry in entries:
        sent[entry["client"]] += entry["upload_bytes"]
        received[entry["client"]] += entry["download_bytes"]
    everybody = sorted(received)
    total = sum(sent.values()) + sum(received.values())
    star = isinstance(method.topology, Star)
    busiest = total if star else max(sent[client] + received[client] for client in everybody)
    links = len(everybody) if star else len(_links(method, everybody))
    # Between participants, every byte is counted at both of its ends; whoever has no neighbour only gets its settings.
    share = busiest / (total if star else total / 2) if links else None
    failed = sum(bool(entry["failed"]) for entry in entries)
    return {
        "topology": _name(method),
        "links": str(links),
        "a participant sends": quantity(sum(sent.values()) / len(everybody) / rounds, "B"),
        "and receives": quantity(sum(received.values()) / len(everybody) / rounds, "B"),
        "busiest node": quantity(busiest / rounds, "B"),
        "is": "the server" if star else "a participant",
        "share of all traffic": "-" if share is None else f"{share:.0%}",
        "single point of failure": "yes" if star else "no",
        "failures survived": str(failed),
    }


def _name(method: Method) -> str:
    shape = getattr(method.topology, "shape", "")
    return f"{name_of(method.topology)} {shape}".strip()


def _links(method: Method, members: Sequence[int]) -> set[frozenset[int]]:
    """Pairs that ever exchange something."""
    rounds = [method.stages(number, members) for number in (0, 1)]
    edges = [edge for stages in rounds for stage in stages for edge in stage]
    return {frozenset(edge) for edge in edges if edge[0] != edge[1]}
