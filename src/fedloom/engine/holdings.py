"""Where the Ray engine's workers stand, and which of them holds a client's state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom import wire
from fedloom.engine.states import moment_of, state_file
from fedloom.types import Moment, Task

__all__ = ["Holdings", "Numbered", "Slot"]

Numbered = tuple[int, Task]
CHUNK = 64  # states that a checkpoint asks a worker for at once


@dataclass(eq=False)
class Slot:
    """A worker as it is seen from here; a dead one is followed by another in the same slot."""

    number: int
    actor: Any
    starting: Any = None  # the call that it begins with, until that is done
    batches: deque[list[Numbered]] = field(default_factory=deque)
    bound: deque[Numbered] = field(default_factory=deque)  # tasks that only this worker can do
    verdicts: dict[int, bool] = field(default_factory=dict)  # which of its reports count, not yet told
    sums: bool = False  # whether it holds sums of the reduction under way
    stale: bool = False  # whether it may be at work that nobody waits for


class Holdings:
    """Where the clients' states are: at which worker, in which file of the last checkpoint, and which only there."""

    def __init__(self, ask: Callable[[Slot, Any], Any]) -> None:
        self.ask = ask  # what a worker answers to a call
        self.slots: dict[int, Slot] = {}
        self.files: dict[int, Path] = {}
        self.fresh: dict[int, Moment] = {}  # the first version that no checkpoint has

    def checkpoint(self, folder: Path, accepted: Mapping[int, Moment]) -> dict[str, str]:
        """Have the workers tell the states that changed, write them, and name all files by client."""
        asked: dict[Slot, list[int]] = {}
        for client in sorted(self.fresh.keys() & accepted.keys()):
            asked.setdefault(self.slots[client], []).append(client)
        for slot, clients in asked.items():
            for start in range(0, len(clients), CHUNK):
                wanted = {client: accepted[client] for client in clients[start : start + CHUNK]}
                for client, moment, state in self.ask(slot, slot.actor.versions.remote(wanted)):
                    self.files[client] = folder / state_file(client, moment)
                    wire.save(wire.unpack(state), self.files[client])
        self.fresh = {}
        return {str(client): path.name for client, path in sorted(self.files.items())}

    def restore(self, folder: Path, files: Mapping[str, str]) -> None:
        """Take over what a checkpoint names; a worker gets a client's file with its next task."""
        self.slots, self.fresh = {}, {}
        self.files = {int(client): folder / name for client, name in files.items()}

    def sent_along(self, slot: Slot, clients: Iterable[int]) -> dict[int, tuple[Moment, bytes]]:
        """Saved states of clients that this worker does not know."""
        strangers = [each for each in clients if each in self.files and self.slots.get(each) is not slot]
        self.slots |= dict.fromkeys(strangers, slot)
        return {each: (moment_of(self.files[each].name), wire.pack(wire.load(self.files[each]))) for each in strangers}

    def held(self, slot: Slot, clients: Iterable[int], moment: Moment) -> None:
        """These clients' newest states are there."""
        for client in clients:
            self.slots[client] = slot
            self.fresh[client] = min(moment, self.fresh.get(client, moment))

    def bury(self, slot: Slot) -> list[Moment]:
        """Forget what died with a worker; the moments of states that no checkpoint has."""
        gone = [client for client, where in self.slots.items() if where is slot]
        for client in gone:
            del self.slots[client]
        return [self.fresh.pop(client) for client in gone if client in self.fresh]
