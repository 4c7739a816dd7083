"""A data folder and a cache of their own for each test, and no network."""

from __future__ import annotations

from pathlib import Path

import pooch
import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $FEDLOOM_DATA; the cache is empty too and downloads fail as they do without a network."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("FEDLOOM_DATA", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def unreachable(url: str, **_: object) -> str:
        raise ConnectionError(f"no network in tests: {url}")

    monkeypatch.setattr(pooch, "retrieve", unreachable)
    return folder
