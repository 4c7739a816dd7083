"""Digits-Five: the same ten digits in five domains, the usual test of feature shift (Li et al., FedBN, ICLR 2021).

All images are 28x28 in colour (grey ones repeated). FedBN takes 743 images a domain; here every domain gives as many
training images as the smallest has, at most `per_domain`, and its whole test set.
"""

from __future__ import annotations

import string
from typing import Annotated

import numpy as np

from fedloom.data.dataset import HELD_OUT_SEED, Dataset, stratified
from fedloom.data.folders import mnist_m
from fedloom.data.idx import mnist
from fedloom.data.levels import count_levels
from fedloom.data.mat import svhn
from fedloom.data.render import synth_digits
from fedloom.data.usps import usps
from fedloom.errors import InputError, choose
from fedloom.registry import register

__all__ = ["digits_five"]

DOMAINS = {"mnist": mnist, "mnist_m": mnist_m, "svhn": svhn, "synth_digits": synth_digits, "usps": usps}
SIDE = 28


@register("dataset", "digits_five", paper="Li et al., FedBN, ICLR 2021")
def digits_five(
    per_domain: Annotated[int, "at most this many training images a domain"] = 4000,
    equal: Annotated[bool, "as many training images a domain as the smallest has"] = True,
    unseen: Annotated[str, "domains, joined by commas, that nobody trains on: only their test images are kept"] = "",
    size: Annotated[int, "pixels a side"] = SIDE,
) -> Dataset:
    """Digits-Five: MNIST, MNIST-M, SVHN, SynthDigits and USPS at 28x28 colour; groups are domains."""
    if per_domain < 1:
        raise InputError(f"per_domain of data set 'digits_five' must be at least 1; got {per_domain}")
    left_out = [name.strip() for name in unseen.split(",") if name.strip()]
    for name in left_out:
        if name not in DOMAINS:
            raise choose("domain of digits_five", name, DOMAINS)
    if len(set(left_out)) == len(DOMAINS):
        raise InputError("unseen of data set 'digits_five' names all domains; leave one to train on")
    parts = [make(size=size, limit=per_domain) for make in DOMAINS.values()]
    counts = [0 if name in left_out else part.trained for name, part in zip(DOMAINS, parts, strict=True)]
    if equal:
        smallest = min(filter(None, counts))
        counts = [min(count, smallest) for count in counts]
    generator = np.random.default_rng(HELD_OUT_SEED)
    rows = [stratified(part.y[: part.trained], count, generator) for part, count in zip(parts, counts, strict=True)]
    tests = [part.test_rows for part in parts]
    chosen = list(zip(parts, rows, strict=True)) + list(zip(parts, tests, strict=True))
    numbers = np.arange(len(parts))
    return Dataset(
        name="digits_five",
        x=np.concatenate([np.broadcast_to(part.x[of], (len(of), 3, size, size)) for part, of in chosen]),
        y=np.concatenate([part.y[of] for part, of in chosen]),
        trained=sum(counts),
        class_names=tuple(string.digits),
        groups=np.repeat(np.concatenate([numbers, numbers]), [len(of) for _, of in chosen]),
        group_names=tuple(DOMAINS),
        group_levels=np.stack([np.broadcast_to(count_levels(part.x[: part.trained]), (3, 256)) for part in parts]),
    )
