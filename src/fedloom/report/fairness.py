"""Who was chosen, and what that did: counts of choices, accuracy by client, coverage of classes, selection skew.

Everything is read from a run's folder. Numbers come from plain functions; `fairness` draws them into one picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedloom.data.picture import FAINT, INK, MOST, PARTS
from fedloom.errors import InputError
from fedloom.runs.start import DEPLOYMENT
from fedloom.runs.store import Store
from fedloom.runs.study import Study
from fedloom.runs.world import world_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Chosen", "fairness", "jain", "read"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def jain(counts: npt.ArrayLike) -> float:
    """Jain's index of fairness: 1 if all are equal, 1 / n if one has everything.

    >>> jain([2, 2, 2, 2]), jain([4, 0, 0, 0])
    (1.0, 0.25)
    """
    values = np.asarray(counts, np.float64)
    return float(values.sum() ** 2 / (len(values) * np.square(values).sum())) if values.any() else 1.0


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a run's ledger tells of its choices. Rounds are counted from 1."""

    clients: int
    rounds: int
    cohorts: Sequence[Ints]  # who was asked to train, round by round
    losses: dict[int, Floats]  # by evaluated round: every client's test loss under its own model; NaN where not asked
    accuracies: dict[int, Floats]
    samples: Floats | None  # training samples by client and class, where the data set is at hand

    @cached_property
    def counts(self) -> Ints:
        """How often each client was chosen."""
        everyone = np.concatenate([np.empty(0, np.int64), *self.cohorts])
        return np.bincount(everyone, minlength=self.clients)

    @property
    def everybody(self) -> bool:
        """Whether there was no choice: all clients, every round."""
        return all(len(cohort) == self.clients for cohort in self.cohorts)

    @cached_property
    def accuracy(self) -> Floats:
        """Every client's accuracy when it was last evaluated; NaN where it never was."""
        return self.accuracies[max(self.accuracies)] if self.accuracies else np.full(self.clients, np.nan)

    @cached_property
    def coverage(self) -> Floats | None:
        """(rounds, classes): share of a class's training samples whose holders have been chosen by then."""
        if self.samples is None:
            return None
        seen, shares, total = np.zeros(self.clients, bool), [], np.maximum(self.samples.sum(0), 1)
        for cohort in self.cohorts:
            seen[cohort] = True
            shares.append(self.samples[seen].sum(0) / total)
        return np.array(shares)

    @cached_property
    def present(self) -> Floats | None:
        """Share of the classes that each round's cohort holds."""
        if self.samples is None:
            return None
        held = self.samples > 0
        return np.array([held[cohort].any(0).sum() / max(1, held.any(0).sum()) for cohort in self.cohorts])

    @cached_property
    def skew(self) -> dict[int, float]:
        """Selection skew by round: mean loss of the chosen over that of all, by the evaluation just before.

        ChFL, definition 6, with losses of the test parts and their least possible value taken as 0. Above 1: clients
        that the model fits badly are preferred. For rounds that follow an evaluation.
        """
        found = {}
        for done, losses in self.losses.items():
            if done < self.rounds and not np.isnan(losses).all():
                chosen = losses[self.cohorts[done]]
                if not np.isnan(chosen).all():
                    found[done + 1] = float(np.nanmean(chosen)) / max(float(np.nanmean(losses)), 1e-12)
        return found

    def numbers(self) -> dict[str, Any]:
        """The picture in a few numbers."""
        least = None if self.coverage is None or not len(self.coverage) else float(self.coverage[-1].min())
        known = self.accuracy[~np.isnan(self.accuracy)]
        return {
            "jain_index": jain(self.counts),
            "never_chosen": int((self.counts == 0).sum()),
            "most_chosen": int(self.counts.max(initial=0)),
            "least_covered_class": least,
            "mean_skew": float(np.mean(list(self.skew.values()))) if self.skew else None,
            "deviation_of_accuracy": float(known.std()) if len(known) else None,
        }


def read(folder: Path) -> Chosen:
    """The choices of a run, finished or not."""
    store = Store.open(folder)
    study, ledger = store.study(), store.rows("clients")
    clients, rounds = study.fleet.clients, len(store.rows("metrics"))
    cohorts: list[set[int]] = [set() for _ in range(rounds)]
    losses, accuracies = (dict[int, Floats](), dict[int, Floats]())
    for entry in ledger:
        if entry["round"] >= rounds:
            continue
        if entry["job"] == "work":
            cohorts[entry["round"]].add(entry["client"])
        elif entry["job"] == "evaluate" and not entry["failed"]:
            for name, table in (("loss", losses), ("accuracy", accuracies)):
                table.setdefault(entry["round"] + 1, np.full(clients, np.nan))[entry["client"]] = entry[name]
    sorted_cohorts = [np.array(sorted(cohort), np.int64) for cohort in cohorts]
    return Chosen(clients, rounds, sorted_cohorts, losses, accuracies, _samples(store, study))


def _samples(store: Store, study: Study) -> Floats | None:
    """Training samples by client and class; None where nobody here knows."""
    if store.read(DEPLOYMENT) is not None:  # real clients keep their labels to themselves
        return None
    try:
        world = world_of(study.model_dump_json(), store.split_file)
    except InputError:  # the run was copied to a machine without the data
        return None
    rows, clients, classes = world.split.train, study.fleet.clients, world.dataset.classes
    cells = rows.owners * classes + world.dataset.y[rows.rows]
    return np.bincount(cells, minlength=clients * classes).reshape(clients, classes).astype(np.float64)


def fairness(folder: Path, path: Path | None = None) -> Path:
    """Draw the choices of a run; by default `fairness.png` in its folder."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen, study = read(folder), Store.open(folder).study()
    figure = Figure(figsize=(10, 7), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    (counts, accuracy), (coverage, time) = figure.subplots(2, 2)
    _counts(counts, chosen)
    _accuracy(accuracy, chosen)
    _coverage(coverage, chosen)
    _time(time, chosen)
    rule = study.select.name or "uniform"
    data = study.data.name if Store.open(folder).read(DEPLOYMENT) is None else "data of real clients"
    title = f"{study.method.name}, {rule} selection, {data}: {chosen.rounds} rounds, {chosen.clients} clients"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    target = path or folder / "fairness.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target


def _quiet(axes: Axes, title: str, x: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _nothing(axes: Axes, reason: str) -> None:
    axes.text(0.5, 0.5, reason, ha="center", va="center", color=FAINT, transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


def _counts(axes: Axes, chosen: Chosen) -> None:
    counts = np.sort(chosen.counts)[::-1]
    never = int((counts == 0).sum())
    title = f"times chosen (Jain index {jain(counts):.2f}, {never} never)"
    if chosen.clients <= MOST:
        axes.bar(np.arange(len(counts)), counts, 0.86, color=PARTS["train"])
        axes.axhline(counts.mean(), color=PARTS["test"], linewidth=1.5, linestyle="--")
        axes.annotate(
            f"mean {counts.mean():.3g}", (len(counts) - 1, counts.mean()), (0, 4), textcoords="offset points",
            ha="right", fontsize=8, color=INK,
        )  # fmt: skip
        _quiet(axes, title, "clients, most chosen first", "rounds")
        axes.set_xticks([])
        return
    values, clients = np.unique(counts, return_counts=True)
    axes.bar(values, clients, 0.86, color=PARTS["train"])
    axes.set_yscale("log")
    _quiet(axes, title, "times chosen", "clients")


def _accuracy(axes: Axes, chosen: Chosen) -> None:
    known = ~np.isnan(chosen.accuracy)
    _quiet(axes, "accuracy of each client's model on its own test part", "times chosen", "accuracy, %")
    if not known.any():
        _nothing(axes, "never evaluated")
        return
    # Clients of equal count stand beside each other rather than on each other.
    aside = (np.arange(chosen.clients) * 0.618034 % 1 - 0.5) * 0.6
    x, y = (chosen.counts + aside)[known], 100 * chosen.accuracy[known]
    axes.scatter(x, y, s=18, alpha=0.6, color=PARTS["train"], linewidths=0)
    mean = float(y.mean())
    axes.axhline(mean, color=PARTS["test"], linewidth=1.5, linestyle="--")
    axes.annotate(
        f"mean {mean:.1f}", (axes.get_xlim()[1], mean), (0, 4), textcoords="offset points", ha="right", fontsize=8,
        color=INK,
    )  # fmt: skip


def _coverage(axes: Axes, chosen: Chosen) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    title = "share of each class's training samples reached so far"
    if chosen.coverage is None or not len(chosen.coverage):
        _quiet(axes, title, "", "")
        _nothing(axes, "the data set is not at hand" if chosen.samples is None else "no round is done")
        return
    water = LinearSegmentedColormap.from_list("water", ["#f6f7f8", "#d7ecef", "#74b3c4", "#1f6f8b", "#0b3954"])
    extent = (0.5, chosen.rounds + 0.5, chosen.coverage.shape[1] - 0.5, -0.5)
    image = axes.imshow(
        chosen.coverage.T, cmap=water, vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent
    )
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, fraction=0.05)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=FAINT)
    _quiet(axes, title, "round", "class")


def _time(axes: Axes, chosen: Chosen) -> None:
    rounds = np.arange(1, chosen.rounds + 1)
    if chosen.present is not None and chosen.rounds:
        axes.plot(rounds, chosen.present, color=PARTS["train"], linewidth=1.4, label="share of classes in the cohort")
    if chosen.skew:
        axes.plot(
            list(chosen.skew), list(chosen.skew.values()), color=PARTS["test"], linewidth=1.4, marker="o", markersize=3,
            label="selection skew: loss of the chosen / of all",
        )  # fmt: skip
    axes.axhline(1, color=FAINT, linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=0)
    _quiet(axes, "what each round's cohort is like", "round", "")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="lower right", labelcolor=INK)
    else:
        _nothing(axes, "nothing to show")
