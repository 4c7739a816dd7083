"""Pictures of runs, as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fedloom.runs.knowledge import Knowledge
    from fedloom.runs.profiles import Profiles
    from fedloom.runs.result import Result

__all__ = ["curves", "draw_profiles", "heat_map", "overlap", "progress", "spent"]

GROUPS = 6  # of a profile, drawn at most; a deep network's are taken evenly


@contextmanager
def _figure(path: Path, panels: int, size: tuple[float, float], rows: int = 1, **shared: Any) -> Iterator[Any]:
    """Rows of panels, written to a file at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: the caller's backend and open figures stay as they are.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure, figure.subplots(rows, panels, squeeze=False, **shared)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend below all panels, every label once."""
    handles = {text: line for axis in axes for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = min(len(handles), 5)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)


def _decades(axis: Any) -> None:
    """A logarithmic axis of amounts with plain numbers on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def curves(results: Sequence[Result], path: Path) -> Path:
    """Accuracy over rounds: the global model's beside the mean of the clients' own."""
    with _figure(path, 2, (9, 3.4), sharey=True) as (figure, (axes,)):
        for axis, key, title in zip(
            axes,
            ("global_accuracy", "local_accuracy"),
            ("global model, whole test set", "clients' own models, own test parts"),
            strict=True,
        ):
            for result in results:
                rows = [row for row in result.rows("metrics") if row.get(key) is not None]
                if rows:
                    where, reached = [row["round"] for row in rows], [100 * row[key] for row in rows]
                    axis.plot(where, reached, label=result.summary["method"], linewidth=1.8)
            axis.set(title=title, xlabel="round")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("accuracy, %")
        _legend(figure, axes)
    return path


def spent(result: Result) -> dict[str, list[float]]:
    """What had been spent whenever the clients' own models were measured, and how good they were.

    Rounds; local epochs, the mean over participants of passes over their own training data; bytes up and down of all
    participants together.
    """
    sizes, epochs, traffic = result.sizes, dict[int, float](), 0.0
    for entry in result.rows("clients"):
        if entry["job"] == "work" and entry.get("samples"):
            passes = entry["samples"] / sizes[entry["client"]] / len(sizes)
            epochs[entry["round"] + 1] = epochs.get(entry["round"] + 1, 0.0) + passes
    found: dict[str, list[float]] = {"rounds": [], "local epochs": [], "MB": [], "accuracy": []}
    done = 0.0
    for row in result.rows("metrics"):
        done += epochs.get(row["round"], 0.0)
        traffic += row["upload_bytes"] + row["download_bytes"]
        if row.get("local_accuracy") is not None:
            for name, value in zip(found, (row["round"], done, traffic / 1e6, row["local_accuracy"]), strict=True):
                found[name].append(value)
    return found


def progress(groups: Mapping[str, Sequence[Result]], path: Path) -> Path:
    """Accuracy of the clients' own models against rounds, local epochs and bytes; a line is a mean over seeds.

    A round of one method may be several times the work of a round of another: the three panels say what it is worth.
    """
    measured = {label: [spent(result) for result in results] for label, results in groups.items()}
    with _figure(path, 3, (12, 3.8), sharey=True) as (figure, (axes,)):
        for axis, key, title in zip(
            axes,
            ("rounds", "local epochs", "MB"),
            ("rounds", "local epochs of a participant", "traffic of all participants, MB"),
            strict=True,
        ):
            for label, runs in measured.items():
                length = min(len(each["accuracy"]) for each in runs)
                if length:
                    where = np.mean([each[key][:length] for each in runs], axis=0)
                    reached = 100 * np.array([each["accuracy"][:length] for each in runs])
                    (line,) = axis.plot(where, reached.mean(0), label=label, linewidth=1.6, marker=".", markersize=4)
                    if len(runs) > 1:
                        axis.fill_between(where, reached.min(0), reached.max(0), color=line.get_color(), alpha=0.12)
            axis.set(xlabel=title)
            if key == "rounds":
                axis.xaxis.get_major_locator().set_params(integer=True)
            else:
                _decades(axis)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("accuracy of own models, %")
        _legend(figure, axes)
    return path


def heat_map(known: Knowledge, path: Path) -> Path:
    """What every participant's model knows: of everybody's test part, and of every class."""
    count, classes = known.peers.shape[0], known.classes.shape[1]
    cell = 0.42
    width = max(7.0, cell * (count + classes) + 3.2)
    with _figure(path, 2, (width, max(2.8, cell * count + 1.6)), gridspec_kw={"width_ratios": [count, classes]}) as (
        figure,
        (axes,),
    ):
        for axis, table, names, title in (
            (axes[0], known.peers, [str(n) for n in range(count)], "test part of participant"),
            (axes[1], known.classes, list(known.class_names), "class"),
        ):
            image = axis.imshow(100 * table, vmin=0, vmax=100, cmap="viridis", aspect="auto")
            turned = max(map(len, names)) > 3
            axis.set_xticks(range(len(names)), names, rotation=60 if turned else 0, ha="right" if turned else "center")
            axis.set_yticks(range(count), [str(n) for n in range(count)])
            axis.set(xlabel=title)
            axis.tick_params(length=0)
            if count <= 20 and table.shape[1] <= 30:
                for (row, column), value in np.ndenumerate(table):
                    if not np.isnan(value):
                        shade = "black" if value > 0.6 else "white"
                        axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=shade, fontsize=8)
        axes[0].set_ylabel("model of participant")
        figure.colorbar(image, ax=list(axes), label="right answers, %", fraction=0.04, pad=0.01)
        figure.suptitle(f"{known.method}: own data {known.own:.1%}, others' data {known.others:.1%}", fontsize=11)
    return path


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    """How alike two profiles are: the correlation of the units' activations; NaN where one does not vary.

    >>> round(overlap(np.array([0.0, 1.0, 2.0]), np.array([0.0, 2.0, 4.0])), 6)
    1.0
    """
    if one.std() == 0 or other.std() == 0:
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])


def draw_profiles(found: Profiles, path: Path) -> Path:
    """One row a pair of clients, one column a group of units."""
    names = list(next(iter(found.values())))
    groups = [names[int(at)] for at in np.unique(np.linspace(0, len(names) - 1, min(GROUPS, len(names))).round())]
    pairs = list(combinations(found, 2))
    size = 3.4 * len(groups), 1.5 * len(pairs) + 0.6
    with _figure(path, len(groups), size, len(pairs), sharex="col") as (figure, axes):
        for row, pair in zip(axes, pairs, strict=True):
            for axis, group in zip(row, groups, strict=True):
                lines = [found[client][group] for client in pair]
                for client, line, colour in zip(pair, lines, ("tab:blue", "tab:orange"), strict=True):
                    axis.plot(line, label=f"client {client}", linewidth=1.2, color=colour)
                axis.text(
                    0.99, 0.95, f"r = {overlap(*lines):.2f}", transform=axis.transAxes, ha="right", va="top", size=8
                )
                axis.spines[["top", "right"]].set_visible(False)
                axis.tick_params(labelsize=7)
            row[0].set_ylabel(f"{pair[0]} and {pair[1]}", size=9)
        for axis, group in zip(axes[0], groups, strict=True):
            axis.set_title(f"{group} ({len(next(iter(found.values()))[group])} units)", size=9)
        for axis in axes[-1]:
            axis.set_xlabel("unit", size=8)
        lines, labels = axes[0][0].get_lines(), ["first client", "second client"]
        figure.legend(handles=lines, labels=labels, loc="outside lower right", ncols=2, frameon=False, fontsize=8)
        figure.supylabel("mean activation", size=9)
    return path
