"""What a few seeds can carry: means with intervals, paired tests, and a winner only where there is one.

Runs of the same seed share split, fleet and draws, so methods are compared seed by seed: the paired t-test, two-sided,
with Holm's correction for all comparisons of one question. It assumes that differences between methods scatter normally
over seeds, which a handful of seeds can neither confirm nor refute; so below three common seeds nothing is tested, no
interval is given, and differences that are all exactly equal are not taken for infinite evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, isnan, sqrt
from statistics import fmean, stdev

__all__ = ["ENOUGH", "LEVEL", "Difference", "Estimate", "against", "compare", "estimate", "holm", "verdict"]

ENOUGH = 3  # (common) seeds below which nothing is tested, and no interval given
LEVEL = 0.05
BySeed = Mapping[int, float]  # seed -> a number of its run


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and the interval that holds the true one with 95 % confidence; None with too few seeds."""

    mean: float
    interval: tuple[float, float] | None
    seeds: int


@dataclass(frozen=True)
class Difference:
    """How far `one` is above `other` over their common seeds; `p` is None where no test is possible."""

    one: str
    other: str
    estimate: Estimate
    p: float | None
    corrected: float | None = None

    @property
    def carried(self) -> bool:
        """Whether the statistics carry that the two differ."""
        return self.corrected is not None and self.corrected < LEVEL


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Mean and Student's interval.

    >>> [round(end, 3) for end in estimate([1.0, 2.0, 3.0]).interval]  # 2 -+ 4.303 / sqrt(3)
    [-0.484, 4.484]
    """
    mean = fmean(values)
    if len(values) < ENOUGH:
        return Estimate(mean, None, len(values))
    from scipy.stats import t

    half = float(t.ppf(1 - level / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return Estimate(mean, (mean - half, mean + half), len(values))


def holm(ps: Sequence[float]) -> list[float]:
    """P-values corrected for being several (Holm, 1979), in the given order.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected, floor = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        floor = max(floor, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = floor
    return corrected


def _paired(one: str, other: str, first: BySeed, second: BySeed) -> Difference | None:
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    differences = [first[seed] - second[seed] for seed in common]
    return Difference(one, other, estimate(differences), _p(differences))


def _p(differences: Sequence[float]) -> float | None:
    """Two-sided p-value of a mean difference of zero."""
    if len(differences) < ENOUGH:
        return None
    deviation = stdev(differences)
    if deviation <= 1e-12 * max(map(abs, differences)):  # all equal but for rounding
        return 1.0 if max(map(abs, differences)) == 0 else None
    from scipy.stats import t

    statistic = fmean(differences) / deviation * sqrt(len(differences))
    return float(2 * t.sf(abs(statistic), len(differences) - 1))


def _corrected(found: Sequence[Difference | None]) -> list[Difference]:
    known = [each for each in found if each is not None]
    tested = [each for each in known if each.p is not None]
    ps = dict(zip(map(id, tested), holm([each.p or 0.0 for each in tested]), strict=True))
    return [replace(each, corrected=ps.get(id(each))) for each in known]


def against(numbers: Mapping[str, BySeed], baseline: str) -> list[Difference]:
    """Every method against the baseline, corrected for as many tests as there are."""
    others = [name for name in numbers if name != baseline]
    return _corrected([_paired(name, baseline, numbers[name], numbers[baseline]) for name in others])


def compare(numbers: Mapping[str, BySeed]) -> list[Difference]:
    """Every pair of methods, corrected for all pairs: which one is best is asked after seeing them all."""
    return _corrected([_paired(a, b, numbers[a], numbers[b]) for a, b in combinations(numbers, 2)])


def verdict(numbers: Mapping[str, BySeed], what: str = "accuracy") -> tuple[str | None, str]:
    """The winner, if the statistics carry one, and a sentence that says so or why not.

    Best, rivals and tests are all over the seeds that every method has: a method is not the best for having been run
    with kinder seeds, and whoever has the best mean over the same seeds is above its rivals, never below.
    """
    known = {name: values for name, values in numbers.items() if values}
    if len(known) < 2:
        return None, "no winner: there is nothing to compare with"
    seeds = sorted(set.intersection(*(set(values) for values in known.values())))
    if len(seeds) < ENOUGH:
        return (
            None,
            f"no winner: {len(seeds)} seed(s) in common cannot tell methods from luck; use --seeds {ENOUGH} at least, "
            "better 5",
        )
    shared = {name: {seed: values[seed] for seed in seeds} for name, values in known.items()}
    pairs = compare(shared)
    best = max(shared, key=lambda name: fmean(shared[name].values()))
    rivals = [each for each in pairs if best in (each.one, each.other)]
    worst = max((inf if each.corrected is None else each.corrected for each in rivals), default=inf)
    test = f"paired t-test over {len(seeds)} seeds in common"
    if len(pairs) > 1:
        test += f", Holm's correction for {len(pairs)} pairs"
    if worst < LEVEL:
        return best, f"{best} has the best {what}: above every other method, p <= {_short(worst)} ({test})"
    level = [each.other if each.one == best else each.one for each in rivals if not each.carried]
    named = ", ".join(level)
    return (
        None,
        f"no winner in {what}: {best} has the best mean, but seeds differ too much to put it above {named} ({test})",
    )


def _short(p: float) -> str:
    return "0.001" if p < 0.001 or isnan(p) else f"{p:.2g}"
