"""What two machines measured of one table becomes one."""

from __future__ import annotations

from typing import Any

from fedloom.report.published import joined


def content(machine: str, ran: dict[str, tuple[int, int]], cell: dict[str, Any]) -> dict[str, Any]:
    runs = {label: {"rounds": rounds, "seconds": 10.0, "done": done} for label, (rounds, done) in ran.items()}
    totals = {"done": sum(done for _, done in ran.values()), "of": 3, "rounds": 0, "seconds": 10.0 * len(ran)}
    spot = {"table": "", "row": "A", "column": "", "measure": "accuracy", "published": None}
    return {"runs": totals, "ran": runs, "machines": [machine], "cells": [spot | cell]}


def stopped(seed: int, at: int, value: float) -> dict[str, float]:
    return {"seed": seed, "round": at, "of": 9, "value": value}


OLD = content(
    "old", {"A-0": (9, 1), "A-1": (4, 0)},
    {"measured": [50.0], "seeds": [0], "ended": 1, "unfinished": [stopped(1, 4, 40.0)]},
)  # fmt: skip
NEW = content(
    "new", {"A-0": (3, 0), "A-1": (6, 0), "A-2": (2, 0)},
    {"measured": None, "seeds": [], "ended": 0,
     "unfinished": [stopped(0, 3, 30.0), stopped(1, 6, 60.0), stopped(2, 2, 20.0)]},
)  # fmt: skip


def test_of_every_seed_the_run_counts_that_got_further():
    both = joined(OLD, NEW)
    (cell,) = both["cells"]
    assert (cell["measured"], cell["seeds"], cell["ended"]) == ([50.0], [0], 1)
    assert cell["unfinished"] == [stopped(1, 6, 60.0), stopped(2, 2, 20.0)]
    assert both["runs"] == {"done": 1, "of": 3, "rounds": 17, "seconds": 30.0}
    assert both["machines"] == ["new", "old"]


def test_joining_again_changes_nothing():
    both = joined(OLD, NEW)
    assert joined(both, NEW) == both
    assert joined(both, OLD)["cells"] == both["cells"]


def test_runs_that_all_got_further_replace_the_kept_ones():
    assert joined(content("old", {"A-0": (2, 0)}, {"measured": None, "seeds": [], "ended": 0,
                                                   "unfinished": [stopped(0, 2, 20.0)]}), NEW) == NEW | {
        "runs": {"done": 0, "of": 3, "rounds": 11, "seconds": 30.0}
    }  # fmt: skip


def test_results_that_say_nothing_of_single_runs_are_added_up():
    old = {name: value for name, value in OLD.items() if name != "ran"}
    old["runs"] = {"done": 1, "of": 3, "rounds": 13, "seconds": 20.0}
    both = joined(old, NEW)
    assert both["runs"] == {"done": 1, "of": 3, "rounds": 24, "seconds": 50.0}
    assert joined(both, NEW) == both
