"""What a search for a structure is worth: the structure it finds, trained anew, beside structures drawn at random.

python bench/search.py fedea digits 5 8 10     method, data set, seeds; population and generations (8 and 10)
python bench/search.py fednas mnist 5

FedEA and its random twin judge equally many structures for equally many rounds and have their first generation in
common. They are compared by what they look for, small errors at small sizes: the share of the square (error, parameters
of the whole model, both from 0 to 1) that their front dominates. It is taken twice: with the errors on validation
images by which the search went, and with those on the test set of every structure of the front trained anew. The most
accurate structure of each on validation images, trained anew, is told too. FedNAS searches by gradients; the structure
it finds is trained anew beside random structures, each for the same rounds. Every line is one seed: split, fleet and
draws are the same for all that is compared in it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

import numpy as np
from pymoo.indicators.hv import HV

import fedloom
from fedloom.models.resolve import build
from fedloom.runs.grid import merged

LIMIT = {"digits": 1200, "mnist": 1000}
RATE = 0.05
ROUNDS = 20  # of the structure that was found, and of random ones
RANDOM = 4  # structures drawn at random beside FedNAS
ALPHA = 0.01  # in about a hundred steps the paper's rate of 0.0003 leaves all operations with equal shares
EACH = 10  # rounds that judge a structure of FedEA
NARROW = "lenet5"  # without batch norm: means of its statistics over skewed clients jump
SIDE = {"digits": 8, "mnist": 12}  # pixels: a CPU has to do
SPACE = {"width": 8, "cells": 5, "nodes": 2}  # with fewer cells most of them reduce
Sections = Mapping[str, Any]


def run(data: str, seed: int, *sections: Sections) -> Mapping[str, Any]:
    """The summary of one run of the common set-up with these sections on top."""
    study: dict[str, Any] = {
        "method": {"name": "fedavg"},
        "data": {"name": data, "limit": LIMIT[data], "size": SIDE[data], "validation": 0.3},
        "partition": {"name": "dirichlet:0.5"},
        "fleet": {"clients": 5},
        "train": {"lr": RATE, "batch_size": 64},
        "engine": {"name": "local"},
        "evaluate": {"every": ROUNDS},
        "run": {"seed": seed, "rounds": ROUNDS},
    }
    for each in sections:
        study = merged(study, each)
    with tempfile.TemporaryDirectory() as folder:
        return fedloom.run(study=merged(study, {"run": {"out": folder}})).summary


def say(seed: int, what: str, found: Mapping[str, Any], note: str = "") -> float:
    """A line of the table; gives the accuracy."""
    cells = [seed, what, f"{100 * found['global_accuracy']:.1f}", f"{found['last_parameters'] / 1e3:.1f}",
             f"{found['last_forward_macs'] / 1e6:.2f}", f"{found['train_macs'] / 1e9:.0f}", note]  # fmt: skip
    sys.stdout.write("| " + " | ".join(map(str, cells)) + " |\n")
    sys.stdout.flush()
    return float(found["global_accuracy"])


def dominated(goals: Iterable[tuple[float, float]]) -> float:
    """The share of the square from 0 to 1 that is worse than somebody in both goals."""
    return float(HV(ref_point=np.ones(2))(np.array(list(goals))))


def fedea(data: str, seed: int, population: int = 8, generations: int = 10) -> dict[str, float]:
    """NSGA-II and random search over the widths of one network."""
    scores, train = {}, {"train": {"momentum": 0.9, "epochs": 5}}
    whole = sum(each.numel() for each in build(NARROW, channels=1, classes=10, size=SIDE[data]).parameters())
    for search in ("nsga2", "random"):
        method = {"name": "fedea", "population": population, "rounds_each": EACH, "search": search}
        rounds = {"rounds": EACH * generations}
        front = run(data, seed, train, {"method": method, "model": {"name": NARROW}, "run": rounds})["found"]["front"]
        anew = []
        for each in front:
            model = {"name": "narrowed", "of": NARROW, "rates": each["rates"]}
            anew.append(run(data, seed, train, {"model": model, "train": {"lr": RATE * each["lr_factor"]}}))
        areas = {
            "judged": dominated((each["error"], each["parameters"] / whole) for each in front),
            "tested": dominated((1 - each["global_accuracy"], each["last_parameters"] / whole) for each in anew),
        }
        best = min(range(len(front)), key=lambda number: (front[number]["error"], front[number]["parameters"]))
        note = f"front of {len(front)}: " + ", ".join(f"{100 * area:.1f} % {how}" for how, area in areas.items())
        scores[f"{search}, most accurate"] = say(seed, f"FedEA, {search}", anew[best], note)
        scores |= {f"{search}, area {how}": area for how, area in areas.items()}
    return scores


def fednas(data: str, seed: int) -> dict[str, float]:
    """A DARTS search, its structure, and structures drawn at random."""
    sgd = {"train": {"batch_size": 32, "momentum": 0.9, "weight_decay": 3e-4, "clip": 5.0}}
    search = {"method": {"name": "fednas", "alpha_lr": ALPHA}, "model": {"name": "darts_search", **SPACE}}
    searched = run(data, seed, sgd, search)
    say(seed, "the search itself", searched)
    found = searched["found"]
    model = {"name": "darts", **SPACE, "normal": found["normal"], "reduce": found["reduce"]}
    scores = {"found": say(seed, "its structure", run(data, seed, sgd, {"model": model}))}
    others = []
    for number in range(RANDOM):
        model = {"name": "darts", **SPACE, "drawn": RANDOM * seed + number}
        others.append(say(seed, f"random structure {number + 1}", run(data, seed, sgd, {"model": model})))
    return scores | {"random, mean": fmean(others), "random, best": max(others)}


if __name__ == "__main__":
    (kind, data), (seeds, *budget) = sys.argv[1:3], map(int, sys.argv[3:])
    heads = ("seed", "what", "accuracy %", "k parameters", "M MACs", "GMACs of the run", "")
    sys.stdout.write(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|\n")
    scores = [{"fedea": fedea, "fednas": fednas}[kind](data, seed, *budget) for seed in range(seeds)]
    for name in scores[0]:
        sys.stdout.write(f"{name}: {100 * fmean(each[name] for each in scores):.1f} % over {seeds} seeds\n")
