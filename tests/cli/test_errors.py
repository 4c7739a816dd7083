"""Wrong input: one sentence that says what, where, got, allowed and did-you-mean; exit code 2; no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fedloom
from tests.cli.conftest import SMALL


@pytest.mark.parametrize(("words", "parts"), [
    (["run", "fedavgg"], ["method 'fedavgg'", "scaffold", "Did you mean 'fedavg'?"]),
    (["run", "fedavg", "--set", "train.lrr=0.1"], ["'lrr' in [train]", "batch_size", "Did you mean 'lr'?"]),
    (["run", "fedavg", "--set", "trian.lr=0.1"], ["section in --set 'trian'", "Did you mean 'train'?"]),
    (["run", "fedavg", "--set", "train.lr=fast"], ["train.lr is wrong", "number", "got 'fast'"]),
    (["run", "fedavg", "--set", "train.lr=-1"], ["train.lr is wrong", "greater than 0", "got -1"]),
    (["run", "fedavg", "--set", "train.epochs=1.5"], ["train.epochs is wrong", "integer", "got 1.5"]),
    (["run", "fedavg", "--set", "train.optimizer=adm"], ["train.optimizer is wrong", "'adam'", "got 'adm'"]),
    (["run", "fedavg", "--set", "train"], ["--set takes section.key=value", "got 'train'"]),
    (["run", "fedprox", "--set", "method.mue=1"], ["method 'fedprox'", "'mue'", "Did you mean 'mu'?"]),
    (["run", "fedprox", "--set", "method.mu=-1"], ["mu of method 'fedprox' is wrong", "got -1"]),
    (["run", "fednova", "--set", "method.mu=2", "--set", "train.lr=0.5"], ["train.lr x method.mu below 1", "0.5 x 2"]),
    (["run", "fednova", "--set", "cut.name=prefix"], ["fednova cannot run under a cut", "use fedavg"]),
    (["run", "fedavg", "--clients", "0"], ["clients is wrong", "greater than or equal to 1", "got 0"]),
    (["run", "fedavg", "--rounds", "0"], ["rounds is wrong", "got 0"]),
    (["run", "fedavg", "--dataset", "digit"], ["dataset 'digit'", "Did you mean 'digits'?"]),
    (["run", "fedavg", "--dataset", "CIFAR-10"], ["dataset 'CIFAR-10'", "Did you mean 'cifar10'?"]),
    (["run", "/tmp"], ["'/tmp' is no method, and no study file either", "NAME.toml"]),
    (["compare", "fedavg", "fedbn", "fedavg"], ["takes each method once", "fedavg again"]),
    (["run", "local", "--clients", "1", "--set", 'model.name=["mlp", "cnn"]'], ["2 models, more than", "clients is 1"]),
    (["run", "--fleet", "measured", "--set", "fleet.devices=3"], ["devices of fleet 'measured'", "got 3"]),
    (["run", "--fleet", "measured", "--set", "fleet.devices=phone"], ["'phone'", "Did you mean 'phones'?"]),
    (["run", "fedavg", "--dataset", "none.npz"], ["none.npz", "does not exist"]),
    (["run", "fedavg", "--model", "lenet"], ["model 'lenet'", "Did you mean 'lenet5'?"]),
    (["run", "fedavg", "--select", "unifrom"], ["select 'unifrom'", "Did you mean 'uniform'?"]),
    (["run", "--set", "objective.name=soft", "--set", "objective.to=hard"], ["unknown objective 'hard'"]),
    (["run", "fedckd", "--set", "objective.layers=[]"], ["objective.layers names no layer"]),
    (["run", "fedavg", "--share", "nothing"], ["share 'nothing'", "fedbn"]),
    (["run", "fedavg", "--fleet", "hihg"], ["fleet 'hihg'", "Did you mean 'high'?"]),
    (["run", "fedavg", "--fleet", "low"], ["fedavg trains whole models", "10 of 10 devices", "exclude", "ignore"]),
    (["run", "fedavg", "--partition", "dirichlet:x"], ["'dirichlet:x'", "alpha must be a number", "got 'x'"]),
    (["run", "fedavg", "--partition", "clases:2"], ["partition 'clases'", "Did you mean 'classes'?"]),
    (["run", "fedavg", "--partition", "classes:11"], ["per_client", "at most the 10 classes", "got 11"]),
    (["run", "fedavg", "--partition", "domain"], ["digits"]),
    (["run", "fedavg", "--clients", "5000"], ["1438 training images", "at most 1438 clients"]),
    (["run", "fedavg", "--engine", "locl"], ["unknown engine", "'locl'", "Did you mean 'local'?"]),
    (["run", "fedavg", "--device", "cuda"], ["no CUDA device"]),
    (["run", "heterofl", "--set", "merge.name=krum"], ["merge 'krum'", "heterofl", "use merge 'median' or 'trimmed'"]),
    (["run", "scaffold", "--set", "merge.name=median"], ["control variates", "merge 'median' does not guard"]),
    (["run", "--set", "merge.name=trimmed", "--set", "merge.share=0.5"], ["merge 'trimmed'", "less than 0.5"]),
    (["run", "--set", "merge.name=krum", "--set", "merge.keep=0"], ["keep of merge 'krum'", "got 0"]),
    (["run", "--set", "merge.name=medain"], ["merge 'medain'", "Did you mean 'median'?"]),
    (["run", "fedavg", "--engine", "nope"], ["allowed: auto, local"]),
    (["run", "fedavg", "--set", "engine.trainer=graphs"], ["'graphs' captures steps on a GPU", "stacked"]),
    (["run", "--engine", "processes", "--set", "engine.trainer=stacked"], ["each trained alone", "engine.name out"]),
    (["run", "fedavg", "--seed", "9223372036854775808"], ["run.seed is wrong", "less than 9223372036854775808"]),
    (["run", "fedprox", "--set", "method.mu=inf"], ["mu of method 'fedprox'", "finite number", "got inf"]),
    (["run", "fedavg", "--set", "fleet.speed=inf"], ["speed of fleet 'uniform'", "finite number", "got inf"]),
    (["run", "--set", "partition.name=dirichlet", "--set", f"partition.minimum={10**30}"],
     ["minimum of partition 'dirichlet'", "at most 64 bits"]),
    (["run", "fedavg", "--partition", f"classes:{10**30}"], ["at most the 10 classes", str(10**30)]),
    (["run", "--set", "fleet.name=mixed", "--set", "fleet.jitter=1e10"], ["jitter of fleet 'mixed'", "equal to 10"]),
    (["run", "fedavg", "--set", "fleet.onlookers=0.99"], ["fleet.onlookers is 0.99", "nobody to train"]),
    (["run", "fedavg", "--set", "data.size=100000000000000"], ["size 100000000000000", "do not fit into memory"]),
    (["run", "fedavg", "--set", "model.hidden=[100000000000]"], ["'mlp' cannot be built", "hidden=(100000000000,)"]),
    (["deploy", "init", "/proc/nothing"], ["/proc/nothing: No such file or directory"]),
    (["run", "fedavg", "--partition", "dirichlet:0.3", "--set", "partition.minimum=5"],
     ["'dirichlet:0.3' is the short form", "got minimum", "Name it 'dirichlet'"]),
    (["run", "fedavg", "--dataset", "os:getcwd"], ["dataset 'os:getcwd' makes a str", "fedloom.data.Dataset"]),
    (["run", "fedavg", "--select", "os:getcwd"], ["select 'os:getcwd' makes a str", "without __call__"]),
    (["run", "fedavg", "--share", "os:getcwd"], ["share 'os:getcwd' makes a str", "without private"]),
    (["run", "fedavg", "--fleet", "os:getcwd"], ["fleet 'os:getcwd' must take clients and generator"]),
    (["run", "fedavg", "--engine", "os:getcwd"], ["engine 'os:getcwd' must take factory and workers", "nothing"]),
    (["run", "fedavg", "--partition", "os:getcwd"], ["partition 'os:getcwd' makes a str without __call__"]),
    (["run", "fedavg", "--partition", "builtins:int"], ["partition 'builtins:int' does not say what it takes"]),
    (["run", "fedavg", "--select", "math:sqrt"], ["select 'math:sqrt' cannot be built with no settings", "TypeError"]),
    (["run", "fedavg", "--dataset", "sys:exit"], ["dataset 'sys:exit' cannot be built with no settings: SystemExit"]),
    (["run", "torch:ones"], ["method 'torch:ones' cannot be built with no settings", "TypeError"]),
    (["run", "fedea", "--set", "evaluate.model=trained"], ["evaluate.model", "fedea", "judged by the last"]),
    (["run", "scaffold", "--set", "train.optimizer=adam"], ["scaffold", "train.optimizer 'sgd'", "got 'adam'"]),
    (["run", "heterofl", "--model", "lenet5_bn", "--fleet", "low", "--share", "fedbn", "--set", "evaluate.gap=true"],
     ["evaluate.gap", "tensors of their own"]),
    (["run", "fedes", "--set", "evaluate.gap=true"], ["evaluate.gap", "fedes"]),
    (["run", "os:getcwd"], ["method 'os:getcwd' makes a str", "fedloom.method.Method"]),
    (["run", "fedavg", "--out", "/proc"], ["run.out '/proc' cannot hold the folder of a run"]),
    (["run", "fedavg", "fedprox"], ["run takes one method", "fedloom compare"]),
    (["run", "a.toml", "b.toml"], ["at most one study file"]),
    (["run", "none.toml"], ["none.toml cannot be read", "No such file"]),
    (["compare"], ["needs at least one method"]),
    (["compare", "fedavg", "--baseline", "fedprox"], ["baseline 'fedprox'", "fedavg"]),
    (["compare", "fedavg", "fedavgg"], ["method 'fedavgg'", "Did you mean 'fedavg'?"]),
    (["list", "metods"], ["'metods'", "Did you mean 'methods'?"]),
    (["inspect", "mlpp"], ["model 'mlpp'", "Did you mean 'mlp'?"]),
    (["inspect", "mlp", "--capacity", "2"], ["capacity must be in (0, 1]", "got 2"]),
    (["inspect", "mlp", "--shape", "3x32"], ["3x32x32", "got '3x32'"]),
    (["inspect", "mlp", "--shape", "1x8x-8"], ["3x32x32", "got '1x8x-8'"]),
    (["partition", "math:sqrt"], ["data set 'math:sqrt' cannot be built with no settings", "TypeError"]),
    (["partition", "digits", "--partition", "classes:11"], ["at most the 10 classes"]),
    (["partition", "digits", "--validation", "1.5"], ["validation", "1.5"]),
    (["resume", "nowhere"], ["nowhere is not the folder of a run"]),
    (["export", "nowhere", "model.pt"], ["nowhere is not the folder of a run"]),
    (["export", "nowhere", "model.bin"], ["'.bin'", ".safetensors"]),
    (["reproduce", "nothing-like-it"], ["nothing-like-it"]),
    (["reproduce", "none.toml"], ["none.toml cannot be read"]),
    (["reproduce"], ["reproduce --list"]),
    (["check", "none.toml"], ["none.toml cannot be read"]),
    (["run", "--set", "train.optimizer=adam", "--set", "train.momentum=0.9"], ["momentum is for optimizer sgd", "0.9"]),
    (["run", "--set", "train.milestones=[3]"], ["train.milestones are for", "'step'; it is 'constant'"]),
    (["run", "--set", "train.schedule=step"], ["'step' needs train.milestones"]),
    (["run", "--set", "fleet.day=60"], ["fleet.day", "fleet.trace names none"]),
    (["run", "--set", "fleet.day=60", "--set", "fleet.trace=a.csv"], ["a CSV file has a period of its own"]),
    (["run", "fedper", "--set", "share.head=3"], ["share.head is 3 layers, but the model has 2"]),
    (["run", "--set", "merge.name=krum", "--clients", "4"], ["at least 5 reports", "got 4 a round at most"]),
    (["run", "--set", "merge.name=krum", "--set", "select.fraction=0.3"], ["at least 5 reports", "got 3"]),
    (["serve", "study.toml", "--test", "nothere.npz"], ["nothere.npz does not exist"]),
    (["serve", "study.toml", "--public", "nothere.npz"], ["nothere.npz does not exist"]),
    (["bench", "refrence"], ["bench 'refrence'", "Did you mean 'reference'?"]),
], ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None)  # fmt: skip
def test_one_sentence(command, tmp_path, words, parts):
    sentence = command(*words).sentence()
    for part in parts:
        assert part in sentence
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(("words", "parts"), [
    (["run", "fedavg", "--round", "3"], ["--round", "--rounds"]),
    (["run", "--nothing"], ["--nothing"]),
    (["run", "fedavg", "--clients", "many"], ["--clients", "'many'"]),
    (["runn", "fedavg"], ["'runn'", "'run'"]),
    (["run", "--lr", "0.1"], ["--lr; give the setting as --set train.lr="]),
    (["run", "--batch-size", "8"], ["--set train.batch_size="]),
    (["compare", "fedavg", "--seeds", "0"], ["--seeds", "0"]),
    (["inspect"], ["MODEL"]),
])  # fmt: skip
def test_wrong_options_are_one_sentence_too(command, words, parts):
    sentence = command(*words).sentence()
    for part in parts:
        assert part in sentence
    assert sentence.count("Did you mean") <= 1


@pytest.mark.parametrize(("text", "parts"), [
    ("run = 3\n", ["'run' must be a section with settings", "got 3"]),
    ("[train]\nlerning = 1\n", ["'lerning' in [train]", "allowed: lr,"]),
    ("[trane]\nlr = 1\n", ["section [trane]", "Did you mean 'train'?"]),
    ("[train]\nlr = 'fast'\n", ["train.lr", "got 'fast'"]),
    ("[method]\nname = 3\n", ["method.name", "string", "got 3"]),
    ("train = 3\n", ["train", "got 3"]),
    ("[train\n", ["not TOML", "line 1"]),
    ("\x00", ["not TOML"]),
    ("[data]\nname = 'none.npz'\n", ["none.npz", "does not exist"]),
])  # fmt: skip
@pytest.mark.parametrize("verb", ["run", "check"])
def test_wrong_study_files(command, tmp_path, verb, text, parts):
    (tmp_path / "study.toml").write_text(text)
    sentence = command(verb, "study.toml").sentence()
    for part in parts:
        assert part in sentence
    assert "study.toml" in sentence or "none.npz" in sentence, "say which file"


def test_a_model_that_cannot_be_built_is_told_with_its_line(command, tmp_path):
    (tmp_path / "tallmodel.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n"
        "    def __init__(self, classes):\n        super().__init__()\n        raise KeyError('height')\n"
    )
    sentence = command("run", "fedavg", "--model", "tallmodel:Net").sentence()
    assert "model 'tallmodel:Net' cannot be built with classes=10: KeyError: 'height'" in sentence
    assert "tallmodel.py, line 5" in sentence


OWN = """
import numpy as np
from fedloom.data.rows import Rows
def lists(): return lambda dataset, clients, generator: [[0], [1]]
def fewer(): return lambda dataset, clients, generator: Rows.of([[0, 1, 2]])
def twice(): return lambda dataset, clients, generator: Rows.of([[0, 1], [1, 2]])
def beyond(): return lambda dataset, clients, generator: Rows.of([[0], [10**6]])
def bare(clients, generator): return {"speed": np.ones(clients)}
def short(clients, generator): return {"capacity": np.ones(clients - 1)}
def giant(clients, generator): return {"capacity": np.full(clients, 2.0)}
def missing(): return {}["images"]
"""


@pytest.mark.parametrize(("words", "parts"), [
    (["--partition", "ownthings:lists"], ["deals a list", "expected a fedloom.data.rows.Rows"]),
    (["--partition", "ownthings:fewer"], ["deals 1 parts", "each of 2 clients"]),
    (["--partition", "ownthings:twice"], ["deals images twice"]),
    (["--partition", "ownthings:beyond"], ["that are not there", "below 60"]),
    (["--fleet", "ownthings:bare"], ["fleet 'ownthings:bare' makes a dict", "'capacity'"]),
    (["--fleet", "ownthings:short"], ["column 'capacity' of fleet 'ownthings:short' has shape (1,)", "(2,)"]),
    (["--fleet", "ownthings:giant"], ["capacities of fleet 'ownthings:giant'", "(0, 1]", "got 2 to 2"]),
    (["--dataset", "ownthings:missing"], ["'ownthings:missing' cannot be built", "KeyError: 'images'", "line 11"]),
    (["--dataset", "endsatonce:load"], ["'endsatonce:load' cannot be imported: SystemExit: 3"]),
])  # fmt: skip
def test_things_of_the_users_own_that_cannot_be_used(command, tmp_path, words, parts):
    (tmp_path / "ownthings.py").write_text(OWN)
    (tmp_path / "endsatonce.py").write_text("raise SystemExit(3)\n")
    small = [] if "--dataset" in words else ["--set", "data.limit=60"]
    sentence = command("run", "fedavg", "--clients", 2, "--engine", "local", *small, *words).sentence()
    for part in parts:
        assert part in sentence


def test_a_partition_of_the_users_own_needs_no_package(command, tmp_path):
    (tmp_path / "owndeal.py").write_text(
        "import numpy as np\nfrom fedloom.data.rows import Rows\n"
        "def halves(): return lambda dataset, clients, generator: Rows.of(np.arange(60).reshape(clients, -1))\n"
    )
    assert command("run", "fedavg", *SMALL, "--rounds", 1, "--partition", "owndeal:halves").code == 0


def test_no_command_shows_the_help_and_no_empty_sentence(command):
    ended = command()
    assert ended.code == 2
    assert "Usage" in ended.out + ended.err
    assert "fedloom: \n" not in ended.err


@pytest.mark.parametrize("words", [["--picture", "/proc/split.png"], ["--export", "file"]])
def test_places_that_cannot_be_written(command, tmp_path, words):
    (tmp_path / "file").touch()
    ended = command("partition", "digits", "--clients", 2, *words)
    assert ended.code == 2
    assert ended.err.startswith(f"fedloom: {words[1]}: ")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(("answer", "parts"), [
    ("self.l(x.flatten(1))[:, :7]", ["logits of shape [2, 10]", "got [2, 7]"]),
    ("(self.l(x.flatten(1)), x)", ["logits of shape [2, 10]", "got a tuple"]),
    ("self.l(x)", ["model Net fails on images of shape [2, 1, 8, 8]", "RuntimeError"]),
])  # fmt: skip
def test_a_model_that_does_not_answer_with_logits(command, tmp_path, answer, parts):
    name = f"oddmodel{len(answer)}"  # modules stay imported
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.l = nn.Linear(64, 10)\n    def forward(self, x):\n        return {answer}\n"
    )
    sentence = command("run", "fedavg", "--model", f"{name}:Net").sentence()
    for part in parts:
        assert part in sentence


MODELS = """
import torch
from torch import nn
class Nothing(nn.Module):
    def __init__(self): super().__init__()
    def forward(self, x): return x.flatten(1)[:, :10]
def lazy(): return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
def half(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).half()
"""


@pytest.mark.parametrize(("name", "parts"), [
    ("Nothing", ["has no parameters"]),
    ("lazy", ["does not know the shape of '1.weight'", "lazy layers"]),
    ("half", ["has '1.weight' in float16", "engine.precision"]),
])  # fmt: skip
@pytest.mark.parametrize("words", [["run", "fedavg", "--model"], ["inspect", "--shape", "1x8x8"]])
def test_a_model_that_cannot_be_trained_as_it_is(command, tmp_path, words, name, parts):
    (tmp_path / "barenets.py").write_text(MODELS)
    sentence = command(*words, f"barenets:{name}").sentence()
    for part in [f"model 'barenets:{name}'", *parts]:
        assert part in sentence


def write_npz(path, labels, side=(8, 8), **more):
    x = np.zeros((len(labels), *side), np.uint8)
    np.savez(path, x_train=x, y_train=labels, **more)


def test_data_files_that_cannot_be_used(command, tmp_path):
    (tmp_path / "folder.npz").mkdir()
    assert "'folder.npz' is a folder" in command("run", "fedavg", "--dataset", "folder.npz").sentence()
    write_npz(tmp_path / "large.npz", np.array([0, 2**63], np.uint64))
    assert "y_train holds 9223372036854775808" in command("run", "fedavg", "--dataset", "large.npz").sentence()
    write_npz(tmp_path / "oblong.npz", np.arange(40) % 2, (8, 12))
    words = ["run", "fedavg", "--dataset", "oblong.npz", "--model", "mlp", "--clients", 2]
    assert "make them square with --set data.size=12" in command(*words).sentence()


def test_a_class_that_is_only_tested_is_told(command, tmp_path, caplog):
    few = {"x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.array([1, 7])}
    write_npz(tmp_path / "few.npz", np.arange(40) % 2, **few)
    words = ["run", "fedavg", "--dataset", "few.npz", "--model", "mlp", "--clients", 2, "--rounds", 1]
    assert command(*words, "--engine", "local").code == 0
    assert "few: no training image has the label 7 of y_test; it counts: 8 classes" in caplog.messages


def test_published_tables_that_are_not_here(command, tmp_path, monkeypatch):
    monkeypatch.setattr("fedloom.runs.papers.FOLDERS", (Path("papers"), tmp_path / "elsewhere"))
    looked = f"looked for in {tmp_path / 'papers'} and {tmp_path / 'elsewhere'}"
    assert looked in command("reproduce", "--list").err
    for words in (["selection"], ["--page", "page.md"]):
        assert looked in command("reproduce", *words).sentence()


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """The folder of a run that looks as if it had not ended."""
    result = fedloom.run(
        "fedavg", model="mlp", clients=2, engine="local", rounds=1, out=tmp_path_factory.mktemp("runs"),
        set={"data.limit": 60},
    )  # fmt: skip
    (result.folder / "summary.json").unlink()
    return result.folder


@pytest.mark.parametrize(("name", "content", "told"), [
    ("summary.json", "{", "is damaged"),
    (".study.json", "{", "is damaged: Invalid JSON"),
    ("study.json", "[]", "is damaged"),
    ("split.npz", "no split", "is damaged or not a saved split"),
    ("checkpoint.json", "{", "is damaged"),
    ("checkpoint.json", "{}", "it has no round, files, clients and bytes"),
    ("metrics.jsonl", "", "is damaged: it is shorter than checkpoint.json says"),
    ("clients.jsonl", None, "is damaged: [Errno 2] No such file"),
    ("checkpoints/server-1.safetensors", "no tensors", "cannot be read"),
    ("checkpoints/server-1.safetensors", None, "cannot be read"),
    ("checkpoints/server-1.safetensors", "checkpoints/fleet-1.safetensors", "it has no tensors and memory"),
    ("checkpoints/fleet-1.safetensors", "checkpoints/server-1.safetensors", "it has no samples, round and stage"),
])  # fmt: skip
def test_a_damaged_run_folder_is_one_sentence(command, tmp_path, unfinished, name, content, told):
    folder = tmp_path / "damaged"
    shutil.copytree(unfinished, folder)
    if content is None:
        (folder / name).unlink()
    elif content.startswith("checkpoints/"):
        shutil.copy(folder / content, folder / name)
    else:
        (folder / name).write_text(content)
    sentence = command("resume", folder).sentence()
    assert name in sentence
    assert told in sentence


def test_a_changed_study_is_not_looked_into(command, tmp_path, unfinished):
    folder = tmp_path / "changed"
    shutil.copytree(unfinished, folder)
    (folder / "study.json").write_text("{}")
    for verb in ("knowledge", "profile"):
        assert "was changed after the run began" in command(verb, folder).sentence()


def test_a_damaged_model_is_not_exported(command, tmp_path, unfinished):
    folder = tmp_path / "damaged"
    shutil.copytree(unfinished, folder)
    (folder / "summary.json").write_text("{}")
    (folder / "model.safetensors").write_text("no tensors")
    assert "model.safetensors is damaged" in command("export", folder, "model.pt").sentence()


def test_traffic_of_a_run_without_a_round(command, tmp_path, unfinished):
    folder = tmp_path / "early"
    shutil.copytree(unfinished, folder)
    (folder / "metrics.jsonl").write_text("")
    assert "has no round yet" in command("traffic", folder).sentence()


STUDY = """
partition = { name = "dirichlet", alpha = 0.3 }
fleet = { name = "mixed", clients = 2, spread = 20.0, dropout = 0.0 }
data = { name = "digits", limit = 60 }
"""


@pytest.mark.parametrize(("words", "told"), [
    (["--partition", "classes:5", "--fleet", "uniform"], []),
    (["--partition", "iid", "--set", "partition.alpha=1.0"], ["partition 'iid' has no settings; got 'alpha'"]),
    (["--partition", "iid", "--fleet", "uniform", "--set", "fleet.spread=2"], ["fleet 'uniform'", "'spread'"]),
])  # fmt: skip
def test_an_option_replaces_what_the_study_names_with_its_settings(command, tmp_path, words, told):
    (tmp_path / "study.toml").write_text(STUDY)
    ended = command("run", "study.toml", "--rounds", 1, "--engine", "local", *words)
    assert ended.code == (2 if told else 0), ended
    for part in told:
        assert part in ended.err
    if not told:
        (folder,) = (tmp_path / "runs").iterdir()
        study = json.loads((folder / "study.json").read_text())
        assert study["partition"] == {"name": "classes:5"}
        assert study["fleet"]["dropout"] == 0.0
        assert "spread" not in study["fleet"]
        assert study["data"]["limit"] == 60


def test_compare_names_the_file_too(command, tmp_path):
    (tmp_path / "study.toml").write_text("[train]\nlerning = 1\n")
    sentence = command("compare", "study.toml", "fedavg", "fedprox").sentence()
    assert "'lerning' in [train]" in sentence
    assert "study.toml" in sentence


@pytest.mark.parametrize("verb", ["run", "check", "reproduce"])
def test_study_files_that_are_no_files(command, tmp_path, verb):
    (tmp_path / "folder.toml").mkdir()
    assert "Is a directory" in command(verb, "folder.toml").sentence()
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "binary.toml is not TOML" in command(verb, "binary.toml").sentence()


def test_two_errors_at_once_are_two_sentences(command, tmp_path):
    (tmp_path / "study.toml").write_text(
        "[train]\nlrr = 1\nepochs = 0\n[method]\nname = 'fedavgg'\n[model]\nname = 'mlp'\nhiden = [3]\n"
        "[partition]\nname = 'clases:2'\n[nothing]\n"
    )
    for verb in ("run", "check"):
        ended = command(verb, "study.toml")
        assert ended.code == 2
        lines = ended.err.splitlines()
        assert all(line.startswith("fedloom: ") for line in lines)
        for part in ("'lrr'", "train.epochs", "'fedavgg'", "'hiden'", "'clases'", "[nothing]"):
            assert sum(part in line for line in lines) == 1, part


def test_two_errors_of_one_kind_are_two_sentences(command):
    ended = command("run", "fedavgg", "--set", "partition.name=clases:2", "--dataset", "digit")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 3
    ended = command("run", "--set", "train.lrr=1", "--set", "run.rounds=0")
    assert len(ended.err.splitlines()) == 2
    ended = command("compare", "fedavgg", "fedproxx")
    assert len(ended.err.splitlines()) == 2


@pytest.mark.parametrize("words", [["run"], ["compare"]])
def test_out_that_is_a_file(command, tmp_path, words):
    (tmp_path / "taken").write_text("mine")
    assert "taken" in command(*words, "fedavg", *SMALL, "--rounds", 1, "--out", "taken").sentence()
    assert (tmp_path / "taken").read_text() == "mine"


def test_pictures_that_cannot_be_drawn(command):
    for name, part in (("split.foo", "png"), (".", "folder")):
        ended = command("partition", "digits", "--picture", name)
        assert ended.code == 2, name
        assert part in ended.err


def test_capacities_that_are_none(command):
    words = ["--fleet", "mixed", "--set", "fleet.capacities=[]"]
    assert "capacities" in command("run", "fedavg", *SMALL, *words).sentence()


def test_an_engine_that_is_not_there_leaves_no_run(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    sentence = command("run", "fedavg", *SMALL[:4], "--engine", "ray", "--out", "out").sentence()
    assert sentence == "engine 'ray' needs the library Ray: pip install 'fedloom[ray]'"
    assert list(tmp_path.iterdir()) == []


def test_settings_of_engines(command):
    words = ["run", "fedavg", *SMALL[:4], "--engine"]
    assert "Did you mean 'workers'?" in command(*words, "local", "--set", "engine.worker=2").sentence()
    assert "unknown setting in [engine] 'address'" in command(*words, "auto", "--set", "engine.address=auto").sentence()
    assert "Did you mean 'reduce'?" in command(*words, "ray", "--set", "engine.reduse=tree").sentence()
    assert "cpus of engine 'ray' is wrong" in command(*words, "ray", "--set", "engine.cpus=0").sentence()


def test_a_missing_data_set_is_a_fast_sentence_that_helps(command, tmp_path, monkeypatch):
    """No folder, no cache, no network."""
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    begin = time.monotonic()
    for folder, where in ((None, "$FEDLOOM_DATA/mnist"), ("", "$FEDLOOM_DATA/mnist"), (".", "mnist")):
        if folder is not None:
            monkeypatch.setenv("FEDLOOM_DATA", folder)
        sentence = command("run", "fedavg", "--dataset", "mnist").sentence()
        for part in ("'mnist' is not here", "mnist.npz", where):
            assert part in sentence
    monkeypatch.setenv("FEDLOOM_DATA", "nowhere")
    assert "FEDLOOM_DATA is 'nowhere', which is not a folder" in command("check", _study(tmp_path)).sentence()
    assert time.monotonic() - begin < 5


def _study(folder):
    path = folder / "mnist.toml"
    path.write_text("[data]\nname = 'mnist'\n")
    assert tomllib.loads(path.read_text())
    return path


def test_the_real_command_line_too(tmp_path):
    """In a process of its own: exit code, streams, and that help is quick to come by."""
    words = [sys.executable, "-m", "fedloom.cli", "run", "fedavgg"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("fedloom: unknown method 'fedavgg'")
    assert len(ended.stderr.splitlines()) == 1
