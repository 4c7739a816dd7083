"""What every command prints and leaves behind."""

from __future__ import annotations

import io
import json
import re
from operator import mul

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console

import fedloom.models.resolve
from fedloom.registry import KINDS
from fedloom.report.tables import Rows, print_table, quantity
from fedloom.runs.start import run
from tests.cli.conftest import SMALL

FIELDS = {
    "method", "dataset", "model", "engine", "rounds", "clients", "global_accuracy", "local_accuracy",
    "worst_local_accuracy", "best_global_accuracy", "upload_bytes", "download_bytes", "train_macs", "virtual_seconds",
    "seconds", "seconds_per_round", "peak_memory_bytes", "failures", "run_dir",
}  # fmt: skip


def test_json_has_the_fields_of_the_contract(command, tmp_path):
    ended = command("run", "fedavg", *SMALL, "--rounds", 2, "--out", "out", "--json")
    assert ended.code == 0
    assert len(ended.out.splitlines()) == 1, "progress goes to standard error"
    found = ended.last
    assert found.keys() >= FIELDS
    assert [found[name] for name in ("method", "dataset", "model", "engine", "rounds", "clients", "failures")] == [
        "fedavg", "digits", "mlp", "local", 2, 2, 0,
    ]  # fmt: skip
    for name in ("global_accuracy", "local_accuracy", "worst_local_accuracy", "best_global_accuracy"):
        assert 0 <= found[name] <= 1
    for name in ("upload_bytes", "download_bytes", "train_macs", "peak_memory_bytes"):
        assert isinstance(found[name], int)
        assert found[name] > 0
    assert (tmp_path / found["run_dir"] / "summary.json").is_file()
    assert command("resume", found["run_dir"], "--json").last == found


def test_the_table_is_readable_when_piped(command):
    """80 columns is what a pipe has; a number that is cut off is no number."""
    ended = command("run", "fedavg", *SMALL, "--rounds", 1, "--out", "out")
    assert ended.code == 0
    assert "run folder: out/" in ended.out.replace("\\", "/")
    assert "…" not in ended.out


def test_a_study_file_with_options_over_it(command, tmp_path):
    (tmp_path / "study.toml").write_text(
        "[method]\nname = 'fedprox'\nmu = 0.5\n[run]\nrounds = 3\nseed = 4\n[data]\nlimit = 60\n[model]\nname = 'mlp'\n"
        "[fleet]\nclients = 2\n[engine]\nname = 'local'\n"
    )
    found = command("run", "study.toml", "--rounds", 1, "--set", "train.lr=0.2", "--json").last
    assert (found["method"], found["rounds"]) == ("fedprox", 1)
    saved = json.loads((tmp_path / found["run_dir"] / "study.json").read_text())
    assert (saved["method"]["mu"], saved["run"]["seed"], saved["train"]["lr"]) == (0.5, 4, 0.2)


def test_another_method_over_a_study_with_settings_of_its_own(command, tmp_path):
    """`compare` lets go of the settings of the method that is replaced; `run` must do the same."""
    (tmp_path / "study.toml").write_text("[method]\nname = 'fedprox'\nmu = 0.5\n")
    assert command("compare", "study.toml", "fedavg", *SMALL, "--rounds", 1, "--json").code == 0
    assert command("run", "study.toml", "fedavg", *SMALL, "--rounds", 1, "--json").code == 0


@pytest.mark.parametrize("kind", ["methods", "datasets", "models", "partitions", "fleets", "policies", "engines"])
def test_lists(command, kind):
    listed = command("list", kind, "--json").last
    assert listed
    names = [(each["kind"], each["name"]) for each in listed]
    assert len(set(names)) == len(names)
    for each in listed:
        assert each["kind"] in KINDS
        assert each["summary"], each["name"]
        assert all(field.keys() == {"name", "type", "default", "help"} for field in each["fields"])
    ended = command("list", kind)
    assert ended.code == 0
    assert all(each["name"].split("_")[0] in ended.out for each in listed)


def test_lists_know_the_settings(command):
    methods = {each["name"]: each for each in command("list", "methods", "--json").last}
    assert {"fedavg", "fedsgd", "fedprox", "fednova", "scaffold", "fedbn", "fedavgm", "fedadam", "fedyogi", "local",
            "central"} <= methods.keys()  # fmt: skip
    assert any(field["name"] == "mu" and field["default"] == "0.01" for field in methods["fedprox"]["fields"])


def test_a_list_of_methods_is_short_and_a_name_has_the_settings(command):
    listed = command("list", "methods").out
    assert re.search(r"serial .* not stacked", listed)
    assert re.search(r"fedprox .* all", listed)
    assert "0.01" not in listed
    assert re.search(r"mu +0.01 +float", command("list", "methods", "fedprox").out)
    assert [each["name"] for each in command("list", "methods", "fedprox", "--json").last] == ["fedprox"]
    assert "Did you mean 'fedprox'?" in command("list", "methods", "fedprx").sentence()
    assert re.search(r"share +0.2 +float", command("list", "policies", "trimmed").out)
    assert "share=0.2" in command("list", "policies").out


def test_inspect_says_once_what_is_kept_whole(command, caplog):
    ended = command("inspect", "tests.submodels.nets:Cosine", "--shape", "1x8x8")
    assert ended.out.count("layers.0") == 1
    assert caplog.records == []


def test_a_table_that_is_too_wide_goes_on_below():
    heads = ["global %", "local %", "virtual s", "s/round", "failed"]
    wide: Rows = {"examples.mymethod:MyMethod": dict.fromkeys(heads, "98.33"), "fedavg": dict.fromkeys(heads, "1.00")}
    console = Console(width=60, file=io.StringIO())
    print_table(console, "method", wide)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines == [
        ["method", "global", "%", "local", "%", "virtual", "s"],
        ["examples.mymethod:MyMethod", *["98.33"] * 3],
        ["fedavg", *["1.00"] * 3],
        ["method", "s/round", "failed"],
        ["examples.mymethod:MyMethod", *["98.33"] * 2],
        ["fedavg", *["1.00"] * 2],
    ]


def test_inspect_mlp_by_hand(command):
    found = command("inspect", "mlp", "--shape", "1x8x8", "--capacity", 1, "--capacity", 0.3, "--json").last
    assert found["groups"] == {"classifier.1": 64}
    assert found["whole"] == {}
    for cost, units in zip(found["capacities"], (64, 20), strict=True):  # ceil(0.3 * 64)
        assert cost["kept"] == {"classifier.1": units}
        assert cost["parameters"] == 64 * units + units + units * 10 + 10
        assert cost["macs"] == 64 * units + units * 10


def test_inspect_cnn_by_hand(command):
    found = command("inspect", "cnn", "--shape", "1x28x28", "--capacity", 1, "--capacity", 0.5, "--json").last
    assert sorted(found["groups"].values()) == [32, 64, 512]
    for cost, (a, b, c) in zip(found["capacities"], ((32, 64, 512), (16, 32, 256)), strict=True):
        assert sorted(cost["kept"].values()) == [a, b, c]
        assert cost["parameters"] == (25 * a + a) + (25 * a * b + b) + (49 * b * c + c) + (c * 10 + 10)
        assert cost["macs"] == 28 * 28 * 25 * a + 14 * 14 * 25 * a * b + 49 * b * c + c * 10
    assert found["capacities"][0]["parameters"] == 1_663_370, "as McMahan et al. print it"


def test_inspect_for_people(command):
    ended = command("inspect", "mlp", "--shape", "1x8x8", "--classes", 3, "--capacity", 0.5)
    assert ended.code == 0
    assert re.search(r"classifier\.1 +64 +32", ended.out)
    assert re.search(r"parameters +2\.18 k", ended.out), "64 * 32 + 32 + 32 * 3 + 3 = 2179"


def test_check_estimates_and_draws(command, tmp_path):
    (tmp_path / "study.toml").write_text(
        "[data]\nlimit = 100\nvalidation = 0.0\n[model]\nname = 'mlp'\n[fleet]\nclients = 5\n[select]\nfraction = 0.4\n"
        "[train]\nepochs = 2\nbatch_size = 10\n[run]\nrounds = 7\n"
    )
    ended = command("check", "study.toml")
    assert ended.code == 0, ended.err
    assert (tmp_path / "study.split.png").read_bytes().startswith(b"\x89PNG")
    for name, value in (("parameters", "4.81 k"), (r"MACs a sample \(forward\)", "4.74 k"), ("clients a round", "2"),
                        ("samples a client", "20 to 20, mean 20.0"),
                        ("training MACs a round", "1.14 M")):  # fmt: skip
        assert re.search(rf"{name} +{value}", ended.out), (name, ended.out)
    assert not (tmp_path / "runs").exists()


def test_check_of_a_bound_estimates_the_bound(command, tmp_path):
    """central trains one client on all data."""
    (tmp_path / "study.toml").write_text(
        "[method]\nname = 'central'\n[data]\nlimit = 100\n[model]\nname = 'mlp'\n[fleet]\nclients = 5\n"
    )
    ended = command("check", "study.toml")
    assert re.search(r"clients a round +1 *\n", ended.out), ended.out


def test_check_of_a_list_estimates_every_model(command, tmp_path):
    """Five clients of 20 images: by capacity two train 64-64-10, two 64-32-10 and one 64-16-10, each once."""
    (tmp_path / "study.toml").write_text(
        "model = [{ name = 'mlp', hidden = [16] }, { name = 'mlp', hidden = [64] }, { name = 'mlp', hidden = [32] }]\n"
        "[method]\nname = 'local'\n[data]\nlimit = 100\nvalidation = 0.0\n[fleet]\nclients = 5\n"
    )
    ended = command("check", "study.toml")
    assert ended.code == 0, ended.err
    dealt = [int(count) for count in re.findall(r"mlp: (\d)", ended.out.splitlines()[0])]
    assert sum(dealt) == 5
    macs = [64 * width + width * 10 for width in (16, 64, 32)]
    for name, value in (("parameters", "mlp: 1.21 k, mlp: 4.81 k, mlp: 2.41 k"),
                        (r"MACs a sample \(forward\)", "mlp: 1.18 k, mlp: 4.74 k, mlp: 2.37 k"),
                        ("training MACs a round", quantity(3 * 20 * sum(map(mul, macs, dealt))))):  # fmt: skip
        assert re.search(rf"{name} +{value}", ended.out), (name, ended.out)


def test_partition_draws_and_exports(command, tmp_path):
    ended = command("partition", "digits", "--partition", "classes:2", "--clients", 5, "--export", "parts")
    assert ended.code == 0, ended.err
    assert (tmp_path / "partition.png").read_bytes().startswith(b"\x89PNG")
    files = sorted((tmp_path / "parts").glob("client_*"))
    assert [path.name for path in files] == [f"client_{number}.npz" for number in range(5)]
    with np.load(tmp_path / "parts" / "test.npz", allow_pickle=False) as file:  # for the server
        assert len(file["y_train"]) == 359
    labels, seen = [], 0
    for path in files:
        with np.load(path, allow_pickle=False) as file:
            labels.append(set(file["y_train"].tolist()))
            seen += len(file["y_train"]) + len(file["y_validation"])
            assert file["x_train"].dtype == np.uint8
            assert file["x_train"].shape[1:] == (8, 8)
            assert set(file["y_test"].tolist()) <= labels[-1]
    assert seen == 1438
    assert all(len(held) == 2 for held in labels)
    assert set().union(*labels) == set(range(10))


def test_an_exported_part_is_a_data_set(command, tmp_path):
    command("partition", "digits", "--clients", 5, "--export", "parts")
    with np.load(tmp_path / "parts" / "client_3.npz") as file:
        own = len(file["y_train"])
    words = ["--dataset", "parts/client_3.npz", "--model", "mlp", "--clients", 2, "--rounds", 1, "--engine", "local"]
    found = command("run", "fedavg", *words, "--set", "data.validation=0.0", "--json")
    assert found.code == 0, found.err
    assert found.last["global_accuracy"] is not None
    entries = (tmp_path / found.last["run_dir"] / "clients.jsonl").read_text().splitlines()
    trained = [json.loads(line) for line in entries]
    assert sum(entry["samples"] for entry in trained if entry["job"] == "work") == own


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    settings = {"data.limit": 200, "model.hidden": [16], "train.lr": 0.2, "train.batch_size": 8}
    options = {"model": "mlp", "clients": 2, "rounds": 3, "engine": "local", "out": tmp_path_factory.mktemp("trained")}
    return run("fedavg", set=settings, **options)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "deep/er/model.safetensors"])
def test_export_gives_the_runs_accuracy(command, tmp_path, trained, name):
    ended = command("export", trained.folder, name)
    assert ended.code == 0, ended.err
    state = (
        safetensors.torch.load_file(tmp_path / name)
        if name.endswith("safetensors")
        else torch.load(tmp_path / name, weights_only=True)
    )
    line = re.search(r"fedloom\.models\.resolve\.build\(.*\)", ended.out).group()
    model = eval(line, {"fedloom": fedloom})
    model.load_state_dict(state)
    assert _accuracy(model) == pytest.approx(trained.summary["global_accuracy"], abs=1e-12)


def _accuracy(model):
    from fedloom.data import load

    data = load("digits", limit=200)
    x = torch.from_numpy(data.x).float() / 255
    mean, std = x[: data.trained].double().mean(), x[: data.trained].double().std(correction=0)
    with torch.no_grad():
        logits = model.eval()((x[data.trained :] - mean.float()) / std.float())
    return float((logits.argmax(1) == torch.from_numpy(data.y[data.trained :])).double().mean())


def test_export_without_a_global_model(command, tmp_path):
    found = command("run", "local", *SMALL, "--rounds", 1, "--json").last
    assert "local has no global model" in command("export", found["run_dir"], "model.pt").sentence()
    assert not (tmp_path / "model.pt").exists()


def test_version_and_help(command):
    assert re.fullmatch(r"fedloom \d+\.\d+\.\d+\n", command("--version").out)
    ended = command("--help")
    assert ended.code == 0
    for verb in ("run", "resume", "compare", "check", "list", "inspect", "partition", "reproduce", "export", "demo"):
        assert verb in ended.out
    assert "--partition" in command("run", "--help").out
