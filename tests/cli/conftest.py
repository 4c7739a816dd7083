"""The command line in this process: what it wrote, and how it ended."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import pytest

from fedloom import cli

SMALL = ["--model", "mlp", "--clients", "2", "--engine", "local", "--set", "data.limit=60"]


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def last(self) -> Any:
        """The JSON of the last line."""
        return json.loads(self.out.splitlines()[-1])

    def sentence(self) -> str:
        """Wrong input: exit code 2, nothing on standard output, one sentence on standard error."""
        assert self.code == 2, self
        assert "Traceback" not in self.err
        assert self.out == ""
        (line,) = self.err.splitlines()
        assert line.startswith("fedloom: ")
        return line.removeprefix("fedloom: ")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def go(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Ended(end.value.code, *capsys.readouterr())

    return go
