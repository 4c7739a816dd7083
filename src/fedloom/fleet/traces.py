"""When devices are there: windows of virtual time, repeated with a period.

A trace is a name of a built-in shape or a CSV file with the columns `client,from,to`, one line a window, in virtual
seconds. It repeats after its `period`: a first line `# period = 86400` says so, else it is the last `to`. Clients are
numbered as in the file; a fleet larger than the trace begins with its first client again. A window that begins before
the period's end may run beyond it. Windows of a client that touch or overlap, the last and the first too, are one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedloom.errors import InputError, choose

__all__ = ["SHAPES", "presence", "trace"]

Floats = npt.NDArray[np.float64]
HOUR = 1 / 24  # shapes are drawn in days


def presence(columns: Mapping[str, np.ndarray], now: float, out: np.ndarray) -> tuple[float, Floats]:
    """How long the fleet must wait until somebody who is not `out` is there, and when each client leaves.

    Both in seconds from now; a client that is not there when the waiting is over has left before. Without a trace
    everybody is there and stays.

    >>> night = {"windows": np.array([[[10.0, 30.0]], [[20.0, 22.0]]]), "period": np.array([24.0, 24.0])}
    >>> presence(night, 8.0, np.array([False, False]))
    (2.0, array([ 22., -inf]))
    """
    if "windows" not in columns:
        return 0.0, np.full(len(out), np.inf)
    windows, period = columns["windows"], columns["period"][:, None]
    left = _left(windows, period, now)
    if (left > 0)[~out].any():
        return 0.0, left
    waited = float(np.nanmin(((windows[..., 0] - now) % period)[~out]))
    return waited, _left(windows, period, now + waited) + waited


def _left(windows: Floats, period: Floats, now: float) -> Floats:
    """Seconds until each client leaves; minus infinity for those that are not there."""
    time = now % period
    # A hair of tolerance: whoever was waited for must be there.
    begin, end, hair = windows[..., 0] - 1e-9 * period, windows[..., 1], 1e-9 * period
    left = np.full(len(windows), -np.inf)
    for shift in (0.0, 1.0):  # today's windows, and yesterday's that run on
        moment = time + shift * period
        inside = (begin <= moment) & (moment < end - hair)
        left = np.maximum(left, np.where(inside, end - moment, -np.inf).max(1))
    return np.where(((windows[..., 1] - windows[..., 0]) >= period).any(1), np.inf, left)


def trace(name: str, clients: int, day: float, generator: np.random.Generator) -> dict[str, Floats]:
    """The columns of a trace: `windows` (clients, windows, from and to) and `period`."""
    if name in SHAPES:
        windows = SHAPES[name](clients, generator)
        return {"windows": windows * day, "period": np.full(clients, day)}
    if not name.endswith(".csv"):
        raise choose("fleet.trace", name, (*SHAPES, "FILE.csv"))
    return _read(Path(name), clients)


def _nightly(clients: int, generator: np.random.Generator) -> Floats:
    """On the charger from about 22:00 for about 8 hours, all in one time zone; the run begins at midnight."""
    begin = (22 * HOUR + generator.normal(0, HOUR, clients)) % 1
    return np.stack([begin, begin + generator.normal(8, 1, clients).clip(2, 14) * HOUR], 1)[:, None]


def _world(clients: int, generator: np.random.Generator) -> Floats:
    """The same nights in all time zones."""
    windows = _nightly(clients, generator)
    begin = (windows[..., 0] + generator.random((clients, 1))) % 1
    return np.stack([begin, begin + windows[..., 1] - windows[..., 0]], 2)


def _office(clients: int, generator: np.random.Generator) -> Floats:
    """8 to 12 and 13 to 17 o'clock, a quarter of an hour more or less; the run begins at eight."""
    hours = np.array([[0.0, 4.0], [5.0, 9.0]]) + 0.25 * generator.random((clients, 2, 2))
    return hours * HOUR


def _flaky(clients: int, generator: np.random.Generator) -> Floats:
    """There for 20 minutes, gone for 40, on average; exponential, another pattern for each device."""
    lengths = generator.exponential([40 / 1440, 20 / 1440], (clients, 36, 2))
    ends = np.cumsum(lengths.reshape(clients, -1), 1).reshape(clients, 36, 2)
    return np.where(ends[..., :1] < 1, ends, np.nan)


SHAPES: Mapping[str, Callable[[int, np.random.Generator], Floats]] = {
    "nightly": _nightly, "world": _world, "office": _office, "flaky": _flaky,
}  # fmt: skip


def _read(path: Path, clients: int) -> dict[str, Floats]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"fleet.trace {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not any(line.strip() for line in lines):
        raise InputError(f"fleet.trace {path} is empty; expected lines of client,from,to")
    said = re.fullmatch(r"#\s*period\s*=\s*(\S+)", lines[0].strip())
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    found: dict[int, list[tuple[float, float]]] = {}
    try:
        for row in rows:
            begin, end = float(row["from"]), float(row["to"])
            if not 0 <= begin < end < np.inf:
                raise ValueError(f"a window must begin at 0 or later and end after that; got {begin:g} to {end:g}")
            found.setdefault(int(row["client"]), []).append((begin, end))
        if not found:
            raise ValueError("it has no windows")
        period = float(said[1]) if said else max(end for windows in found.values() for _, end in windows)
        if any(begin >= period for windows in found.values() for begin, _ in windows):
            raise ValueError(f"a window begins after the period of {period:g} seconds")
    except KeyError as error:
        raise InputError(f"fleet.trace {path} has no column {error}; expected client,from,to") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"fleet.trace {path} is wrong near line {rows.line_num}: {error}") from error
    joined = [_joined(found[client], period) for client in sorted(found)]
    most = max(map(len, joined))
    padded = [windows + [(np.nan, np.nan)] * (most - len(windows)) for windows in joined]
    return {
        "windows": np.asarray(padded, np.float64)[np.arange(clients) % len(padded)],
        "period": np.full(clients, period),
    }


def _joined(windows: Sequence[tuple[float, float]], period: float) -> list[tuple[float, float]]:
    """The windows in order, those that touch or overlap as one: nobody leaves where its next window begins.

    >>> _joined([(20.0, 30.0), (0.0, 10.0), (10.0, 15.0), (90.0, 100.0)], 100.0)
    [(20.0, 30.0), (90.0, 115.0)]
    """
    apart: list[tuple[float, float]] = []
    for begin, end in sorted(windows):
        if apart and begin <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        else:
            apart.append((begin, end))
    # The first window comes again a period later.
    while len(apart) > 1 and apart[0][0] + period <= apart[-1][1]:
        apart[-1] = apart[-1][0], max(apart[0][1] + period, apart[-1][1])
        del apart[0]
    return apart
