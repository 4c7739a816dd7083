"""The same from Python: two methods on the same split, their metrics as data frames, one picture.

Run it with: python examples/compare.py FOLDER
"""

import sys
from pathlib import Path

import fedloom
from fedloom.report.plots import curves

if __name__ == "__main__":
    out = Path(sys.argv[1])
    study = {"model": {"name": "mlp"}, "partition": {"name": "classes:2"}, "train": {"lr": 0.1}}
    results = [fedloom.run(method, study, rounds=10, clients=10, out=out) for method in ("fedavg", "local")]
    for result in results:
        last = result.metrics.iloc[-1]
        print(result.summary["method"], f"{last.local_accuracy:.3f}", result.folder)  # noqa: T201
    curves(results, out / "compare.png")
