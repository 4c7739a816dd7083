"""The notebook of peers: rows in pieces, each only once, and never half of it."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.deploy import notebook as notebooks
from fedloom.deploy.notebook import Notebook
from fedloom.errors import InputError

RUN = "0123456789abcdef"


def written(rounds, run=RUN, edition="a" * 16, mark=b""):
    """A head after so many rounds, and the rows of whoever leads."""
    rows = {"metrics": b"%s{}\n" % mark * rounds, "clients": b"%s{}\n" % mark * 7 * rounds}
    sizes = {name: len(each) for name, each in rows.items()}
    return {"round": rounds, "edition": edition, "bytes": sizes, "fixed": {"run": run}}, rows


def source(rows, asked=None):
    """Gives pieces of rows, and notes what was asked for."""

    def piece(name, start):
        if asked is not None:
            asked.append((name, start))
        return np.frombuffer(rows[name][start : start + notebooks.PIECE], np.uint8)

    return piece


def all_of(book):
    return {name: book.lines(name) for name in ("metrics", "clients")}


def test_rows_come_in_pieces_and_only_once(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "PIECE", 16)
    book, asked = Notebook(tmp_path), []
    for rounds in (10, 11):
        head, rows = written(rounds)
        book.follow(head, source(rows, asked))
        assert all_of(book) == rows
    clients = [start for name, start in asked if name == "clients"]
    assert clients == [*range(0, 210, 16), 210, 226]
    assert all_of(Notebook(tmp_path)) == rows
    parts = [book.piece("a" * 16, "clients", start).tobytes() for start in range(0, 240, 16)]
    assert b"".join(parts) == rows["clients"]
    assert {len(part) for part in parts[:-1]} == {16}


def test_another_edition_comes_whole(tmp_path):
    book = Notebook(tmp_path)
    head, rows = written(5)
    book.follow(head, source(rows))
    head, rows = written(5, edition="b" * 16, mark=b" ")  # another leader did round 5 anew
    book.follow(head, source(rows))
    assert all_of(book) == rows
    assert sorted(path.name[0] for path in tmp_path.glob("*.jsonl")) == ["b", "b"]
    with pytest.raises(InputError, match="no rows 'clients' of edition 'aaaa"):
        book.piece("a" * 16, "clients", 0)


@pytest.mark.parametrize("edition", ["a" * 16, "b" * 16])
def test_one_that_does_not_arrive_whole_leaves_the_old_one(tmp_path, edition):
    book = Notebook(tmp_path)
    head, rows = written(5)
    book.follow(head, source(rows))
    later, more = written(9, edition=edition)
    with pytest.raises(InputError, match="rows 'clients' end at byte 105, before the 189 that the notebook counts"):
        book.follow(later, source({**more, "clients": more["clients"][:105]}))
    for each in (book, Notebook(tmp_path)):
        assert each.head["round"] == 5
        assert all_of(each) == rows
    book.follow(later, source(more))
    assert all_of(Notebook(tmp_path)) == more


def test_an_older_one_is_refused_unless_it_is_another_runs(tmp_path):
    book = Notebook(tmp_path)
    head, rows = written(6)
    book.follow(head, source(rows))
    older, fewer = written(4, edition="b" * 16)
    with pytest.raises(InputError, match="its notebook is of round 6, newer than round 4"):
        book.follow(older, source(fewer))
    assert all_of(book) == rows
    other, first = written(1, run=RUN[::-1], edition="b" * 16)
    book.follow(other, source(first))
    assert (book.run, all_of(book)) == (RUN[::-1], first)


def test_nobody_goes_on_from_a_run_that_is_over(tmp_path):
    book = Notebook(tmp_path)
    book.end()
    assert (book.run, book.over) == ("", "")
    head, rows = written(6)
    book.follow(head, source(rows))
    assert (book.run, book.over) == (RUN, "")
    book.end()
    for each in (book, Notebook(tmp_path)):
        assert (each.run, each.over) == ("", RUN)
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("edition", ["../../elsewhere", "", "a" * 15, "A" * 16])
def test_an_edition_cannot_name_another_place(tmp_path, edition):
    head, rows = written(1, edition=edition)
    with pytest.raises(InputError, match="in a way that cannot be a file"):
        Notebook(tmp_path).follow(head, source(rows))
    assert list(tmp_path.iterdir()) == []
