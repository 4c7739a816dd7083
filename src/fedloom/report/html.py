"""`fedloom report`: one self-contained HTML file about some runs, for reading, printing and copying tables from."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fedloom import __version__
from fedloom.errors import InputError, choose
from fedloom.report.gather import Group, Run, common, groups_of, read_runs
from fedloom.report.statistics import ENOUGH, Estimate, estimate, verdict
from fedloom.report.svg import Point, Series, heat, lines, scatter
from fedloom.report.tables import COST, NAMES, UNTIL, Rows, aims, brief, interval, percent, quantity, statistics_table
from fedloom.report.words import words
from fedloom.runs.grid import Spread

__all__ = ["render", "write_report"]

FEW = 3  # different facts that are not listed any more
NARROW = 6  # columns of text that fit beside each other
CARDS = 24  # the best of so many methods have a card; all are in the tables
MOST = 100  # clients that a picture of clients shows
TRAFFIC = "upload_bytes+download_bytes"


class Table(NamedTuple):
    """A table of the page, with the text that its buttons copy."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    csv: str
    latex: str
    note: str = ""
    shape: str = ""  # long: text that wraps; pairs: names and values side by side


class Figure(NamedTuple):
    """A figure of the page; a wide one scrolls on a narrow screen."""

    title: str
    svg: str
    note: str = ""
    wide: bool = False


class Section(NamedTuple):
    """A part of the page."""

    key: str
    title: str
    lead: str
    tables: list[Table]
    figures: list[Figure]


def write_report(paths: Sequence[Path], file: Path, baseline: str | None = None) -> Path:
    """Write the report of some runs."""
    if file.is_dir() or file.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"a report is an HTML file; got '{file}', expected a name like report.html")
    runs = read_runs(paths)
    labels = [group.label for group in groups_of(runs)]
    if baseline is not None and baseline not in labels:
        raise choose("baseline", baseline, labels)
    text = render(runs, baseline)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
    return file


def render(runs: Sequence[Run], baseline: str | None = None) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    every = groups_of(runs)
    groups = [group.counted for group in every]
    measure = _measure(groups)
    numbers = {group.label: group.values(measure) if group.ended else {} for group in groups}
    winner, sentence = verdict(numbers, NAMES[measure])
    sections = [
        _summary(groups, numbers, baseline), _curves(groups), _costs(groups, measure),
        _clients(groups), _data(runs[0]), _submodels(groups), _selection(groups), _trouble(every), _settings(every),
    ]  # fmt: skip
    page = Environment(
        loader=PackageLoader("fedloom.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    ).get_template("report.html")
    return page.render(
        title=_title(runs),
        subtitle=_facts(runs, groups),
        verdict=sentence[:1].upper() + sentence[1:] if len(groups) > 1 else "",
        winner=winner,
        aside=[*_unfinished(every), *_doubled(every), *_crowd(groups)],
        cards=_cards(groups, measure),
        legend=[(number, group.label) for number, group in enumerate(groups)],
        sections=[section for section in sections if section is not None and (section.tables or section.figures)],
        words=words(groups),
        made=f"fedloom {__version__}, {datetime.now():%Y-%m-%d %H:%M}",
    )


def _unfinished(groups: Sequence[Group]) -> Iterator[str]:
    """Which runs have not ended, in a sentence."""
    named = [
        f"{group.label}, seed {run.seed} ({run.state}, {_to_go(run)})"
        for group in groups
        for run in group.runs
        if run.state != "finished"
    ]
    if named:
        yield f"Left out of the verdict and its statistics, because they have not ended: {'; '.join(named)}."


def _doubled(groups: Sequence[Group]) -> Iterator[str]:
    """Which runs are of the same study and seed, in a sentence."""
    named = []
    for group in groups:
        folders: dict[int, list[str]] = {}
        for run in sorted(group.runs, key=lambda run: run.progress):
            folders.setdefault(run.seed, []).append(str(run.store.folder))
        for seed, (*others, furthest) in folders.items():
            if others:
                named.append(f"{group.label}, seed {seed} ({furthest} counts, not {', '.join(others)})")
    if named:
        yield f"Run more than once; the run that got further counts, of equals the later: {'; '.join(named)}."


def _crowd(groups: Sequence[Group]) -> Iterator[str]:
    """That not everybody has a card, in a sentence."""
    if len(groups) > CARDS:
        yield f"The {CARDS} best of {len(groups)} have a card; all are in the tables."


def _to_go(*runs: Run) -> str:
    return f"{runs[0].study.run.rounds - min(len(run.rows) for run in runs)} rounds to go"


def _measure(groups: Sequence[Group]) -> str:
    everywhere = all(group.values("global_accuracy") for group in groups)
    return "global_accuracy" if everywhere else "local_accuracy"


def _title(runs: Sequence[Run]) -> str:
    sets = _together([run.study.data.name for run in runs])
    methods = list(dict.fromkeys(run.study.method.name for run in runs))
    return f"{methods[0] if len(methods) == 1 else f'{len(methods)} methods'} on {sets}"


def _facts(runs: Sequence[Run], groups: Sequence[Group]) -> list[str]:
    """What all runs share, in a few words."""
    sayings: list[Callable[[Run], str]] = [
        lambda run: run.study.model.label,
        lambda run: f"{run.study.partition.name} split",
        lambda run: f"{run.study.fleet.clients} clients",
        lambda run: f"{run.study.fleet.name} fleet",
        lambda run: f"{run.study.run.rounds} rounds",
    ]
    said = [_together([say(run) for run in runs]) for say in sayings]
    seeds = sorted({len(group.runs) for group in groups})
    return [*said, f"{' or '.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}"]


def _together(facts: Sequence[str]) -> str:
    """A fact of all runs; of more than a few different ones only how many there are.

    >>> _together(["cnn", "cnn", "mlp"]), _together(["2 rounds", "3 rounds", "4 rounds", "5 rounds"])
    ('cnn/mlp', '2 rounds and 3 others')
    """
    first, *others = dict.fromkeys(facts)
    return f"{first} and {len(others)} others" if len(others) >= FEW else "/".join([first, *others])


def _cards(groups: Sequence[Group], measure: str) -> list[dict[str, Any]]:
    cards: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        values = list(group.values(measure).values())
        if not values:
            continue
        found = estimate(values)
        traffic = [run.summary["upload_bytes"] + run.summary["download_bytes"] for run in group.runs]
        sure = found.interval if group.ended else None
        low, high = sure or (found.mean, found.mean)
        cards.append(
            {
                "number": number, "label": group.label, "value": percent(found.mean),
                "interval": _carried(found) if group.ended else _to_go(*group.runs),
                "traffic": quantity(fmean(traffic), "B"), "low": max(0.0, 100 * low), "high": min(100.0, 100 * high),
                "mean": 100 * found.mean,
            }
        )  # fmt: skip
    return sorted(cards, key=lambda card: -card["mean"])[:CARDS]


def _carried(found: Estimate) -> str:
    """The interval of a mean, or how few seeds there are."""
    few = "one seed" if found.seeds == 1 else f"{found.seeds} seeds, no interval"
    return few if found.interval is None else interval(found)


def _table(title: str, rows: Rows, corner: str = "method", note: str = "", shape: str = "") -> Table:
    heads = list(dict.fromkeys(head for row in rows.values() for head in row))
    body = [[name, *(row.get(head, "-") for head in heads)] for name, row in rows.items()]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([[corner, *(head.strip() for head in heads)], *body])
    return Table(title, [corner, *heads], body, file.getvalue(), _latex([corner, *heads], body), note, shape)


def _latex(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """For the booktabs package."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(_tex(cell.strip()) for cell in cells) + r" \\"

    head = rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}"
    return "\n".join(
        [head, r"\toprule", line(heads), r"\midrule", *map(line, body), r"\bottomrule", r"\end{tabular}", ""]
    )


def _tex(text: str) -> str:
    for plain, code in (("\\", r"\textbackslash{}"), ("&", r"\&"), ("%", r"\%"), ("_", r"\_"), ("#", r"\#"),
                        ("±", r"$\pm$"), ("…", r"\dots{}")):  # fmt: skip
        text = text.replace(plain, code)
    return text


def _spread(group: Group, measure: str) -> Spread | None:
    values = tuple(group.values(measure).values())
    return Spread(values) if values else None


def _accuracy(found: Spread | None) -> str:
    if found is None:
        return "-"
    return percent(found.mean) + ("" if found.deviation is None else f" ± {percent(found.deviation)}")


def _summary(groups: Sequence[Group], numbers: Mapping[str, Mapping[int, float]], baseline: str | None) -> Section:
    heads = {"global %": "global_accuracy", "local %": "local_accuracy", "worst %": "worst_local_accuracy",
             "best %": "best_global_accuracy"}  # fmt: skip
    rows: Rows = {}
    for group in groups:
        rows[group.label] = {head: _accuracy(_spread(group, measure)) for head, measure in heads.items()}
        rows[group.label]["seeds"] = str(len(group.runs))
        if not group.ended:
            rows[group.label]["state"] = _to_go(*group.runs)
    note = (
        "Mean and standard deviation over seeds after the last round. global: the server's model on the test set; "
        "local: the mean over clients of the model each really uses, on its own test part; worst: the worst tenth. "
        "Runs that have not ended count only where a method has no others."
    )
    tables = [_table("Accuracy", rows, note=note)]
    if keys := {group.label: {"differs in": group.key} for group in groups if group.key}:
        note = "Settings that are not those of most with the same name."
        tables.insert(0, _table("What the letters stand for", keys, note=note, shape="long"))
    if any(len(values) > 1 for values in numbers.values()):
        note = f"95 % intervals of the mean (Student), from {ENOUGH} seeds on, cut at what is possible."
        if baseline:
            note += f" Against {baseline}: paired t-test over common seeds, p-values with Holm's correction."
        tables.append(_table("What the seeds carry", statistics_table(numbers, baseline), note=note))
    return Section("summary", "Summary", "", tables, [])


def _curves(groups: Sequence[Group]) -> Section:
    figures = []
    for title, measure, unit, factor, top in (
        ("Global model, whole test set", "global_accuracy", "accuracy, %", 100, 100.0),
        ("Clients' own models, own test parts", "local_accuracy", "accuracy, %", 100, 100.0),
        ("Worst tenth of the clients", "worst_local_accuracy", "accuracy, %", 100, 100.0),
        ("Training loss", "train_loss", "loss", 1, None),
    ):
        series = [
            Series(group.label, number, [(x, *(factor * y for y in ys)) for x, *ys in group.curve(measure)])  # type: ignore[misc]
            for number, group in enumerate(groups)
        ]
        if picture := lines(series, "round", unit, title, top):
            figures.append(Figure(title, picture))
    bands = any(len(group.runs) > 1 for group in groups)
    lead = "Bands are one standard deviation over seeds to either side." if bands else ""
    return Section("curves", "Learning curves", lead, [], figures)


def _costs(groups: Sequence[Group], measure: str) -> Section:
    measures = dict(COST)
    costs: Rows = {
        group.label: {head: brief(_spread(group, name), scale) for head, (name, scale) in measures.items()}
        for group in groups
    }
    tables = [_table("Cost of the whole run", costs, note=(
        "Traffic and multiply-accumulates of training; virtual s is what the fleet's devices would have needed; "
        "s/round is real time here; params and MACs are means of what clients trained."
    ))]  # fmt: skip
    targets = {run.study.evaluate.target for group in groups for run in group.runs} - {None}
    if targets:
        rows: Rows = {}
        marks = aims({group.label: [run.summary for run in group.runs] for group in groups})
        for group in groups:
            reached = len(group.values("rounds_to_target"))
            spent = {head: brief(_spread(group, name), scale) for head, (name, scale) in UNTIL.items()}
            rows[group.label] = (
                marks.get(group.label, {}) | spent | {"runs that reached it": f"{reached} of {len(group.runs)}"}
            )
        said = " or ".join(f"{100 * target:g} %" for target in sorted(t for t in targets if t is not None))
        tables.append(_table(f"Until {said} accuracy", rows, note="Means over the runs that reached it."))
    figures = []
    for title, name, unit in (
        ("Accuracy against traffic", TRAFFIC, "bytes, up and down"),
        ("Accuracy against computing", "train_macs", "multiply-accumulates"),
        ("Accuracy against time", "virtual_seconds", "virtual seconds"),
    ):
        points = [point for n, group in enumerate(groups) if (point := _point(n, group, measure, name))]
        if picture := scatter(points, unit, "accuracy, %", title, 100.0):
            figures.append(Figure(title, picture))
    series = [
        Series(group.label, n, [(x, *(100 * y for y in ys)) for x, *ys in group.curve(measure, TRAFFIC)])  # type: ignore[misc]
        for n, group in enumerate(groups)
    ]
    if picture := lines(series, "bytes so far, up and down", "accuracy, %", "Accuracy as traffic grows", 100.0):
        figures.append(Figure("Accuracy as traffic grows", picture))
    lead = "The dashed line joins the methods that no other beats in both: more accuracy for less cost."
    return Section("costs", "Costs", lead if len(groups) > 1 else "", tables, figures)


def _point(number: int, group: Group, measure: str, cost: str) -> Point | None:
    values = [100 * value for value in group.values(measure).values()]
    if not values:
        return None
    spent = fmean(sum(run.summary[name] for name in cost.split("+")) for run in group.runs)
    found = Spread(tuple(values))
    half = found.deviation or 0.0
    label = group.label if group.ended else f"{group.label} (not finished)"
    return Point(label, number, spent, found.mean, found.mean - half, found.mean + half)


def _clients(groups: Sequence[Group]) -> Section | None:
    """How unequal the clients' results are."""
    series = []
    rows: Rows = {}
    for number, group in enumerate(groups):
        ranked = [sorted(run.accuracies().values()) for run in group.runs if run.accuracies()]
        if not ranked or len({len(each) for each in ranked}) > 1 or len(ranked[0]) < 2:
            continue
        grid = 100 * np.array(ranked)
        mean, half = grid.mean(0), grid.std(0, ddof=1) if len(grid) > 1 else np.zeros(grid.shape[1])
        places = np.linspace(0, grid.shape[1] - 1, min(grid.shape[1], 60)).astype(int)
        points = [(100 * (k + 0.5) / len(mean), mean[k], mean[k] - half[k], mean[k] + half[k]) for k in places]
        series.append(Series(group.label, number, [tuple(map(float, point)) for point in points]))  # type: ignore[misc]
        quarter = np.percentile(grid, [25, 50, 75], axis=1).mean(1)
        rows[group.label] = {
            "lowest %": f"{grid.min(1).mean():.2f}", "first quarter %": f"{quarter[0]:.2f}",
            "median %": f"{quarter[1]:.2f}", "third quarter %": f"{quarter[2]:.2f}",
            "highest %": f"{grid.max(1).mean():.2f}", "spread": f"{grid.std(1).mean():.2f}",
        }  # fmt: skip
    if not series:
        return None
    name = "Clients from worst to best"
    picture = lines(series, "share of clients, %", "own accuracy, %", name, 100.0)
    note = "Each client's own model on its own test part at the last evaluation; means over seeds of ranked clients."
    tables = [_table("Accuracy over clients", rows, note=note)]
    figures = [Figure(name, picture)]
    first = [group for group in groups if group.runs[0].accuracies() and len(group.runs[0].accuracies()) <= MOST]
    if first:
        known = sorted(set.intersection(*(set(group.runs[0].accuracies()) for group in first)))
        cells = [[100 * group.runs[0].accuracies()[client] for client in known] for group in first]
        seed = first[0].runs[0].seed
        names = [str(client) for client in known]
        picture = heat([group.label for group in first], cells, "Every client", show="{:.0f}".format, columns=names)
        figures.append(Figure("Every client's accuracy, %", picture, f"seed {seed}", wide=len(known) > 24))
    return Section("clients", "Clients", "", tables, figures)


def _data(run: Run) -> Section | None:
    split = run.split
    if split.labels is None:
        return None
    labels = split.labels[:, :MOST]
    cells = [[float(value) for value in row] for row in labels]
    clients = split.labels.shape[1]
    sizes = split.labels.sum(0)
    held = (split.labels > 0).sum(0)
    rows: Rows = {
        "training images": _five(sizes), "classes held": _five(held), "test images": _five(split.test.sizes),
    }  # fmt: skip
    note = f"seed {run.seed}" + ("" if clients <= MOST else f"; the first {MOST} of {clients:,} clients")
    picture = heat([f"class {number}" for number in range(len(cells))], cells, "Training images of each client")
    title = "Training images by class and client"
    return Section(
        "data", "Data", f"{run.study.data.name}, {run.study.partition.name}, dealt to {clients:,} clients.",
        [_table("Sizes", rows, "of a client")], [Figure(title, picture, note, wide=labels.shape[1] > 24)],
    )  # fmt: skip


def _five(values: np.ndarray) -> dict[str, str]:
    points = np.percentile(values, [0, 25, 50, 75, 100])
    return dict(
        zip(("least", "first quarter", "median", "third quarter", "most"), (f"{v:g}" for v in points), strict=True)
    )


def _submodels(groups: Sequence[Group]) -> Section | None:
    """What devices of each capacity trained and how they fared; only where capacities differ."""
    series, shown = [], {"Own accuracy %": Rows(), "Parameters of a task": Rows(), "MACs a sample": Rows()}
    for number, group in enumerate(groups):
        tiers = _tiers(group)
        for title, key, show in (
            ("Own accuracy %", "accuracy", "{:.2f}".format),
            ("Parameters of a task", "parameters", quantity),
            ("MACs a sample", "macs", quantity),
        ):
            for capacity, tier in sorted(tiers.items()):
                text = show(fmean(tier[key])) if key in tier else "-"
                shown[title].setdefault(group.label, {})[f"r = {capacity:g}"] = text
        points = [(capacity, fmean(tier["accuracy"])) for capacity, tier in sorted(tiers.items()) if "accuracy" in tier]
        series.append(Series(group.label, number, [(100 * capacity, y, y, y) for capacity, y in points]))
    if not any(shown.values()):
        return None
    name = "Accuracy by capacity of the device"
    figures = [Figure(name, lines(series, "capacity, % of the model's units", "own accuracy, %", name, 100.0))]
    tables = [_table(title, rows, note="Means over tasks, clients and seeds.") for title, rows in shown.items()]
    lead = "Devices differ in how much of the model they can train: a share r of its units."
    return Section("submodels", "Sub-models", lead, tables, figures)


def _tiers(group: Group) -> dict[float, dict[str, list[float]]]:
    """Numbers of tasks and clients by capacity; nothing where all devices are alike."""
    tiers: dict[float, dict[str, list[float]]] = {}
    for run in group.runs:
        capacity = run.columns.get("capacity")
        if capacity is None or len(set(capacity.tolist())) < 2:
            continue
        for entry in run.work():
            tier = tiers.setdefault(float(capacity[entry["client"]]), {})
            tier.setdefault("parameters", []).append(entry["parameters"])
            if entry.get("samples"):
                tier.setdefault("macs", []).append(entry["macs"] / entry["samples"] / 3)
        for client, accuracy in run.accuracies().items():
            tiers.setdefault(float(capacity[client]), {}).setdefault("accuracy", []).append(100 * accuracy)
    return tiers


def _selection(groups: Sequence[Group]) -> Section | None:
    """Who trained how often; only where not everybody trained in every round."""
    cells, names, rows = [], [], Rows()
    for group in groups:
        run = group.runs[0]
        times = Counter(entry["client"] for entry in run.work())
        clients = run.study.fleet.clients
        if all(times[client] == len(run.rows) for client in range(clients)):
            continue
        names.append(group.label)
        counts = [float(times[client]) for client in range(clients)]
        cells.append(counts[:MOST])
        known = np.sort(counts)
        never = int((known == 0).sum())
        rows[group.label] = _five(known) | {"never": str(never), "Gini": f"{_gini(known):.2f}"}
    if not cells:
        return None
    wide, seed = max(map(len, cells)) > 24, groups[0].runs[0].seed
    figure = Figure(
        "How often each client trained", heat(names, cells, "How often each client trained"), f"seed {seed}", wide
    )
    table = _table(
        "Rounds that a client trained in", rows, note="Gini: 0 if all trained equally often, 1 if one did all."
    )
    return Section("selection", "Selection", "", [table], [figure])


def _gini(ranked: np.ndarray) -> float:
    """0 for equal shares, towards 1 for one who has everything."""
    total = float(ranked.sum())
    places = np.arange(1, len(ranked) + 1)
    return float((2 * places - len(ranked) - 1) @ ranked) / (len(ranked) * total) if total else 0.0


def _trouble(groups: Sequence[Group]) -> Section | None:
    """Runs that did not end, and tasks that failed."""
    unfinished: Rows = {}
    failed: Rows = {}
    for group in groups:
        for run in group.runs:
            if run.state != "finished":
                place = f"{group.label}, seed {run.seed}"
                unfinished[place] = {"state": run.state, "rounds": f"{len(run.rows)} of {run.study.run.rounds}",
                                     "reason": run.failure or "-"}  # fmt: skip
        kinds = Counter(entry["failed"] for run in group.runs for entry in run.ledger if entry["failed"])
        if kinds:
            tasks = sum(1 for run in group.runs for entry in run.ledger if entry["job"] == "work")
            failed[group.label] = {"tasks": str(tasks), **{kind: str(count) for kind, count in kinds.items()}}
    tables = []
    if unfinished:
        tables.append(_table("Runs that are not finished", unfinished, "run", shape="long"))
    if failed:
        tables.append(_table("Tasks that failed", failed, note="A round goes on without them.", shape="long"))
    return Section("trouble", "Failures", "", tables, []) if tables else None


def _settings(groups: Sequence[Group]) -> Section:
    runs = [run for group in groups for run in group.runs]
    shared, own = common([group.runs[0].study for group in groups])
    values: Rows = {key: {"value": _plain(value)} for key, value in shared.items()}
    tables = [_table("What all runs share", values, "setting", shape="pairs")]
    keys = list(dict.fromkeys(key for each in own for key in each))
    if keys not in ([], ["method.name"]):
        rows = {g.label: {key: _plain(each.get(key, "-")) for key in keys} for g, each in zip(groups, own, strict=True)}
        tables.insert(0, _table("What sets them apart", rows, shape="long" if len(keys) <= NARROW else ""))
    made: Rows = {}
    for run in runs:
        for key, value in run.environment.items():
            known = made.setdefault(key, {"value": str(value)})
            if key != "started" and str(value) not in known["value"].split(", "):
                known["value"] += f", {value}"
            elif key == "started":
                known["value"] = min(known["value"], str(value))
    tables.append(_table("Versions and machine", made, "what", shape="pairs"))
    where: Rows = {
        str(run.store.folder): {"method": group.label, "seed": str(run.seed), "state": run.state}
        for group in groups
        for run in group.runs
    }
    tables.append(_table("Run folders", where, "folder", shape="long"))
    return Section("settings", "Settings", "", tables, [])


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
