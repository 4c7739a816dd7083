"""`fedloom board`: a local page that follows runs while they go on. It only reads, and only this machine can see it.

The page asks every two seconds for what is new; the server reads the folders' files and never writes one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from statistics import median
from time import localtime, strftime
from typing import Any

from fedloom.errors import FedloomError, InputError
from fedloom.report.gather import Group, Run, folders_in, groups_of, read_runs
from fedloom.report.svg import Series, lines
from fedloom.report.tables import percent, quantity
from fedloom.runs.store import STATUS, Store

__all__ = ["Board", "serve", "show_board"]

STATES = ("running", "failed", "stopped", "finished")  # in the order in which they are shown


class Board:
    """What the page shows of some folders, read anew each time; runs that did not change are not read again."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._known: dict[Path, tuple[int, Run]] = {}

    def runs(self) -> list[Run]:
        """The runs that are there now."""
        found = []
        for path in self.paths:
            try:
                found += folders_in([path])
            except InputError:
                continue  # nothing has begun there yet
        return [self._run(folder) for folder in dict.fromkeys(found)]

    def _run(self, folder: Path) -> Run:
        file = folder / "metrics.jsonl"
        size = file.stat().st_size if file.exists() else 0
        known = self._known.get(folder)
        if known is None or known[0] != size:
            self._known[folder] = size, Run(Store.open(folder))
        return self._known[folder][1]

    def live(self) -> str:
        """The part of the page that changes."""
        everyone = self.runs()
        damaged = {run: run.damage() for run in everyone}
        runs = [run for run, why in damaged.items() if not why]
        groups = groups_of(runs) if runs else []
        cards = [_card(run, group, number) for number, group in enumerate(groups) for run in group.runs]
        cards.sort(key=lambda card: STATES.index(card["state"]))
        counts = {state: sum(card["state"] == state for card in cards) for state in STATES}
        told = [why for why in damaged.values() if why]
        return _page("live.html", cards=cards, counts=counts, figures=_figures(groups), damaged=told)

    def page(self) -> str:
        """The whole page."""
        return _page("board.html", title=", ".join(path.resolve().name for path in self.paths), live=self.live())

    def report(self) -> str:
        """A report of the runs as they are now."""
        from fedloom.report.html import render

        return render(read_runs(self.paths))


def _page(name: str, **content: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(loader=PackageLoader("fedloom.report"), autoescape=True, undefined=StrictUndefined)
    return pages.get_template(name).render(**content)


def _card(run: Run, group: Group, number: int) -> dict[str, Any]:
    rounds, done, state = run.study.run.rounds, len(run.rows), run.state
    evaluated: Mapping[str, Any] = next((row for row in reversed(run.rows) if "local_accuracy" in row), {})
    last: Mapping[str, Any] = run.rows[-1] if run.rows else {}
    pace = [row["seconds"] + row.get("evaluation_seconds", 0) for row in run.rows[-20:]]
    left = median(pace) * (rounds - done) if pace and state == "running" else None
    numbers = {
        "global %": percent(evaluated.get("global_accuracy")),
        "local %": percent(evaluated.get("local_accuracy")),
        "loss": "-" if last.get("train_loss") is None else f"{last['train_loss']:.3f}",
        "sent": quantity(sum(row["upload_bytes"] + row["download_bytes"] for row in run.rows), "B"),
        "clients": str(last.get("clients", "-")),
        "failed tasks": str(sum(row["failures"] for row in run.rows)),
    }
    return {
        "label": group.label, "key": group.key, "seed": run.seed, "folder": str(run.store.folder), "number": number,
        "state": state, "done": done, "rounds": rounds, "share": 100 * done / rounds, "left": _time(left),
        "numbers": numbers,
        "failure": run.failure, "trouble": int(numbers["failed tasks"]) > 0, "members": _members(run.store),
    }  # fmt: skip


def _members(store: Store) -> list[dict[str, str]]:
    """Who takes part in a deployment: state, when last seen, what they sent; nobody in a simulation."""
    status = store.read(STATUS) or {}
    return [
        {
            "name": str(each["name"]), "state": str(each["state"]), "why": str(each.get("reason") or ""),
            "seen": strftime("%H:%M:%S", localtime(each["last_seen"])) if each.get("last_seen") else "never",
            "sent": quantity(each["received_bytes"], "B"), "got": quantity(each["sent_bytes"], "B"),
            "reports": str(each.get("reports", 0)),
            "last": str(each.get("last") or ""),
        }
        for each in status.get("clients", [])
    ]  # fmt: skip


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes = int(seconds) // 60
    return (
        f"{minutes // 60} h {minutes % 60} min left" if minutes >= 60 else f"{minutes} min {int(seconds) % 60} s left"
    )


def _figures(groups: Sequence[Group]) -> list[tuple[str, str]]:
    figures = []
    for title, measure, unit, factor, top in (
        ("Global accuracy", "global_accuracy", "accuracy, %", 100, 100.0),
        ("Local accuracy", "local_accuracy", "accuracy, %", 100, 100.0),
        ("Training loss", "train_loss", "loss", 1, None),
    ):
        series = []
        for number, group in enumerate(groups):
            for run in group.runs:
                known = [
                    (float(row["round"]), factor * row[measure]) for row in run.rows if row.get(measure) is not None
                ]
                label = f"{group.label}, seed {run.seed}"
                series.append(Series(label, number, [(x, y, y, y) for x, y in known]))
        if picture := lines(series, "round", unit, title, top):
            figures.append((title, picture))
    return figures


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of three pages; everything else is refused."""

    server_version = "fedloom"
    sys_version = ""

    def __init__(self, board: Board, names: frozenset[str] | None, *rest: Any) -> None:
        self.board, self.names = board, names
        super().__init__(*rest)

    def do_GET(self) -> None:
        """Answer with a page."""
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if self.names is not None and name not in self.names:
            # Another site whose name was made to point here must not read the page through the user's browser.
            return self.send_error(HTTPStatus.FORBIDDEN, f"this board answers to {', '.join(sorted(self.names))} only")
        pages = {"/": self.board.page, "/live": self.board.live, "/report": self.board.report}
        make = pages.get(self.path.partition("?")[0])
        if make is None:
            return self.send_error(HTTPStatus.NOT_FOUND, "there is no such page")
        try:
            body = make().encode()
        except FedloomError as error:
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, str(error).splitlines()[0])
        self.send_response(HTTPStatus.OK)
        for header, value in (
            ("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"),
            ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                        "connect-src 'self'; img-src data:"),
        ):  # fmt: skip
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 (the name that http.server looks for)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its parent's word)
        """Say nothing: the page asks every two seconds."""


def serve(paths: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server of the board, not yet running; `port` 0 takes a free one."""
    for path in paths:
        if path.exists() and not path.is_dir():  # one that is not there yet comes with the first run
            raise InputError(f"{path} is not a folder; give a run folder, or one that holds some")
    local = host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
    names = frozenset({"127.0.0.1", "localhost", "[::1]", host}) if local else None
    try:
        return ThreadingHTTPServer((host, port), partial(_Handler, Board(paths), names))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"the board cannot listen on {host}:{port}: {reason}; choose another --port or --host"
        ) from error


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def show_board(paths: Sequence[Path], host: str, port: int) -> None:
    """Serve until Ctrl-C."""
    server = serve(paths, host, port)
    address, at = server.server_address[:2]
    for path in paths:
        if not path.exists():
            sys.stdout.write(f"{path} is not there yet; its runs are shown when they begin\n")
    sys.stdout.write(f"board: http://{address!s}:{at}/  (Ctrl-C ends it; the runs go on)\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    finally:
        server.server_close()
