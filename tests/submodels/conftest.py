"""One thread, and the command line of the other tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cli.conftest import command  # noqa: F401


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
