"""A round without a server: stage by stage, every client's last report reaches those it has an edge to."""

from __future__ import annotations

from collections import Counter

from fedloom.fleet.fleet import Fleet
from fedloom.method import Method
from fedloom.types import Report, Server

__all__ = ["pass_round"]


def pass_round(method: Method, server: Server, fleet: Fleet) -> Server:
    """Run all stages of a round among the clients that are available.

    The "server" here is only the simulation's notebook: it holds who sent what last, and no model of its own. Who fails
    in a stage is out for the rest of the round: the next stages are those of the members that are left, and its
    neighbours become neighbours. A stage in which nobody got through does not count as one.
    """
    last: dict[int, Report] = dict(server.memory.get("last", {}))
    members = [int(client) for client in fleet.available]
    # Whose report somebody hears: a hop may be handed on in the next stage, or at the beginning of the next round.
    soon = (stage for number in (0, 1) for stage in method.stages(server.round + number, members))
    heard = {sender for stage in soon for sender, receiver in stage if sender != receiver}
    alive, number = members, 0
    while number < len(stages := method.stages(server.round, alive)):
        edges = stages[number]
        senders: dict[int, list[int]] = {receiver: [] for _, receiver in edges}
        for sender, receiver in edges:
            if sender != receiver:
                senders[receiver].append(sender)
        # A neighbour is one to whom something goes or from whom something comes; its number says how much it counts.
        degrees = Counter(sender for sender, receiver in edges if sender != receiver)
        tasks = (
            fleet.task(
                receiver,
                inbox={each: last[each] for each in senders[receiver] if each in last},
                numbers={f"degree {each}": degrees[each] for each in (receiver, *senders[receiver])},
                copies=degrees[receiver] or int(receiver in heard),
            )
            for receiver in sorted(senders)
        )
        # All hops of a stage happen at once: nobody receives what was made in the same stage.
        reports = {report.client: report for report in list(fleet.run(tasks, quorum=0.0))}
        last |= reports
        alive = [client for client in alive if client not in senders or client in reports]
        number += bool(reports) or not senders
        fleet.stage += 1
    fleet.require(len(alive), len(members), fleet.quorum)
    server.memory["last"] = last
    return server.next(server.tensors)
