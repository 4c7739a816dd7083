"""The same through fedloom's ordinary machinery: a study with data of one's own, engine and trainer as it chooses."""

import tempfile

import numpy as np
from workload import RATE, WORKS, Clock, begin, pictures

import fedloom
from fedloom.data.dataset import Dataset


def images(work: str) -> Dataset:
    """The pictures as a data set; a test picture a client, since every study has a test set."""
    x, y = pictures(WORKS[work])
    few = np.arange(WORKS[work].clients)
    both = np.concatenate([x, x[few]]), np.concatenate([y, y[few]])
    return Dataset("pictures", *both, trained=len(y), class_names=tuple("0123456789"))


def study(given, out: str) -> dict:
    """One round more than asked for: the last one evaluates, and its time is left out."""
    work = WORKS[given.work]
    return {
        "method": {"name": "fedavg"},
        "data": {"name": "with_fedloom:images", "work": given.work, "validation": 0.0, "normalise": "fixed"},
        "model": {"name": work.model},
        "fleet": {"clients": work.clients},
        "select": {"name": "uniform", "fraction": work.cohort / work.clients},
        "train": {"lr": RATE, "batch_size": work.batch},
        "evaluate": {"every": given.rounds + 1},
        "engine": {"device": given.device},
        "run": {"rounds": given.rounds + 1, "checkpoint_every": given.rounds + 1, "out": out},
    }


if __name__ == "__main__":
    given = begin()
    clock = Clock(given)

    def watch(row):
        """Sees every round as it ends."""
        if row["round"] <= given.rounds:
            clock.lap()
        if row["round"] == given.rounds:
            clock.report(fedloom.__version__)  # here, where the workers still live

    with tempfile.TemporaryDirectory() as out:
        fedloom.run(study=study(given, out), watch=watch)
