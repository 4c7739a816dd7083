"""Errors a user may meet: each is one sentence that says what, where, got and allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

__all__ = [
    "ClientError",
    "FedloomError",
    "InputError",
    "Interrupted",
    "RoundLost",
    "RunError",
    "Unfit",
    "choose",
    "kind_of",
    "line",
    "oxford",
]

SHOWN = 500  # characters of what others say


class FedloomError(Exception):
    """Root of all errors that fedloom raises on purpose."""

    exit_code = 1


class InputError(FedloomError):
    """The user's input is wrong; the command line ends with exit code 2."""

    exit_code = 2


class Unfit(InputError):
    """A method that cannot do what a study asks of it, though each of the two is sound: it does not suit the fleet."""


class RunError(FedloomError):
    """A run could not go on (quorum lost, a worker that cannot be started)."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace  # of a client's code, where that is why


class RoundLost(RunError):
    """A worker died and took with it what its round needs: the round, or all since the last checkpoint, is redone."""

    def __init__(self, message: str, *, before: bool) -> None:
        super().__init__(message)
        self.before = before  # whether states of earlier rounds are gone too, so that the last checkpoint is needed


class ClientError(FedloomError):
    """A client's work failed; the round goes on without it."""


class Interrupted(FedloomError):
    """The user stopped a run; everything up to its last finished round is safe in `folder`."""

    def __init__(self, folder: Path, signal_number: int, how: str = "") -> None:
        super().__init__(f"stopped; nothing is lost. {how or f'Go on with: fedloom resume {folder}'}")
        self.folder = folder
        self.exit_code = 128 + signal_number  # as shells do


def line(said: object) -> str:
    r"""What somebody else said, as a line that can be shown and written down.

    >>> line("no\ud800 room\x1b[2J\n")
    'no? room?[2J?'
    """
    return "".join(each if each.isprintable() else "?" for each in str(said)[:SHOWN])


def oxford(words: Iterable[object], last: str = "or") -> str:
    """Join words as in a sentence.

    >>> oxford(["iid", "classes", "dirichlet"])
    'iid, classes or dirichlet'
    """
    listed = [str(word) for word in words]
    return f" {last} ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def kind_of(thing: object) -> str:
    """What something is, with the article that is spoken.

    >>> kind_of(3), kind_of("three"), kind_of(InputError())
    ('an int', 'a str', 'an InputError')
    """
    name = type(thing).__name__
    spelled = name[:2].isupper() and name[0] in "AEFHILMNORSX"  # an MLP
    return f"{'an' if spelled or name[:1].lower() in tuple('aeio') else 'a'} {name}"


def choose(what: str, got: object, allowed: Iterable[object]) -> InputError:
    """The error for a value outside a closed set, with the nearest allowed one.

    >>> print(choose("method", "fedavgg", ["fedavg", "scaffold"]))
    unknown method 'fedavgg'; allowed: fedavg or scaffold. Did you mean 'fedavg'?
    """
    names = [str(name) for name in allowed]
    small = {name.lower(): name for name in names}
    near = get_close_matches(str(got).lower(), small, n=1, cutoff=0.5)
    hint = f" Did you mean '{small[near[0]]}'?" if near else ""
    return InputError(f"unknown {what} '{got}'; allowed: {oxford(names)}.{hint}")
