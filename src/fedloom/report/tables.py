"""Summaries as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fedloom.report.statistics import Estimate, against, estimate
from fedloom.runs.grid import Spread

if TYPE_CHECKING:
    from fedloom.runs.result import Result

__all__ = [
    "ACCURACY",
    "COST",
    "NAMES",
    "UNTIL",
    "Measures",
    "Rows",
    "aims",
    "brief",
    "interval",
    "markdown",
    "measure_of",
    "percent",
    "print_table",
    "quantity",
    "spread",
    "statistics_table",
    "summary_rows",
    "until",
]

NAMES = {"global_accuracy": "global accuracy", "local_accuracy": "local accuracy"}
Measures = dict[str, tuple[str, float]]  # head of a column -> number of the summary and its factor
ACCURACY: Measures = {
    "global %": ("global_accuracy", 100), "local %": ("local_accuracy", 100), "worst %": ("worst_local_accuracy", 100),
    "best %": ("best_global_accuracy", 100),
}  # fmt: skip
COST: Measures = {
    "up MB": ("upload_bytes", 1e-6), "down MB": ("download_bytes", 1e-6), "GMACs": ("train_macs", 1e-9),
    "virtual s": ("virtual_seconds", 1), "s/round": ("seconds_per_round", 1),
    "params k": ("mean_parameters", 1e-3), "MACs M": ("mean_forward_macs", 1e-6),
}  # fmt: skip
UNTIL: Measures = {
    "rounds": ("rounds_to_target", 1), "virtual s": ("virtual_seconds_to_target", 1), "MB": ("bytes_to_target", 1e-6),
    "GMACs": ("macs_to_target", 1e-9),
}  # fmt: skip
Rows = dict[str, dict[str, str]]  # name of a row -> head of a column -> what stands there


def percent(share: float | None) -> str:
    """An accuracy as a reader wants it; a dash where there is none."""
    return "-" if share is None else f"{100 * share:.2f}"


def quantity(number: float | None, unit: str = "") -> str:
    """A large number with a prefix.

    >>> quantity(1_637_844, "B")
    '1.64 MB'
    """
    if number is None:
        return "-"
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def until(summary: Mapping[str, Any]) -> str:
    """What a run spent until it reached its target accuracy, in a sentence.

    >>> spent = {"rounds_to_target": 7, "virtual_seconds_to_target": 41.5, "bytes_to_target": 3_000_000}
    >>> until({"target": 0.8, "target_measure": "local_accuracy"} | spent)
    'reached 80 % local accuracy after 7 rounds, 41.5 virtual seconds and 3 MB'
    """
    aim = f"{100 * summary['target']:g} % {_aim(summary)}"
    if summary["rounds_to_target"] is None:
        return f"never reached {aim}"
    rounds, seconds, spent = (summary[UNTIL[word][0]] for word in ("rounds", "virtual s", "MB"))
    return f"reached {aim} after {rounds} rounds, {quantity(seconds)} virtual seconds and {quantity(spent, 'B')}"


def aims(summaries: Mapping[str, Sequence[Mapping[str, Any]]]) -> Rows:
    """A column for a table of targets that says what each row's are about; none where all are about the same.

    >>> aims({"fedavg": [{"target_measure": "global_accuracy"}], "fedbn": [{"target_measure": "local_accuracy"}]})
    {'fedavg': {'target of': 'global accuracy'}, 'fedbn': {'target of': 'local accuracy'}}
    >>> aims({"fedavg": [{"target_measure": "global_accuracy"}], "heterofl": []})
    {}
    """
    found = {row: " or ".join(dict.fromkeys(map(_aim, each))) for row, each in summaries.items() if each}
    return {row: {"target of": measure} for row, measure in found.items()} if len(set(found.values())) > 1 else {}


def _aim(summary: Mapping[str, Any]) -> str:
    """Which accuracy a run's target is about; the summaries of earlier versions do not say."""
    return NAMES.get(summary.get("target_measure", ""), "accuracy")


def summary_rows(summaries: Sequence[Mapping[str, Any]]) -> Rows:
    """One row a method: last accuracies in percent, and what the whole run cost."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "global %": lambda row: percent(row["global_accuracy"]),
        "local %": lambda row: percent(row["local_accuracy"]),
        "worst %": lambda row: percent(row["worst_local_accuracy"]),
        "up MB": lambda row: f"{row['upload_bytes'] / 1e6:.3g}",
        "down MB": lambda row: f"{row['download_bytes'] / 1e6:.3g}",
        "GMACs": lambda row: f"{row['train_macs'] / 1e9:.3g}",
        "virtual s": lambda row: f"{row['virtual_seconds']:.3g}",
        "s/round": lambda row: f"{row['seconds_per_round']:.3g}",
        "failed": lambda row: str(row["failures"]),
    }
    if not any(row["failures"] for row in summaries):
        del columns["failed"]
    return {str(row["method"]): {head: show(row) for head, show in columns.items()} for row in summaries}


def spread(found: Spread | None, scale: float = 1.0) -> str:
    """Mean and standard deviation over seeds; of how many, where some runs do not have the number.

    >>> spread(Spread((0.5, 0.7)), 100), spread(Spread((12.0,), runs=3))
    ('60.00 ± 14.14', '12.00 (1 of 3)')
    """
    if found is None:
        return "-"
    digits = 2 if abs(found.mean * scale) < 1000 else 0
    mean = f"{found.mean * scale:.{digits}f}"
    some = f" ({len(found.values)} of {found.runs})" if found.runs > len(found.values) else ""
    return (mean if found.deviation is None else f"{mean} ± {found.deviation * scale:.{digits}f}") + some


def brief(found: Spread | None, scale: float = 1.0) -> str:
    """A mean in three digits, for costs, which hardly differ between seeds.

    >>> brief(Spread((1234.0, 1236.0))), brief(Spread((0.5, 0.7)), 0.1), brief(None)
    ('1235', '0.06', '-')
    """
    if found is None:
        return "-"
    mean = found.mean * scale
    some = f" ({len(found.values)} of {found.runs})" if found.runs > len(found.values) else ""
    return (f"{mean:.0f}" if abs(mean) >= 100 else f"{mean:.3g}") + some


def measure_of(results: Sequence[Result]) -> str:
    """What methods are judged by: the global model's accuracy, or the clients' own where some have no global model."""
    everywhere = all(result.summary.get("global_accuracy") is not None for result in results)
    return "global_accuracy" if everywhere else "local_accuracy"


def statistics_table(numbers: Mapping[str, Mapping[int, float]], baseline: str | None = None) -> Rows:
    """Means with their intervals, and against a baseline the differences with theirs and corrected p-values."""
    rows: Rows = {}
    for name, values in numbers.items():
        found = estimate(list(values.values())) if values else None
        rows[name] = {"mean %": "-" if found is None else percent(found.mean), "95 % interval": interval(found)}
    for each in against(numbers, baseline) if baseline else ():
        rows[each.one] |= {
            f"above {baseline}": f"{100 * each.estimate.mean:+.2f}",
            "its interval": interval(each.estimate, -1.0),
            "p (Holm)": "-" if each.corrected is None else f"{each.corrected:.3f}",
        }
    return rows


def interval(found: Estimate | None, least: float = 0.0) -> str:
    """An interval in percent, cut where no accuracy can be, or no difference of two, whose `least` is -1.

    >>> interval(Estimate(0.5, (0.42, 0.58), 3)), interval(Estimate(0.95, (0.86, 1.03), 3))
    ('42.00 to 58.00', '86.00 to 100.00 (cut)')
    """
    if found is None or found.interval is None:
        return "-"
    low, high = found.interval
    cut = " (cut)" if low < least or high > 1 else ""
    return f"{percent(max(low, least))} to {percent(min(high, 1.0))}{cut}"


def _heads(rows: Rows) -> list[str]:
    return list(dict.fromkeys(head for row in rows.values() for head in row))


def print_table(console: Console, corner: str, rows: Rows) -> None:
    """For the terminal; what is too wide for it goes on below, column by column."""
    heads = _heads(rows)
    while heads:
        fits = (n for n in range(len(heads), 1, -1) if _width(console, corner, rows, heads[:n]) <= console.width)
        count = next(fits, 1)
        console.print(rich_table(corner, rows, heads[:count]))
        heads = heads[count:]


def _width(console: Console, corner: str, rows: Rows, heads: Sequence[str]) -> int:
    return Measurement.get(console, console.options.update(max_width=1000), rich_table(corner, rows, heads)).maximum


def rich_table(corner: str, rows: Rows, heads: Sequence[str]) -> Table:
    """Some columns of a table; of what is still too wide, nothing is cut off."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(corner, overflow="fold")
    for head in heads:
        number = all(row.get(head, "-")[:1] in "-+0123456789" for row in rows.values())
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for name, row in rows.items():
        table.add_row(name, *(row.get(head, "-") for head in heads))
    return table


def markdown(corner: str, rows: Rows) -> str:
    """For documents."""
    heads = _heads(rows)
    lines = [f"| {' | '.join([corner, *heads])} |", f"|{'---|' * (len(heads) + 1)}"]
    lines += [f"| {' | '.join([name, *(row.get(head, '-') for head in heads)])} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"
