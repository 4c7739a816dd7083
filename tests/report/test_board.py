"""The board: it follows runs, reads only, and answers this machine only."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from contextlib import contextmanager

import pytest

from fedloom.errors import InputError
from fedloom.report.board import Board, serve
from fedloom.runs.store import FAILURE


@contextmanager
def served(*paths):
    server = serve(paths)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(port, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply.headers


@pytest.fixture
def some(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    return tmp_path / "runs"


def begin(folder):
    """A run that has only begun."""
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0])
    return lines


def test_it_reads_and_never_writes(some):
    before = {path: path.stat().st_mtime_ns for path in some.rglob("*")}
    with served(some) as port:
        for path in ("/", "/live", "/report"):
            status, text, headers = answer(port, path)
            assert status == 200
            assert "heterofl" in text
            assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert answer(port, "/", "HEAD")[:2] == (200, "")
        for method in ("POST", "PUT", "DELETE"):
            assert answer(port, "/", method)[0] == 501
        for path in ("/etc/passwd", "/../study.json", "/fedrolex-digits-0/study.json"):
            assert answer(port, path)[0] == 404
    assert {path: path.stat().st_mtime_ns for path in some.rglob("*")} == before


def test_only_this_machine_by_its_own_name(some):
    server = serve([some])
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()
    with served(some) as port:
        assert answer(port, host=f"localhost:{port}")[0] == 200
        assert answer(port, host="elsewhere.example")[0] == 403


def test_states(some):
    (first, *_), board = sorted(some.glob("heterofl*")), Board([some])
    assert board.live().count('badge finished"') == 4
    lines = begin(first)
    assert 'badge stopped"' in board.live()
    (first / FAILURE).write_text(json.dumps({"sentence": "round 2: 1 of 3 clients <reported>"}))
    text = board.live()
    assert 'badge failed"' in text
    assert "1 of 3 clients &lt;reported&gt;" in text
    assert "round 1 of 3" in text
    (first / "metrics.jsonl").write_text("".join(lines[:2]))
    assert "round 2 of 3" in board.live()


def test_a_folder_that_comes_later(runs, tmp_path):
    with served(tmp_path / "later") as port:
        assert "Nothing has begun here yet" in answer(port)[1]
        assert answer(port, "/report")[0] == 503
        shutil.copytree(runs, tmp_path / "later")
        assert "heterofl" in answer(port, "/live")[1]


def test_a_file_is_no_folder_of_runs(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is not a folder"):
        serve([tmp_path / "file"])


def test_nothing_yet(tmp_path):
    assert "Nothing has begun here yet" in Board([tmp_path]).page()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_follows_a_run(page, some, width):
    folder = sorted(some.glob("fedrolex*"))[0]
    lines = begin(folder)
    with served(some) as port:
        view = page(f"http://127.0.0.1:{port}/", width)
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        assert view.locator("figure svg .line").count() == 3 * 4
        card = view.locator(f'[data-run="{folder}"]')
        assert "round 1 of 3" in card.inner_text()
        (folder / "metrics.jsonl").write_text("".join(lines))
        card.get_by_text("round 3 of 3").wait_for(timeout=10_000)
        assert view.locator("#now").inner_text().startswith("live")
        card.locator("h3 span").first.evaluate("span => span.textContent = 'a label of many words '.repeat(9)")
        assert card.locator(".badge").bounding_box()["height"] < 40, "a long label does not stretch it"


def test_it_shows_who_takes_part_in_a_deployment(some):
    folder = next(path.parent for path in some.rglob("study.json"))
    clients = [
        {"name": "kitchen", "number": 0, "state": "connected", "reason": "", "joined": 1.0, "reports": 3, "failures": 0,
         "last": "work of round 3", "last_seen": 1.7e9, "received_bytes": 2_500_000, "sent_bytes": 1_000},
        {"name": "<b>attic</b>", "number": 1, "state": "absent", "reason": "", "joined": 0.0, "reports": 0,
         "failures": 0, "last": "", "last_seen": 0.0, "received_bytes": 0, "sent_bytes": 0},
    ]  # fmt: skip
    (folder / "status.json").write_text(json.dumps({"updated": 1.7e9, "round": 3, "clients": clients}))
    text = Board([some]).live()
    for word in ("kitchen", "connected", "2.5 MB", "work of round 3", "never", "&lt;b&gt;attic"):
        assert word in text
    assert text.count("kitchen") == 1, "the others are simulations"


def test_a_damaged_run_is_told_beside_the_others(some):
    bad = sorted(some.iterdir())[0]
    (bad / "metrics.jsonl").write_text("no JSON\n")
    text = Board([some]).live()
    assert f"Left out: {bad / 'metrics.jsonl'} is damaged" in text
    assert text.count('<div class="run"') == 3
