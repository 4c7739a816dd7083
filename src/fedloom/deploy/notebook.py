"""The notebook of a run among peers: all that somebody needs to go on, and no model.

Its *head* is small however long the run is: the round, the fleet's columns, whose report counted, how many bytes of
metrics and ledger there are. These rows are only ever added to within an *edition*, and every leader begins one; so who
has some bytes of an edition lacks just those that follow. They travel in pieces, and lie on the disk before the head
that counts them is renamed into place.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedloom import wire
from fedloom.deploy.messages import SMALL
from fedloom.errors import InputError
from fedloom.runs.store import LINES

__all__ = ["Notebook", "Piece", "piece_of"]

EDITION = re.compile(r"[0-9a-f]{16}")
PIECE = SMALL  # bytes of rows in a message: no limit is below that
Piece = Callable[[str, int], np.ndarray]  # which rows, from which byte on -> some of them


class Notebook:
    """One peer's copy, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / "head.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        self.head: dict[str, Any] = wire.load(self._file) if self._file.is_file() else {}
        self._writing = threading.Lock()

    @property
    def run(self) -> str:
        """The run that it is about, if it is about one that is not over."""
        return str(self.head["fixed"]["run"]) if "fixed" in self.head else ""

    @property
    def over(self) -> str:
        """The run that was last seen to end."""
        return str(self.head.get("over", ""))

    def lines(self, name: str) -> bytes:
        """All rows of a kind."""
        with self._rows(self.head["edition"], name).open("rb") as file:
            return file.read(self.head["bytes"][name])

    def piece(self, edition: str, name: str, start: int) -> np.ndarray:
        """Some bytes of the rows, from a place on."""
        if edition != self.head.get("edition") or name not in LINES or not 0 <= start <= self.head["bytes"][name]:
            raise InputError(f"there are no rows '{name}' of edition '{edition}' from byte {start} on")
        return piece_of(self._rows(edition, name), start, self.head["bytes"][name])

    def follow(self, head: dict[str, Any], piece: Piece) -> None:
        """Take over one that is not older: first the rows that are missing here, then the head that counts them."""
        edition, run = str(head["edition"]), head["fixed"]["run"]
        if not EDITION.fullmatch(edition):
            raise InputError("a notebook names its edition in a way that cannot be a file")
        with self._writing:
            if run == self.run and head["round"] < self.head["round"]:
                raise InputError(f"its notebook is of round {self.head['round']}, newer than round {head['round']}")
            known = self.head["bytes"] if edition == self.head.get("edition") else dict.fromkeys(LINES, 0)
            for name in LINES:
                self._extend(edition, name, known[name], head["bytes"][name], piece)
            self._write(head)

    def end(self) -> None:
        """The run is over: nobody goes on from here, nor from a copy of somebody who did not see its end."""
        with self._writing:
            if self.run:
                self._write({"over": self.run})

    def _extend(self, edition: str, name: str, start: int, end: int, piece: Piece) -> None:
        with self._rows(edition, name).open("ab") as file:
            file.truncate(start)  # what no head counts may have been cut off anywhere
            while start < end:
                part = piece(name, start)[: end - start]
                if not len(part):
                    raise InputError(f"rows '{name}' end at byte {start}, before the {end} that the notebook counts")
                file.write(part.tobytes())
                start += len(part)
            file.flush()
            os.fsync(file.fileno())

    def _write(self, head: dict[str, Any]) -> None:
        wire.save(head, self._file)
        self.head = head
        for path in self.folder.glob("*.jsonl"):
            if not path.name.startswith(str(head.get("edition"))):
                path.unlink()

    def _rows(self, edition: str, name: str) -> Path:
        return self.folder / f"{edition}-{name}.jsonl"


def piece_of(path: Path, start: int, end: int) -> np.ndarray:
    """Bytes of a file between two places, as many as go into a message."""
    with path.open("rb") as file:
        file.seek(start)
        return np.frombuffer(file.read(min(PIECE, end - start)), np.uint8)
