"""Oort: Lai et al., Efficient federated learning via guided participant selection, OSDI 2021, algorithm 1.

A tried client's utility is |B| sqrt(mean squared loss), cut off at a quantile and scaled to [0, 1], plus an allowance
sqrt(0.1 ln R / L) for not having been seen since round L; a client slower than the preferred time T counts
(T / t)^alpha of that. A share epsilon of the cohort, which falls each round, goes to clients that were never tried,
those with more data rather; the others are drawn by utility from those that reach `cut_off` of the last place's.
A pacer raises T when two windows of rounds show that utility no longer grows.

Deviations. T is a percentile of the known times, as in the authors' code. What a server does not know is not used: the
speed of untried clients. A client that was tried and only ever came too late has the mean utility and its time.
Where the code re-uses its last list of untried clients once there are none left, we take more of the tried ones.
Where epsilon k is not whole, chance rounds it, so that a small cohort explores too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le

from fedloom.fleet.fleet import Fleet
from fedloom.policies.select import Floats, Fraction, by_data, cohort_size, drawn, importance, rounded
from fedloom.registry import register
from fedloom.types import Server

__all__ = ["Oort"]


@register("select", "oort", paper="Lai et al., Oort, OSDI 2021")
@dataclass(frozen=True)
class Oort:
    """By utility (loss, data and speed of the last report), with a share of untried clients that falls."""

    fraction: Fraction = 1.0
    exploration: Annotated[float, Ge(0), Le(1), "share of untried clients at first, epsilon"] = 0.9
    exploration_decay: Annotated[float, Gt(0), Le(1), "what it is multiplied with each round"] = 0.98
    exploration_least: Annotated[float, Ge(0), Le(1), "what it falls to"] = 0.2
    penalty: Annotated[float, Ge(0), "exponent for slow clients, alpha"] = 2.0
    clip: Annotated[float, Gt(0), Le(1), "quantile of utilities above which they count as this"] = 0.95
    cut_off: Annotated[float, Ge(0), Le(1), "share of the last place's utility that lets others in, c"] = 0.95
    preferred: Annotated[float, Gt(0), Le(100), "percentile of known times that is fast enough at first"] = 30.0
    pace: Annotated[float, Ge(0), "percentiles that the pacer adds"] = 5.0
    window: Annotated[int, Ge(1), "rounds that the pacer compares"] = 20

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """Explore, exploit, and remember what utility was reached."""
        percentile = self._paced(fleet, server)
        size, here, tried = cohort_size(self.fraction, fleet), fleet.available, fleet.columns["asked"] >= 0
        known, new = here[tried[here]], here[~tried[here]]
        share = max(self.exploration * self.exploration_decay**fleet.round, self.exploration_least)
        # A generator of its own, so that whole numbers of explored clients leave the draws of who trains as they are.
        wanted = rounded(size * share, fleet.generator("select how many untried"))
        explored = min(len(new), max(wanted, size - len(known)))
        generator = fleet.generator("select")
        fresh = drawn(generator, new, explored, by_data(fleet, new))
        score = self.score(fleet, percentile)[known]
        count = size - explored
        if count:
            last = np.partition(score, len(score) - count)[len(score) - count]
            admitted = score >= self.cut_off * last
            known, score = known[admitted], score[admitted]
        return np.sort(np.concatenate([fresh, drawn(generator, known, count, np.log(score))]))

    def score(self, fleet: Fleet, percentile: float) -> Floats:
        """Utility of every client; only those of tried ones mean something."""
        seconds, tried = fleet.columns["seconds"], fleet.columns["asked"] >= 0
        # Rounds count from 1 here; the logarithm of the first is 0, and nobody was tried before it.
        seen = np.maximum(fleet.columns["asked"], 0) + 1
        score: Floats = self._gain(importance(fleet), tried) + np.sqrt(0.1 * np.log(fleet.round + 1) / seen)
        if np.isnan(seconds).all() or percentile >= 100:
            return score
        enough = np.nanpercentile(seconds, percentile)
        slow = seconds > enough
        score[slow] *= (enough / seconds[slow]) ** self.penalty
        return score

    def _gain(self, utility: Floats, tried: np.ndarray) -> Floats:
        """Utilities over [0, 1], from the smallest of the tried clients to the quantile that caps them."""
        known = utility[tried & ~np.isnan(utility)]
        if not len(known):
            return np.zeros(len(utility))
        low, cap = known.min(), np.quantile(known, self.clip)
        filled = np.where(np.isnan(utility), known.mean(), utility)
        return np.clip((filled - low) / (cap - low), 0, 1) if cap > low else np.zeros(len(utility))

    def _paced(self, fleet: Fleet, server: Server) -> float:
        """The percentile of this round; the last round's utility and the percentile go to the server's memory."""
        memory: dict[str, Any] = server.memory.get("select", {"gained": [], "percentile": self.preferred})
        percentile, gained = float(memory["percentile"]), list(memory["gained"])
        if fleet.round:
            just = fleet.columns["round"] == fleet.round - 1
            gained.append(float(np.nansum(importance(fleet)[just])))
        if len(gained) == 2 * self.window:
            if sum(gained[: self.window]) > sum(gained[self.window :]):
                percentile = min(percentile + self.pace, 100.0)
            gained = gained[self.window :]
        server.memory["select"] = {"gained": gained, "percentile": percentile}
        return percentile
