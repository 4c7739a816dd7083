"""Names: the index is the code, wrong ones are sentences, and listing them imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fedloom import registry
from fedloom.errors import InputError
from fedloom.methods.fedavg import FedAvg
from fedloom.policies.merge import Mean
from fedloom.runs.study import method_of, resolve


def test_the_index_is_the_code():
    """If this fails: python -m fedloom.registry."""
    assert json.loads(registry.INDEX.read_text()) == registry._scan()


def test_every_listed_name_can_be_found_and_knows_its_name():
    for kind in registry.KINDS:
        for name, entry in registry.entries(kind).items():
            assert entry.summary, f"{kind} {name} says nothing about itself"
            assert registry.name_of(registry.find(kind, name)) == name


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [("method", "fedavgg", "fedavg"), ("share", "fedbm", "fedbn"), ("dataset", "digit", "digits")],
)
def test_unknown_names_get_a_suggestion(kind, wrong, right):
    with pytest.raises(InputError, match=f"unknown {kind} '{wrong}'; allowed: .*Did you mean '{right}'"):
        registry.find(kind, wrong)


def test_names_that_are_like_nothing_get_none():
    with pytest.raises(InputError) as error:
        registry.find("method", "xyzzy")
    assert "Did you mean" not in str(error.value)


def test_import_paths():
    assert registry.find("method", "fedloom.methods.fedavg:FedAvg") is FedAvg
    assert registry.name_of(FedAvg()) == registry.name_of(FedAvg) == "fedavg"
    assert registry.name_of(Mean()) == "mean"

    class Own(FedAvg):
        """Not registered, though its parent is."""

    assert registry.name_of(Own()).startswith("tests.core.test_registry:")


@pytest.mark.parametrize(
    "path",
    [
        "nowhere:Net",
        "fedloom.methods.fedavg:Nothing",
        "fedloom.methods.fedavg:",
        ":Net",
        ":",
        "fedloom.registry:KINDS",
        "..:Net",
    ],
)
def test_import_paths_that_lead_nowhere_are_sentences(path):
    with pytest.raises(InputError) as error:
        registry.find("method", path)
    assert f"method '{path}'" in str(error.value)
    assert "expected" in str(error.value)


def test_a_module_that_is_broken_is_a_sentence_too(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="broken_module"):
        registry.find("model", "broken_module:Net")


def test_registering_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match=r"unknown kind of registration 'metod'.*'method'"):
        registry.register("metod", "x")(lambda: None)


def test_own_registrations_are_listed_and_found(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {kind: dict(known) for kind, known in registry._registered.items()})

    @registry.register("fleet", "mine", paper="Me, 2026")
    def mine(clients: int, generator: object, speed: float = 2.0) -> dict:
        """Three devices.

        More.
        """
        return {}

    entry = registry.entries("fleet")["mine"]
    assert registry.find("fleet", "mine") is mine
    assert (entry.summary, entry.paper) == ("Three devices.", "Me, 2026")
    assert entry.fields[2] == {"name": "speed", "type": "float", "default": "2.0", "help": ""}


HEAVY = ("torch", "numpy", "scipy", "sklearn", "pandas", "pyarrow", "matplotlib", "pydantic")


def test_a_class_below_a_data_class_needs_no_decorator(tmp_path, monkeypatch):
    """Its fields' types are looked up where each is written."""
    (tmp_path / "undecorated.py").write_text("from fedloom.methods.fedprox import FedProx\nclass Mine(FedProx): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "undecorated:Mine"
    method = method_of(resolve({"method": {"name": name, "mu": 0.5}, "select": {"fraction": 0.5}}))
    assert (type(method).__name__, method.mu, method.select.fraction) == ("Mine", 0.5, 0.5)
    with pytest.raises(InputError, match="mu of method 'undecorated:Mine' is wrong"):
        resolve({"method": {"name": name, "mu": "much"}})
    assert "mu" in [field["name"] for field in registry.describe("method", name, type(method)).fields]


@pytest.mark.parametrize("words", [["--help"], ["list", "methods"], ["list", "policies", "--json"], ["run", "--help"]])
def test_help_and_lists_import_nothing_heavy(words):
    code = (
        f"import sys; sys.argv = ['fedloom', *{words!r}]\n"
        "from fedloom.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"print('HEAVY', code, *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY 0"
    if words[0] == "list":
        assert "fedavg" in done.stdout or "uniform" in done.stdout


def test_lists_as_json(capsys, monkeypatch):
    from fedloom import cli

    monkeypatch.setattr(sys, "argv", ["fedloom", "list", "methods", "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    assert {entry["name"] for entry in json.loads(capsys.readouterr().out)} >= {"fedavg", "fedbn", "scaffold"}
