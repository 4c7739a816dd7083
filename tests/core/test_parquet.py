"""Rows as parquet, a chunk at a time."""

from __future__ import annotations

import pandas
import pytest

from fedloom.runs import parquet

ROWS = [
    {"round": 1, "loss": None, "name": "a"},
    {"round": 2, "loss": 1, "per_class": [0.5, None]},
    {"round": 3, "loss": 0.25, "name": "b"},
    {"round": 4},
    {"round": 5, "per_class": None, "late": True},
]


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_chunks_make_one_table_whatever_columns_they_lack(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CHUNK", chunk)
    parquet.write_parquet(lambda _: iter(ROWS), "rows", tmp_path / "rows.parquet")
    found = pandas.read_parquet(tmp_path / "rows.parquet")
    assert list(found.columns) == ["round", "loss", "name", "per_class", "late"]
    assert found["round"].tolist() == [1, 2, 3, 4, 5]
    assert found["loss"].dropna().tolist() == [1.0, 0.25]
    assert list(found["per_class"][1])[:1] == [0.5]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_no_rows_no_file(tmp_path):
    parquet.write_parquet(lambda _: [], "rows", tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []
