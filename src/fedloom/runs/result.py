"""What a run gives back: its summary, its metrics, a table, a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.data.split import Split
from fedloom.runs.store import Store
from fedloom.runs.study import Study

if TYPE_CHECKING:
    import pandas

__all__ = ["Result"]


class Result:
    """A finished run."""

    def __init__(self, store: Store, summary: Mapping[str, Any]) -> None:
        self.summary, self._store = dict(summary), store

    def __repr__(self) -> str:
        names = ("method", "rounds", "global_accuracy", "local_accuracy")
        known = {name: self.summary[name] for name in names if self.summary.get(name) is not None}
        told = [
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in known.items()
        ]
        return f"<Result {' '.join(told)} folder={self.folder}>"

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        return self._store.folder

    @property
    def study(self) -> Study:
        """What was run."""
        return self._store.begun()

    @property
    def sizes(self) -> np.ndarray:
        """How many samples each client trains on."""
        return Split.load(self._store.split_file).train.sizes

    @property
    def has_model(self) -> bool:
        """Whether there is a global model, measured or not."""
        return self._store.model_file.exists()

    @property
    def participants(self) -> list[float]:
        """How good each client's own model was when last measured, by client number."""
        found = {row["client"]: row["accuracy"] for row in self.rows("clients")
                 if row["job"] == "evaluate" and not row["failed"]}  # fmt: skip
        return [found[client] for client in sorted(found)]

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row a round."""
        import pandas

        return pandas.DataFrame(self.rows("metrics"))

    @property
    def clients(self) -> pandas.DataFrame:
        """The ledger: one row a task, with what it cost."""
        import pandas

        return pandas.DataFrame(self.rows("clients"))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The lines of `metrics` (one a round) or `clients` (one a task)."""
        return self._store.rows(name)

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and machine."""
        return self._store.read("environment.json") or {}

    def table(self) -> pandas.DataFrame:
        """The summary as a table of one row."""
        import pandas

        return pandas.DataFrame([self.summary])

    def plot(self, path: Path | str | None = None) -> Path:
        """A picture of accuracy over rounds; by default `curves.png` in the run's folder."""
        from fedloom.report.plots import curves

        return curves([self], Path(path) if path else self.folder / "curves.png")

    def fairness(self, path: Path | str | None = None) -> Path:
        """A picture of who was chosen and what that did; by default `fairness.png` in the run's folder."""
        from fedloom.report.fairness import fairness

        return fairness(self.folder, Path(path) if path else None)
