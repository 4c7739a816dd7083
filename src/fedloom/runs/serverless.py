"""A round without a server: stage by stage, every client's last report reaches those it has an edge to."""

from __future__ import annotations

from fedloom.fleet.fleet import Fleet
from fedloom.method import Method
from fedloom.types import Report, Server

__all__ = ["pass_round"]


def pass_round(method: Method, server: Server, fleet: Fleet) -> Server:
    """Run all stages of a round among the clients that are available.

    The "server" here is only the simulation's notebook: it holds who sent what last, and no model of its own.
    """
    last: dict[int, Report] = dict(server.memory.get("last", {}))
    members = [int(client) for client in fleet.available]
    for number, edges in enumerate(method.stages(server.round, members)):
        fleet.stage = number
        senders: dict[int, list[int]] = {}
        for sender, receiver in edges:
            senders.setdefault(receiver, []).append(sender)
        tasks = (
            fleet.task(
                receiver, inbox={each: last[each] for each in senders[receiver] if each in last and each != receiver}
            )
            for receiver in sorted(senders)
        )
        # All hops of a stage happen at once: nobody receives what was made in the same stage.
        last |= {report.client: report for report in list(fleet.run(tasks))}
    server.memory["last"] = last
    return server.next(server.tensors)
