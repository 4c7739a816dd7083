"""The published tables in papers/: every file is sound at every scale and runs at the smallest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedloom.report.grids import announced
from fedloom.report.published import heading
from fedloom.runs.grid import merged
from fedloom.runs.papers import SCALES, grid_of, read_paper

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "papers").glob("*.toml"))
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@every_file
def test_sound_at_every_scale(file):
    published = read_paper(str(file))
    assert set(published.paper.scales) == set(SCALES)
    for scale, content in published.paper.scales.items():
        assert content.takes, f"{scale} does not say what it takes"
        assert content.differs or scale == "paper"
        cells = grid_of(published, scale).cells()
        assert len({cell.label for cell in cells}) == len(cells)
    assert "shows that it runs" in published.paper.scales["smoke"].differs


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Stand-ins, 100 random pictures each, for the data sets that have no small embedded one: several domains."""
    random = np.random.default_rng(0)
    grey, colour = (28, 28), (32, 32, 3)
    for name, shape in {"mnist": grey, "usps": grey, "mnist_m": colour, "svhn": colour, "pacs": colour}.items():
        classes = 7 if name == "pacs" else 10
        parts = {f"x_{part}": random.integers(256, size=(100, *shape), dtype=np.uint8) for part in ("train", "test")}
        parts |= {f"y_{part}": np.arange(100) % classes for part in ("train", "test")}
        if name == "pacs":
            parts |= {f"g_{part}": np.arange(100) // 25 for part in ("train", "test")}
            parts |= {"group_names": np.array(list("abcd")), "class_names": np.array(list("1234567"))}
        np.savez(tmp_path / f"{name}.npz", **parts)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))


def run_smoke(file, folder, whole):
    grid = grid_of(read_paper(str(file)), "smoke")
    if not whole:  # a corner of the table, one round
        first = {name: grid.rows[name] for name in list(grid.rows)[:1]}, dict([*grid.columns.items()][:1])
        base = merged(grid.base, {"engine": {"name": "local"}})
        grid = replace(grid, base=base, rows=first[0], columns={
            name: merged(sections, {"run": {"rounds": 1}}) for name, sections in first[1].items()
        })  # fmt: skip
    ran = grid.run(folder, announced, jobs=1)
    assert ran.failures == []
    assert len(ran.done) == len(grid.cells())


@every_file
def test_a_corner_of_it_runs(file, tmp_path, pictures):
    run_smoke(file, tmp_path / "runs", whole=False)


@pytest.mark.slow
@every_file
def test_smoke_scale(file, tmp_path, pictures):
    run_smoke(file, tmp_path / "runs", whole=True)


@every_file
def test_kept_results_are_of_this_file(file):
    """What the page shows was asked for by the file as it is now: the same rows, columns and printed numbers."""
    published = read_paper(str(file))
    for scale in SCALES:
        path = file.parent / "results" / f"{file.stem}-{scale}.json"
        if path.exists():
            grid, content = grid_of(published, scale), json.loads(path.read_text())
            assert content["runs"]["of"] == len(grid.cells())
            rows = {label for table in published.paper.shown for label in table.labels(published.paper.rows)}
            assert {cell["row"] for cell in content["cells"]} <= rows
            assert {cell["column"] for cell in content["cells"]} <= set(grid.columns)


@every_file
def test_every_measure_of_a_table_has_a_heading_of_its_own(file):
    """Two that read alike would stand in one column, the last over the first."""
    for table in read_paper(str(file)).paper.shown:
        assert len({heading(measure) for measure in table.measures}) == len(table.measures), table.title
