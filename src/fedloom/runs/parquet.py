"""Rows as parquet, for data frames and databases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["write_parquet"]


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows that may lack columns, whole or not at all; nothing is written for no rows."""
    import pyarrow
    import pyarrow.parquet

    if rows:
        columns = {key: None for row in rows for key in row}
        table = pyarrow.table({key: [row.get(key) for row in rows] for key in columns})
        partial = path.with_suffix(".partial")
        pyarrow.parquet.write_table(table, partial)
        partial.replace(path)
