"""Files of a run's folder that are damaged: whatever goes wrong with reading one is said of the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError

from fedloom.errors import InputError, oxford

__all__ = ["holding", "sound"]


@contextmanager
def sound(path: Path) -> Iterator[None]:
    """Whatever goes wrong with reading a file of the folder is said of the file."""
    try:
        yield
    except ValidationError as error:
        raise InputError(f"{path} is damaged: {error.errors()[0]['msg']}") from error
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def holding(found: Any, names: Sequence[str], path: Path) -> dict[str, Any]:
    """What a file holds, if it is a tree with these names."""
    if missing := [name for name in names if not isinstance(found, dict) or name not in found]:
        raise InputError(f"{path} is damaged or another file: it has no {oxford(missing, 'and')}")
    return {**found}
