"""Runs side by side, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from ast import literal_eval

CODE = """
from pathlib import Path
import torch
from fedloom.runs.parallel import run_all

def work(watch):
    torch.ones(4_000_000).sin().sum()

torch.set_num_threads(2)
torch.ones(4_000_000).sin().sum()  # starts the parent's threads
print(list(run_all([work, work], [lambda: print, lambda: print], 2, Path("."))))
"""


def test_a_forked_run_does_not_wait_for_its_parents_threads(tmp_path):
    several = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=several, capture_output=True, text=True, timeout=120, check=True
    )
    assert sorted(literal_eval(ended.stdout)) == [(0, None), (1, None)]
