"""Which rows of a table are well above its floor."""

from __future__ import annotations

from fedloom.report.published import above_floor


def cell(row: str, *measured: float, seeds: tuple[int, ...] = (0, 1)) -> dict[str, object]:
    return {"row": row, "measure": "global_accuracy", "measured": list(measured), "seeds": list(seeds)}


def test_means_are_compared_and_other_seeds_left_out():
    cells = [cell("base", 50, 60), cell("far", 58, 59), cell("near", 57, 58), cell("less", 99, seeds=(0,))]
    assert above_floor({"floor": "base", "cells": cells}) == (
        "At least 3 points above base, by the means: far (+3.5). Not: near (+2.5)."
    )


def test_a_floor_that_was_not_run():
    cells = [cell("far", 58, 59), {**cell("base"), "measured": None}]
    assert above_floor({"floor": "base", "cells": cells}) == "The floor, base, has not been run."
