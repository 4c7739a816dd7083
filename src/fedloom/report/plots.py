"""Pictures of runs, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedloom.runs.result import Result

__all__ = ["curves"]


def curves(results: Sequence[Result], path: Path) -> Path:
    """Accuracy over rounds: the global model's beside the mean of the clients' own."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, key, title in zip(
        axes,
        ("global_accuracy", "local_accuracy"),
        ("global model, whole test set", "clients' own models, own test parts"),
        strict=True,
    ):
        for result in results:
            rows = [row for row in result.rows("metrics") if row.get(key) is not None]
            if rows:
                label = result.summary["method"]
                axis.plot([row["round"] for row in rows], [100 * row[key] for row in rows], label=label, linewidth=1.8)
        axis.set(title=title, xlabel="round")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("accuracy, %")
    handles = {text: line for axis in axes for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
