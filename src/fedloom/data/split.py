"""The split of a study: train, validation and test rows of every client, and the server's public set.

It belongs to the study, not to the method: it depends on data set, partition, clients, seed and shares alone, and
every method trains on the same train part whether or not it uses the others. Public images are taken out first and
are in nobody's part. A client's test part is drawn from the data set's test set to match its label shares (where the
partition is by group: from its group's test images); without a test set it is a fifth of the client's own data.
PFLlib instead joins training and test data and cuts each client's part 75 / 25; `test = 0.25` does that on the
training data.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedloom.data.dataset import Dataset, Ints, stratified
from fedloom.data.partition import Partition, apportion, parse
from fedloom.data.rows import Rows
from fedloom.errors import InputError, kind_of

__all__ = ["Split", "split"]

OWN_TEST = 0.2
PARTS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers of the data set: three parts of every client, and the public rows."""

    train: Rows
    validation: Rows
    test: Rows
    public: Ints
    labels: Ints | None = None  # (classes, clients) numbers of training images, so that a split can be drawn anywhere

    def save(self, path: Path | str) -> None:
        """Write the row numbers (no images) as `.npz`."""
        arrays = {f"{part}_rows": getattr(self, part).rows for part in PARTS}
        arrays |= {f"{part}_offsets": getattr(self, part).offsets for part in PARTS}
        if self.labels is not None:
            arrays["labels"] = self.labels
        with open(path, "wb") as file:  # numpy would add a suffix to a bare path
            np.savez_compressed(file, public=self.public, **arrays)

    @classmethod
    def load(cls, path: Path | str) -> Split:
        """Read what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as file:
                parts = {part: Rows(file[f"{part}_rows"], file[f"{part}_offsets"]) for part in PARTS}
                labels = file.get("labels")  # splits of earlier versions have none
                return cls(**parts, public=file["public"], labels=labels)
        except FileNotFoundError:
            raise InputError(f"split file {path} does not exist") from None
        except (OSError, ValueError, EOFError, KeyError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{path} is damaged or not a saved split: {error}") from error


def split(
    dataset: Dataset,
    partition: Partition | str,
    clients: int,
    *,
    validation: float = 0.1,
    public: int = 0,
    seed: int = 0,
    test: float | None = None,
) -> Split:
    """Deal a data set to clients.

    `validation` and `test` are shares of the images a client is dealt; without `test` the data set's test set is
    used where there is one. `public` is a number of training images, stratified by class.
    """
    if not 0 <= validation < 1 or not 0 <= (test or 0) < 1 or validation + (test or 0) >= 1:
        raise InputError(
            f"validation and test must be shares that leave something to train on; got {validation} and {test}"
        )
    if not 0 <= public < dataset.trained:
        raise InputError(f"public must be between 0 and {dataset.trained - 1} training images; got {public}")
    if seed < 0:
        raise InputError(f"seed must be at least 0; got {seed}")
    deals = parse(partition) if isinstance(partition, str) else partition
    # One generator a purpose: another share of validation leaves the partition and the test parts as they are.
    for_public, for_partition, for_test, for_validation = (
        np.random.default_rng([seed, purpose]) for purpose in range(4)
    )

    held = stratified(dataset.y[: dataset.trained], public, for_public)
    rest = np.setdiff1d(dataset.train_rows, held, assume_unique=True)
    dealt = _sound(deals, deals(_labels(dataset, rest), clients, for_partition), clients, len(rest))
    dealt = Rows(rest[dealt.rows], dealt.offsets)

    by_group = bool(getattr(deals, "by_group", False))
    if test is None and len(dataset.test_rows):
        tested = _matched(dataset, dealt, by_group, for_test)
        kept = dealt
    else:
        tested, kept = _take(dealt, OWN_TEST if test is None else test, dealt.sizes, for_test)
    validated, train = _take(kept, validation, dealt.sizes, for_validation)
    cells = dataset.y[train.rows].astype(np.int64) * clients + train.owners
    labels = np.bincount(cells, minlength=dataset.classes * clients).reshape(dataset.classes, clients)
    return Split(train, validated, tested, held, labels)


def _sound(partition: Partition, dealt: Rows, clients: int, images: int) -> Rows:
    """What a partition dealt, if it is a part for every client and nobody's is another's: it may be a user's own."""
    name = f"{kind_of(partition)} partition"
    if not isinstance(dealt, Rows):
        raise InputError(f"{name} deals {kind_of(dealt)}; expected a fedloom.data.rows.Rows")
    if len(dealt) != clients:
        raise InputError(f"{name} deals {len(dealt)} parts; expected one for each of {clients} clients")
    rows = np.sort(dealt.rows)
    if len(rows) and (rows[0] < 0 or rows[-1] >= images or (rows[1:] == rows[:-1]).any()):
        raise InputError(f"{name} deals images twice or images that are not there; expected numbers below {images}")
    return dealt


def _labels(dataset: Dataset, rows: Ints) -> Dataset:
    """The data set of these training rows, without images: one black image stands for all and costs no memory."""
    return replace(
        dataset,
        x=np.broadcast_to(np.zeros((1, *dataset.x.shape[1:]), np.uint8), (len(rows), *dataset.x.shape[1:])),
        y=dataset.y[rows],
        trained=len(rows),
        groups=None if dataset.groups is None else dataset.groups[rows],
    )


def _take(dealt: Rows, share: float, of: Ints, generator: np.random.Generator) -> tuple[Rows, Rows]:
    """Take that share of `of` at random from every client: at least one image, but never its last one."""
    wanted = np.rint(share * of).astype(np.int64)
    wanted = np.minimum(np.maximum(wanted, 1 if share > 0 else 0), np.maximum(dealt.sizes - 1, 0))
    owners = dealt.owners
    order = np.lexsort((generator.random(len(owners)), owners))
    taken = np.empty(len(owners), bool)
    taken[order] = np.arange(len(owners)) - np.repeat(dealt.offsets[:-1], dealt.sizes) < np.repeat(wanted, dealt.sizes)
    parts = (Rows.owned(np.where(chosen, owners, -1), len(dealt), dealt.rows) for chosen in (taken, ~taken))
    return next(parts), next(parts)


def _matched(dataset: Dataset, dealt: Rows, by_group: bool, generator: np.random.Generator) -> Rows:
    """Share each class's (or group's) test images in proportion to the clients' training images of it."""
    strata = dataset.groups if by_group and dataset.groups is not None else dataset.y
    trained, rows, owners = strata[dealt.rows], dataset.test_rows, dealt.owners
    tested = strata[rows]
    owner = np.full(len(rows), -1)
    for stratum in np.unique(tested):
        weights = np.bincount(owners[trained == stratum], minlength=len(dealt))
        if weights.any():
            members = np.flatnonzero(tested == stratum)
            owner[generator.permutation(members)] = np.repeat(
                np.arange(len(dealt)), apportion(weights, len(members), generator)
            )
    matched = Rows.owned(owner, len(dealt), rows)
    without = np.flatnonzero(matched.sizes == 0)
    if not len(without):
        return matched
    # More clients than test images of their kind: these share an image, since none may be left untested.
    pairs, counts = np.unique(owners * (strata.max() + 1) + trained, return_counts=True)
    client, stratum = np.divmod(pairs, strata.max() + 1)
    most = np.full(len(dealt), -1)
    order = np.lexsort((counts, client))
    most[client[order]] = stratum[order]  # the last one written is the most frequent
    extra = generator.choice(rows, len(without))
    for stratum in np.unique(tested):
        alike = most[without] == stratum
        extra[alike] = generator.choice(rows[tested == stratum], int(alike.sum()))
    owners = np.concatenate([matched.owners, without])
    return Rows.owned(owners, len(dealt), np.concatenate([matched.rows, extra]))
