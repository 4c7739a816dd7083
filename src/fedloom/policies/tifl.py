"""TiFL: Chai et al., A tier-based federated learning system, HPDC 2020, algorithm 2.

Clients are sorted by how long their last work took and cut into tiers of equal size; each round trains clients of one
tier, so nobody waits for somebody much slower. Every `interval` rounds, if the tier just used has not become better,
the tiers' chances are set anew: the worse a tier, the likelier. A tier has `credits`, one a choice.

Deviations. The paper times all clients before it begins; here nothing extra is computed: whoever was never asked goes
first, and tiers begin once everybody was asked. The paper goes by the test accuracy of each tier's clients, which costs
messages (`judge = "accuracy"`); by default the training loss of the last reports stands for it. Chances are by rank,
n - i of n (n + 1) / 2, as re-implementations have it. A tier with too few clients is filled up with the nearest ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from fedloom.fleet.fleet import Fleet
from fedloom.fleet.nonsense import Form
from fedloom.policies.select import Floats, Fraction, cohort_size, without
from fedloom.registry import register
from fedloom.types import Server

__all__ = ["TiFL"]


@register("select", "tifl", paper="Chai et al., TiFL, HPDC 2020")
@dataclass(frozen=True)
class TiFL:
    """Clients of one speed at a time; slow learners among the tiers more often."""

    fraction: Fraction = 1.0
    tiers: Annotated[int, Ge(1), "how many tiers"] = 5
    interval: Annotated[int, Ge(1), "rounds after which the chances of tiers may change, I"] = 10
    credits: Annotated[int, Ge(1), "how often a tier may be chosen while another has credits"] | None = None
    judge: Annotated[Literal["loss", "accuracy"], "what says how well a tier does; accuracy is asked for"] = "loss"

    def __call__(self, fleet: Fleet, server: Server) -> np.ndarray:
        """Get to know everybody, then one tier a round."""
        size, here, generator = cohort_size(self.fraction, fleet), fleet.available, fleet.generator("select")
        seconds = fleet.columns["seconds"]
        unseen = here[fleet.columns["asked"][here] < 0]
        if len(unseen) or np.isnan(seconds).all():
            first = generator.permutation(unseen)[:size]
            others = without(here, first, fleet.size)
            return np.sort(np.concatenate([first, generator.choice(others, size - len(first), replace=False)]))
        # Who was asked and never answered is as slow as can be; who is left out of the run is in no tier that counts.
        times = np.where(np.isnan(seconds), np.inf, seconds)
        known = np.flatnonzero(fleet.columns["asked"] >= 0)
        tier_of = np.full(fleet.size, self.tiers - 1)
        tier = np.arange(len(known)) * self.tiers // len(known)
        tier_of[known[np.argpartition(times[known], np.flatnonzero(np.diff(tier, prepend=-1)))]] = tier
        chosen = self._tier(fleet, server, tier_of, generator)
        return self._fill(here, tier_of, chosen, times, size, generator)

    def _tier(self, fleet: Fleet, server: Server, tier_of: np.ndarray, generator: np.random.Generator) -> int:
        """This round's tier, by the chances and credits in the server's memory."""
        memory: dict[str, Any] = dict(server.memory.get("select", {}))
        number = self.tiers
        chances = np.asarray(memory.get("chances", [1 / number] * number))
        spent = list(memory.get("spent", [0] * number))
        used = sum(spent)
        if used and used % self.interval == 0:
            merits = self._merits(fleet, server, tier_of, number)
            before, last = memory.get("merits"), int(memory["tier"])
            if before is not None and merits[last] <= before[last]:
                rank = np.argsort(np.argsort(merits, kind="stable"), kind="stable")
                chances = (number - rank) / (number * (number + 1) / 2)
            memory["merits"] = merits.tolist()
        here = np.bincount(tier_of[fleet.available], minlength=number) > 0
        left = here if self.credits is None else here & (np.asarray(spent) < self.credits)
        open_now = np.where(left if left.any() else here, chances, 0.0)
        tier = int(generator.choice(number, p=open_now / open_now.sum()))
        spent[tier] += 1
        server.memory["select"] = memory | {"chances": chances.tolist(), "spent": spent, "tier": tier}
        return tier

    def _merits(self, fleet: Fleet, server: Server, tier_of: np.ndarray, number: int) -> Floats:
        """How well each tier does: mean accuracy, or mean training loss turned round; unknown counts as worst."""
        merit = -fleet.columns["loss"]
        if self.judge == "accuracy":
            merit = np.full(fleet.size, np.nan)
            shown = fleet.show(fleet.completed(server), fleet.available)
            for report in fleet.ask("evaluate", shown, Form({"accuracy": 0.0})):
                merit[report.client] = report.numbers["accuracy"]
        known = ~np.isnan(merit)
        count = np.bincount(tier_of[known], minlength=number)
        total = np.bincount(tier_of[known], weights=merit[known], minlength=number)
        return np.where(count > 0, total / np.maximum(count, 1), -np.inf)

    def _fill(
        self, here: np.ndarray, tier_of: np.ndarray, tier: int, times: Floats, size: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Clients of the tier at random; if they do not suffice, those of the others whose times are nearest."""
        own = here[tier_of[here] == tier]
        if len(own) >= size:
            return np.sort(generator.choice(own, size, replace=False))
        others = here[tier_of[here] != tier]
        away = np.abs(tier_of[others] - tier)
        nearest = others[np.lexsort((times[others], away))[: size - len(own)]]
        return np.sort(np.concatenate([own, nearest]))
