"""Pictures of structures that evolve, from run folders: the figures of the FedES paper.

`rates` shows how keep rates move, `layers` what they leave of each layer (figure 4), `compression` accuracy,
compression and speed-up over rounds (figure 5), `ablation` runs that differ in the covariance (figure 6), `pareto`
accuracy against size and cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from fedloom.errors import InputError
from fedloom.network import Network
from fedloom.policies.chromosome import Genes
from fedloom.policies.front import nondominated
from fedloom.runs.store import Store
from fedloom.runs.world import world_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ablation", "compression", "layers", "pareto", "rates", "remaining"]


def rates(folder: Path, path: Path) -> Path:
    """Keep rates over rounds, gene by gene: mean over clients, with a band of one standard deviation."""
    store, genes = Store.open(folder), Genes.of(_network(folder))
    rows = [row for row in store.rows("clients") if genes.names[0] in row and not row["failed"]]
    if not rows:
        raise InputError(f"{folder} has no chromosomes to show; expected a run of fedes")
    figure, axes = _figure(2, sharey=True)
    rounds = sorted({row["round"] for row in rows})
    for axis, names, title in (
        (axes[0], genes.names[: len(genes.groups)], "units kept"),
        (axes[1], genes.names[len(genes.groups) :], "weights kept, linear layers"),
    ):
        for name in names:
            found = [np.array([row[name] for row in rows if row["round"] == round]) for round in rounds]
            mean, spread = np.array([each.mean() for each in found]), np.array([each.std() for each in found])
            x = np.array(rounds) + 1
            (line,) = axis.plot(x, mean, label=_short(name), linewidth=1.6)
            axis.fill_between(x, mean - spread, mean + spread, color=line.get_color(), alpha=0.12, linewidth=0)
        _dress(axis, title, "round", "share" if axis is axes[0] else "")
        axis.set_ylim(0, 1.03)
        axis.legend(frameon=False, fontsize=8)
    return _saved(figure, path)


def remaining(network: Network, chromosome: Mapping[str, float]) -> dict[str, dict[str, tuple[float, float]]]:
    """Layer by layer, weights and multiply-accumulates: of the whole model, and at this chromosome."""
    genes, units = Genes.of(network), network.units
    kept = units.kept({group: chromosome[name] for group, name in zip(genes.groups, genes.names, strict=False)})
    shares = dict(zip(genes.matrices, (chromosome[name] for name in genes.names[len(genes.groups) :]), strict=True))
    whole, cut, positions = units.shapes(), units.shapes(kept), _positions(network)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for layer, places in positions.items():
        name = f"{layer}.weight"
        sizes = whole[name].numel(), cut[name].numel()
        found[layer] = {
            "weights": (sizes[0], sizes[1] * shares.get(name, 1.0)),
            "MACs": (sizes[0] * places, sizes[1] * places),
        }
    return found


def layers(folder: Path, path: Path) -> Path:
    """What the mean chromosome at the end leaves of each layer (figure 4)."""
    chromosome = (Store.open(folder).read("summary.json") or {}).get("found")
    network = _network(folder)
    if not chromosome or Genes.of(network).names[0] not in chromosome:
        raise InputError(f"{folder} has no chromosomes to show; expected a finished run of fedes")
    found = remaining(network, chromosome)
    figure, axes = _figure(2)
    for axis, what in zip(axes, ("weights", "MACs"), strict=True):
        places = np.arange(len(found))
        for offset, number, label in ((-0.2, 0, "whole model"), (0.2, 1, "mean sub-network")):
            axis.bar(places + offset, [each[what][number] for each in found.values()], 0.4, label=label)
        axis.set_yscale("log")
        axis.set_xticks(places, list(found), rotation=35, ha="right", fontsize=8)
        _dress(axis, f"{what} of each layer", "", what if axis is axes[0] else "")
        for place, each in zip(places, found.values(), strict=True):
            axis.annotate(f"{100 * each[what][1] / each[what][0]:.0f}%", (place + 0.2, each[what][1]),
                          ha="center", va="bottom", fontsize=7)  # fmt: skip
    axes[0].legend(frameon=False, fontsize=8)
    return _saved(figure, path)


def compression(folder: Path, path: Path) -> Path:
    """Accuracy, share of parameters sent and speed-up of the forward pass over rounds (figure 5)."""
    network, rows = _network(folder), Store.open(folder).rows("metrics")
    whole = network.module.state_dict()
    parameters, macs = sum(tensor.numel() for tensor in whole.values()), network.macs(dict(whole))
    figure, axes = _figure(3)
    # What a row has, in the unit of its panel.
    panels: dict[tuple[str, str], tuple[str, Callable[[float], float]]] = {
        ("accuracy of the global model", "%"): ("global_accuracy", lambda value: 100 * value),
        ("parameters sent", "% of the whole model"): ("mean_parameters", lambda value: 100 * value / parameters),
        ("speed-up of the forward pass", "times fewer MACs"): ("mean_forward_macs", lambda value: macs / value),
    }
    for axis, ((title, unit), (key, scaled)) in zip(axes, panels.items(), strict=True):
        found = _with(rows, key)
        axis.plot([row["round"] for row in found], [scaled(row[key]) for row in found], linewidth=1.8)
        _dress(axis, title, "round", unit)
    return _saved(figure, path)


def ablation(folders: Sequence[Path], path: Path) -> Path:
    """Accuracy over rounds of runs that differ in `method.covariance`, mean over those that share it (figure 6)."""
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for folder in folders:
        store = Store.open(folder)
        groups.setdefault(store.study().method.fields.get("covariance", "winners"), []).append(store.rows("metrics"))
    figure, axes = _figure(2, sharey=True)
    for axis, key, title in (
        (axes[0], "global_accuracy", "global model"),
        (axes[1], "local_accuracy", "clients' own models"),
    ):
        for name, runs in groups.items():
            found = [{row["round"]: 100 * row[key] for row in _with(rows, key)} for rows in runs]
            rounds = sorted(set.intersection(*(set(each) for each in found)))
            values = np.array([[each[round] for round in rounds] for each in found])
            (line,) = axis.plot(rounds, values.mean(0), label=f"{name}, runs: {len(runs)}", linewidth=1.8)
            axis.fill_between(rounds, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
        _dress(axis, title, "round", "accuracy, %" if axis is axes[0] else "")
    axes[0].legend(frameon=False, fontsize=8, title="covariance")
    return _saved(figure, path)


def pareto(folders: Sequence[Path], path: Path) -> Path:
    """Accuracy against parameters sent and MACs of a forward pass, a point a run; a line joins those nobody beats."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    found = [(Store.open(folder).read("summary.json") or {}) | {"folder": folder} for folder in folders]
    ready = [each for each in found if each.get("global_accuracy") is not None]
    if not ready:
        raise InputError("none of these runs is finished and has a global model; there is nothing to compare")
    figure, axes = _figure(2, sharey=True)
    for axis, key, label in (
        (axes[0], "last_parameters", "parameters a client sends"),
        (axes[1], "last_forward_macs", "MACs of a forward pass"),
    ):
        for method in dict.fromkeys(each["method"] for each in ready):
            own = [each for each in ready if each["method"] == method]
            axis.scatter(
                [each[key] for each in own], [100 * each["global_accuracy"] for each in own], label=method, s=34
            )
        goals = np.array([[each[key], -100 * each["global_accuracy"]] for each in ready], float)
        front = goals[nondominated(goals)]
        front = front[front[:, 0].argsort()]
        axis.plot(front[:, 0], -front[:, 1], color="0.5", linewidth=1, zorder=0, linestyle="--")
        if goals[:, 0].max() > 5 * goals[:, 0].min():
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(EngFormatter())
        _dress(axis, "", label, "accuracy of the global model, %" if axis is axes[0] else "")
    axes[0].legend(frameon=False, fontsize=8)
    return _saved(figure, path)


def _network(folder: Path) -> Network:
    store = Store.open(folder)
    return world_of(store.study().model_dump_json(), store.split_file).network


def _positions(network: Network) -> dict[str, int]:
    """At how many places of one image each convolution or linear layer is applied; no width changes that."""
    found: dict[str, int] = {}
    layers = {path: part for path, part in network.module.named_modules() if isinstance(part, _ConvNd | nn.Linear)}

    def note(path: str, width_axis: int) -> Any:
        def hook(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            found[path] = output[0].numel() // output.shape[width_axis]

        return hook

    hooks = [
        part.register_forward_hook(note(path, 1 if isinstance(part, _ConvNd) else -1)) for path, part in layers.items()
    ]
    training = network.module.training
    with torch.no_grad():
        network.module.eval()(torch.zeros(1, *network.shape))
    network.module.train(training)
    for hook in hooks:
        hook.remove()
    return found


def _with(rows: Iterable[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [row for row in rows if row.get(key) is not None]


def _short(name: str) -> str:
    """A gene's name without what the panel says already."""
    return name.removeprefix("units of ").removeprefix("weights of ").removesuffix(".weight")


def _figure(panels: int, *, sharey: bool = False) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: the caller's backend and open figures stay as they are.
    figure = Figure(figsize=(4.6 * panels, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, sharey=sharey)


def _dress(axis: Axes, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _saved(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
