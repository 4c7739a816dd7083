"""Rows as parquet, for data frames and databases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

__all__ = ["write_parquet"]

Row = Mapping[str, Any]
CHUNK = 10_000  # rows in memory at once


def write_parquet(rows: Callable[[str], Iterable[Row]], name: str, path: Path) -> None:
    """Write the rows of that name, which may lack columns, whole or not at all; nothing is written for no rows.

    They are gone through twice, a chunk at a time: what is needed does not grow with their number.
    """
    import pyarrow
    import pyarrow.parquet

    schemas = [table.schema for table in _tables(rows(name))]
    if not schemas:
        return
    schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
    partial = path.with_suffix(".partial")
    with pyarrow.parquet.ParquetWriter(partial, schema) as writer:
        for table in _tables(rows(name), schema):
            writer.write_table(table)
    partial.replace(path)


def _tables(rows: Iterable[Row], schema: Any = None) -> Iterator[Any]:
    import pyarrow

    waiting = iter(rows)
    while chunk := list(islice(waiting, CHUNK)):
        columns = schema.names if schema is not None else {key: None for row in chunk for key in row}
        yield pyarrow.table({key: [row.get(key) for row in chunk] for key in columns}, schema=schema)
