"""How the training images are dealt to clients. A partition looks at labels and groups only, never at images.

- `classes` follows HeteroFL's shards (Diao et al., ICLR 2021) except that a client's classes are distinct: there,
  equal cards in a hand collapse, the client ends with fewer classes and some shards are used by nobody.
- `dirichlet` is the plain definition (Hsu et al., arXiv:1909.06335, as used by FedRKD): for each class a vector from
  Dir(alpha) over the clients. `dirichlet_balanced` has the clause of PFLlib, FedLab and PersonalizedFL: a client that
  already holds its even share of all samples gets no more. The two give different sizes.
- Both redraw until every client has `minimum` images. Others redraw for ever; here the number of draws is bounded and
  the error names settings that were tried and worked.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedloom.data.dataset import Dataset, Ints
from fedloom.data.rows import Rows
from fedloom.errors import InputError, choose
from fedloom.registry import entries, find, register
from fedloom.settings import built, parameters

__all__ = [
    "Classes",
    "Dirichlet",
    "DirichletBalanced",
    "Domain",
    "Iid",
    "Partition",
    "Quantity",
    "Rows",
    "Writer",
    "apportion",
    "parse",
]

Generator: TypeAlias = np.random.Generator
Minimum: TypeAlias = Annotated[int, "every client has at least this many images"]


class Partition(Protocol):
    """Deals the training images of a data set to clients."""

    def __call__(self, dataset: Dataset, clients: int, generator: Generator) -> Rows:
        """Disjoint row numbers of training images, one part per client."""


def parse(text: str) -> Partition:
    """Read `iid`, `classes:2` or `dirichlet:0.1`: what follows the colon is the partition's first setting.

    >>> parse("classes:2")
    Classes(per_client=2)
    """
    name, _, value = text.partition(":")
    if name not in entries("partition"):
        # Not a registered name: an import path has a colon of its own.
        module, _, rest = text.partition(":")
        attribute, _, value = rest.partition(":")
        if not attribute.isidentifier():  # `clases:2` is no path
            raise choose("partition", name, entries("partition"))
        name = f"{module}:{attribute}"
    make, what = find("partition", name), f"partition '{text}'"
    settings = list(parameters(what, make).values())
    if not value:
        missing = [setting.name for setting in settings if setting.default is setting.empty]
        if missing or text.endswith(":"):
            raise InputError(f"partition '{text}' needs a value after the colon: {(missing or [settings[0].name])[0]}")
        return typing.cast(Partition, built(what, make, {}))
    if not settings:
        raise InputError(f"partition '{text}': {name} takes no value; write '{name}'")
    first = settings[0].name
    return typing.cast(Partition, built(what, make, {first: _convert(text, value, first, make)}))


def _convert(text: str, value: str, setting: str, make: Any) -> Any:
    hint = typing.get_type_hints(make if inspect.isfunction(make) else make.__init__).get(setting, str)
    if hint not in (int, float):
        return value
    try:
        return hint(value)
    except ValueError:
        expected = "a whole number" if hint is int else "a number"
        raise InputError(f"partition '{text}': {setting} must be {expected}; got '{value}'") from None


def _at_least(partition: Any, setting: str, lowest: float) -> None:
    value = getattr(partition, setting)
    # Written so that NaN is refused too, and whole numbers of any size are compared.
    if not lowest <= value < inf:
        raise InputError(f"{setting} of a {type(partition).__name__} partition must be at least {lowest}; got {value}")


def _positive(partition: Any, setting: str) -> None:
    value = getattr(partition, setting)
    if not 0 < value < inf:
        raise InputError(f"{setting} of a {type(partition).__name__} partition must be above 0; got {value}")


def _enough(dataset: Dataset, clients: int, minimum: int = 1) -> None:
    if clients < 1:
        raise InputError(f"clients must be at least 1; got {clients}")
    each = max(1, minimum)
    if clients * each > dataset.trained:
        raise InputError(
            f"{dataset.trained} training images of '{dataset.name}' are too few to give {clients} clients {each} each; "
            f"at most {dataset.trained // each} clients"
        )


def apportion(weights: npt.NDArray[Any], total: int, generator: Generator) -> Ints:
    """Whole numbers in proportion to the weights that sum to `total` (largest remainder, ties at random).

    >>> apportion(np.array([1.0, 1.0, 2.0]), 8, np.random.default_rng(0)).tolist()
    [2, 2, 4]
    """
    exact = weights * (total / weights.sum())
    shares: Ints = np.floor(exact + 1e-9).astype(np.int64)
    left = total - int(shares.sum())
    shares[np.lexsort((generator.random(len(weights)), shares - exact))[:left]] += 1
    return shares


def _evenly(total: int, parts: int) -> Ints:
    return np.diff(np.arange(parts + 1) * total // parts)


@register("partition", "iid")
@dataclass(frozen=True)
class Iid:
    """Every client an equal random part."""

    def __call__(self, dataset: Dataset, clients: int, generator: Generator) -> Rows:
        """Shuffle, then cut into parts whose sizes differ by at most one."""
        _enough(dataset, clients)
        owner = np.repeat(np.arange(clients), _evenly(dataset.trained, clients))
        return Rows.owned(generator.permutation(owner), clients)


@register("partition", "classes", paper="Diao et al., HeteroFL, ICLR 2021 (there without the distinctness)")
@dataclass(frozen=True)
class Classes:
    """Every client exactly this many classes; each class in equal shards over its holders."""

    per_client: Annotated[int, "classes a client holds"] = 2

    def __post_init__(self) -> None:
        _at_least(self, "per_client", 1)

    def __call__(self, dataset: Dataset, clients: int, generator: Generator) -> Rows:
        """Deal hands of distinct classes, each class equally often, then cut each class for its holders."""
        _enough(dataset, clients)
        y = dataset.y[: dataset.trained]
        present, sizes = np.unique(y, return_counts=True)
        if self.per_client > len(present):
            raise InputError(
                f"per_client must be at most the {len(present)} classes of '{dataset.name}'; got {self.per_client}"
            )
        if clients * self.per_client < len(present):
            raise InputError(
                f"{clients} clients of {self.per_client} classes cannot cover the {len(present)} classes of "
                f"'{dataset.name}'; at least {-(-len(present) // self.per_client)} clients"
            )
        held = deal(clients, len(present), self.per_client, generator)
        owner = np.empty(len(y), np.int64)
        for column, label in enumerate(present):
            holders = generator.permutation(np.flatnonzero(held[:, column]))
            if len(holders) > sizes[column]:
                raise InputError(
                    f"class {dataset.class_names[label]} of '{dataset.name}' has {sizes[column]} training images for "
                    f"{len(holders)} clients that should hold it; take fewer clients or fewer classes a client"
                )
            shards = np.repeat(holders, _evenly(int(sizes[column]), len(holders)))
            owner[y == label] = generator.permutation(shards)
        return Rows.owned(owner, clients)


def deal(clients: int, classes: int, per_client: int, generator: Generator) -> npt.NDArray[np.bool_]:
    """Who holds which class: hands of distinct classes, every class held equally often (to within one)."""
    if per_client * 2 > classes and per_client <= classes:
        # Dealing what a client lacks is the same thing, and hands with few repeats are quick to mend.
        return (
            ~deal(clients, classes, classes - per_client, generator)
            if per_client < classes
            else np.ones((clients, classes), bool)
        )
    copies = generator.permutation(_evenly(clients * per_client, classes))
    cards = generator.permutation(np.repeat(np.arange(classes), copies)).reshape(clients, per_client)
    held = np.zeros((clients, classes), np.int32)
    np.add.at(held, (np.repeat(np.arange(clients), per_client), cards.ravel()), 1)
    # Swap cards between hands as long as repeats get fewer. A swap that helps always exists: a class has at most as
    # many cards as there are clients, so some hand lacks the repeated one and, if it offers nothing new, repeats too.
    for hand in np.flatnonzero((held > 1).any(axis=1)):
        for card in range(per_client):
            give = cards[hand, card]
            while held[hand, give] > 1:
                other, place = generator.integers(clients), generator.integers(per_client)
                take = cards[other, place]
                gained = 1 + int(held[other, take] > 1) - int(held[hand, take] > 0) - int(held[other, give] > 0)
                if other == hand or take == give or gained <= 0:
                    continue
                cards[hand, card], cards[other, place] = take, give
                held[hand, give] -= 1
                held[hand, take] += 1
                held[other, take] -= 1
                held[other, give] += 1
                give = take
    return held > 0


class _Drawn:
    """What the Dirichlet partitions share: draw shares, redraw up to a bound, say what would have worked."""

    alpha: float
    minimum: int

    def __post_init__(self) -> None:
        _positive(self, "alpha")
        _at_least(self, "minimum", 0)

    def __call__(self, dataset: Dataset, clients: int, generator: Generator) -> Rows:
        """Cut each class's shuffled images by the shares drawn."""
        _enough(dataset, clients, self.minimum)
        y = dataset.y[: dataset.trained]
        counts = np.bincount(y, minlength=dataset.classes)
        shares = self._shares(counts, clients, generator)
        if shares is None:
            raise InputError(self._advice(dataset.name, counts, clients, generator))
        owner = np.empty(len(y), np.int64)
        for label in range(dataset.classes):
            dealt = np.repeat(np.arange(clients), shares[label])
            owner[y == label] = generator.permutation(dealt)
        return Rows.owned(owner, clients)

    def _draw(self, counts: Ints, clients: int, generator: Generator) -> Ints:
        """(classes, clients) numbers of images."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it draws")

    def _shares(self, counts: Ints, clients: int, generator: Generator) -> Ints | None:
        for _ in range(self._draws(clients, len(counts))):
            shares = self._draw(counts, clients, generator)
            if shares.sum(axis=0).min() >= self.minimum:
                return shares
        return None

    @staticmethod
    def _draws(clients: int, classes: int) -> int:
        """How often to draw: a thousand times where that is cheap, ten where one draw takes a tenth of a second."""
        return int(np.clip(2_000_000 // (clients * classes), 10, 1000))

    def _advice(self, name: str, counts: Ints, clients: int, generator: Generator) -> str:
        works: list[str] = []
        for alpha in (self.alpha * 2.0**step for step in range(1, 14)):
            if self._changed(alpha, self.minimum)._shares(counts, clients, generator) is not None:
                works.append(f"alpha {alpha:g}")
                break
        fewer = clients // 2
        while fewer and self._shares(counts, fewer, generator) is None:
            fewer //= 2
        if fewer:
            works.append(f"{fewer} client{'s' if fewer > 1 else ''}")
        for minimum in (self.minimum // 2, 1, 0):
            if (
                minimum < self.minimum
                and self._changed(self.alpha, minimum)._shares(counts, clients, generator) is not None
            ):
                works.append(f"minimum {minimum}")
                break
        hint = f"; these were tried and work: {' or '.join(works)}" if works else ""
        return (
            f"{self._draws(clients, len(counts))} draws with alpha {self.alpha:g} did not give {clients} clients"
            f" at least {self.minimum} images of '{name}' each{hint}"
        )

    def _changed(self, alpha: float, minimum: int) -> _Drawn:
        return dataclasses.replace(self, alpha=alpha, minimum=minimum)  # type: ignore[type-var]


def _cut(shares: npt.NDArray[np.float64], total: int) -> Ints:
    """Whole numbers that sum to `total`, from the floors of the running sum of shares."""
    ends = np.floor(np.cumsum(shares) * total + 1e-9).astype(np.int64)
    ends[-1] = total
    return np.diff(np.minimum(ends, total), prepend=0)


@register("partition", "dirichlet", paper="Hsu et al., arXiv:1909.06335")
@dataclass(frozen=True)
class Dirichlet(_Drawn):
    """Label skew: each class is shared by a draw from Dir(alpha) over the clients; sizes differ."""

    alpha: Annotated[float, "small: a class goes to few clients; large: even"] = 0.5
    minimum: Minimum = 2

    def _draw(self, counts: Ints, clients: int, generator: Generator) -> Ints:
        weights = generator.dirichlet(np.full(clients, self.alpha), len(counts))
        return np.stack([_cut(share, int(total)) for share, total in zip(weights, counts, strict=True)])


@register("partition", "dirichlet_balanced", paper="Li et al., NIID-Bench, ICDE 2022; as in PFLlib and FedLab")
@dataclass(frozen=True)
class DirichletBalanced(_Drawn):
    """Label skew with sizes kept together: a client that has its even share of all images gets no more."""

    alpha: Annotated[float, "small: a class goes to few clients; large: even"] = 0.5
    minimum: Minimum = 10

    def _draw(self, counts: Ints, clients: int, generator: Generator) -> Ints:
        shares = np.zeros((len(counts), clients), np.int64)
        sizes = np.zeros(clients, np.int64)
        even = counts.sum() / clients
        for label, total in enumerate(counts):
            weights = generator.dirichlet(np.full(clients, self.alpha)) * (sizes < even)
            if weights.sum() == 0:  # all weight fell, to machine precision, on clients that are full
                weights = (sizes < even).astype(float) if total else np.ones(clients)
            shares[label] = _cut(weights / weights.sum(), int(total))
            sizes += shares[label]
        return shares


@register("partition", "quantity")
@dataclass(frozen=True)
class Quantity:
    """Size skew: random labels, sizes by a log-normal or a power law."""

    skew: Annotated[float, "sigma of the log-normal, or exponent of the power law; 0 is even"] = 1.0
    law: Literal["lognormal", "power"] = "lognormal"
    minimum: Minimum = 2

    def __post_init__(self) -> None:
        _at_least(self, "skew", 0)
        _at_least(self, "minimum", 1)
        if self.law not in ("lognormal", "power"):
            raise choose("law of a Quantity partition", self.law, ("lognormal", "power"))

    def __call__(self, dataset: Dataset, clients: int, generator: Generator) -> Rows:
        """Give each client the minimum, share the rest by the law."""
        _enough(dataset, clients, self.minimum)
        if self.law == "lognormal":
            logarithms = self.skew * generator.standard_normal(clients)
        else:
            logarithms = -self.skew * np.log1p(generator.permutation(clients))
        weights = np.exp(logarithms - logarithms.max())
        sizes = self.minimum + apportion(weights, dataset.trained - clients * self.minimum, generator)
        return Rows.owned(generator.permutation(np.repeat(np.arange(clients), sizes)), clients)


def _groups(dataset: Dataset, what: str) -> tuple[Ints, Ints]:
    if dataset.groups is None:
        raise InputError(
            f"data set '{dataset.name}' has no {what}s; a partition by {what} needs one that has, such as {_WITH[what]}"
        )
    groups = dataset.groups[: dataset.trained]
    return groups, np.unique(groups)


_WITH = {"domain": "digits_five, pacs or vlcs", "writer": "femnist"}


@register("partition", "domain", paper="Li et al., FedBN, ICLR 2021")
@dataclass(frozen=True)
class Domain:
    """Feature skew: every client one domain; with more clients than domains each domain is shared evenly."""

    by_group: ClassVar[bool] = True

    def __call__(self, dataset: Dataset, clients: int, generator: Generator) -> Rows:
        """Client i has domain i modulo the number of domains."""
        groups, present = _groups(dataset, "domain")
        if clients < 1 or clients % len(present):
            raise InputError(
                f"clients must be {len(present)}, the domains of '{dataset.name}', or a multiple of it; got {clients}"
            )
        owner = np.empty(len(groups), np.int64)
        for number, group in enumerate(present):
            members = np.arange(number, clients, len(present))
            size = int((groups == group).sum())
            if size < len(members):
                raise InputError(
                    f"domain {dataset.group_names[group]} has {size} training images for {len(members)} clients"
                )
            owner[groups == group] = generator.permutation(np.repeat(members, _evenly(size, len(members))))
        return Rows.owned(owner, clients)


@register("partition", "writer", paper="Caldas et al., LEAF, arXiv:1812.01097")
@dataclass(frozen=True)
class Writer:
    """Natural skew: every client one writer; with fewer clients than writers the first ones."""

    by_group: ClassVar[bool] = True

    def __call__(self, dataset: Dataset, clients: int, generator: Generator) -> Rows:
        """Client i is the i-th writer; the images of writers beyond the last client are unused."""
        groups, present = _groups(dataset, "writer")
        if not 1 <= clients <= len(present):
            raise InputError(
                f"clients must be between 1 and the {len(present)} writers of '{dataset.name}'; got {clients}"
            )
        place = np.searchsorted(present, groups)
        return Rows.owned(np.where(place < clients, place, -1), clients)
