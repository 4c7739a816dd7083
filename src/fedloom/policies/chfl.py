"""ChFL: choose clients by the quality of their local models (a paper in Chinese; its equations in brackets).

Indicators of a client's last participation are scaled to [0, 1] over the clients that have one (27) and joined by
importance: F = phi_1 + phi_1 phi_2 + ... (28, 29). Of the k clients of a round a share is drawn without replacement in
proportion to exp(eta F) (35), the rest uniformly from the others.

Deviations. The text wants fast clients but (27) rewards a long time: we turn the time round; `time_sense = as_printed`
is the formula. The share is `scored_share` (section 3.3; section 4.2.3 reads alpha the other way round). Eta is a
sharpness of its own: the paper's algorithm uses the letter for the learning rate. A client that was never seen has
1 for every indicator that is missing, so it is explored. Indicators that are all equal are 0. Where scored_share k is
not whole, chance rounds it, so that k = 1 knows shares too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le, MinLen

from fedloom.fleet.fleet import Fleet
from fedloom.policies.select import Floats, Fraction, cohort_size, drawn, importance, rounded, without
from fedloom.registry import register
from fedloom.types import Server

__all__ = ["ChFL", "quality", "scaled"]

Indicator = Literal["loss", "time", "samples", "capacity", "waiting"]


def scaled(values: Floats) -> Floats:
    """Values over [0, 1] from the smallest to the largest that is known; 0 if all are equal, 1 where one is missing.

    >>> scaled(np.array([2.0, 6.0, np.nan, 3.0])).tolist()
    [0.0, 1.0, 1.0, 0.25]
    """
    low, high = np.fmin.reduce(values), np.fmax.reduce(values)  # of those that are known
    phi: Floats = values - low
    if high > low:
        phi /= high - low
    phi[np.isnan(phi)] = 1.0
    return phi


def quality(indicators: Sequence[Floats]) -> Floats:
    """F = sum of lambda_i phi_i with lambda_1 = 1 and lambda_i = lambda_(i-1) phi_(i-1) (29).

    >>> quality([np.array([0.5, 1.0]), np.array([0.5, 0.25])]).tolist()
    [0.75, 1.25]
    """
    weight = total = indicators[0]
    for phi in indicators[1:]:
        weight = weight * phi
        total = total + weight
    return total


@register("select", "chfl", paper="ChFL (selection by local model quality)")
@dataclass(frozen=True)
class ChFL:
    """A share of the cohort by loss and speed of the last reports, the rest at random."""

    fraction: Fraction = 1.0
    scored_share: Annotated[float, Ge(0), Le(1), "share of the cohort that is drawn by quality, alpha"] = 0.4
    eta: Annotated[float, Ge(0), "sharpness: 0 draws uniformly, large takes the best"] = 1.0
    indicators: Annotated[tuple[Indicator, ...], MinLen(1), "what quality is made of, most important first"] = (
        "loss",
        "time",
    )
    time_sense: Annotated[Literal["fast_first", "as_printed"], "which way a short time counts"] = "fast_first"

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """Some by quality, then some of the others by chance."""
        size, scored = cohort_size(self.fraction, fleet), fleet.generator("select by quality")
        count = rounded(self.scored_share * size, scored)
        best = drawn(scored, fleet.available, count, self.eta * self.score(fleet)[fleet.available])
        others = without(fleet.available, best, fleet.size)
        # As `uniform` draws, so that a share of 0 is that rule.
        rest = fleet.generator("select").choice(others, size - count, replace=False)
        return np.sort(np.concatenate([best, rest]))

    def score(self, fleet: Fleet) -> Floats:
        """F of every client."""
        return quality([self._indicator(name, fleet) for name in self.indicators])

    def _indicator(self, name: Indicator, fleet: Fleet) -> Floats:
        columns = fleet.columns
        if name == "time":
            sign = 1.0 if self.time_sense == "as_printed" else -1.0
            return scaled(sign * columns["seconds"])
        if name == "loss":
            return scaled(importance(fleet))
        if name == "waiting":
            return scaled((fleet.round - columns["asked"]).astype(np.float64))
        return scaled(columns[name])
