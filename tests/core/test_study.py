"""Studies: every error at once, in sentences; who wins over whom; what a changed study meets."""

from __future__ import annotations

import json
import sys

import pytest

from fedloom import cli
from fedloom.errors import InputError
from fedloom.runs.start import resume, sections_of
from fedloom.runs.store import Store
from fedloom.runs.study import method_of, override, read, resolve
from tests.contract.study import run


def problems(sections):
    with pytest.raises(InputError) as error:
        resolve(sections, "x.toml")
    return str(error.value).splitlines()


def test_defaults_make_a_study():
    study = resolve({})
    assert (study.method.name, study.data.name, study.model.name) == ("fedavg", "digits", "mlp")
    assert resolve({"data": {"name": "cifar10"}}).model.name == "cnn"


def test_all_errors_of_closed_sections_at_once():
    lines = problems({"train": {"lr": -1.0, "batchsize": 3, "epochs": "two"}, "runn": {}, "engine": {"name": "locale"}})
    assert len(lines) == 5
    text = "\n".join(lines)
    assert "unknown setting 'batchsize' in [train] (x.toml)" in text
    assert "Did you mean 'batch_size'?" in text
    assert "unknown section [runn]" in text
    assert "Did you mean 'run'?" in text
    assert "train.lr is wrong (x.toml): " in text
    assert "got -1.0" in text
    assert "train.epochs" in text
    assert "unknown engine 'locale'" in text


def test_all_errors_of_open_sections_at_once():
    lines = problems({"method": {"name": "fedavgg"}, "data": {"name": "digitz"}, "partition": {"name": "idd"},
                      "fleet": {"name": "hihg"}, "model": {"name": "lenet"}})  # fmt: skip
    assert len(lines) == 5
    for right in ("fedavg", "digits", "iid", "high", "lenet5"):
        assert any(f"Did you mean '{right}'" in line for line in lines), right


def test_errors_of_both_kinds_at_once():
    lines = problems({"train": {"lr": "fast"}, "method": {"name": "fedavgg"}, "data": {"name": "digitz"}})
    assert len(lines) == 3


def test_errors_of_several_slots_at_once():
    lines = problems(
        {"select": {"name": "unifrm"}, "merge": {"weights": "size"}, "share": {"name": "fedbm"}, "method": {"nme": 1}}
    )
    assert len(lines) == 4


@pytest.mark.parametrize(("sections", "sentence"), [
    ({"method": {"mu": 0.1}}, "setting of method 'fedavg' 'mu'|method 'fedavg' has no settings"),
    ({"select": {"fraction": 2.0}}, "fraction of select 'uniform' is wrong.*got 2.0"),
    ({"select": {"fractoin": 0.5}}, "Did you mean 'fraction'"),
    ({"merge": {"weights": "equall"}}, "weights of merge 'mean' is wrong"),
    ({"filter": {"norm": 1.0}}, r"\[filter\] needs a name"),
    ({"partition": {"name": "dirichlet:-1"}}, "Dirichlet.*got -1"),
    ({"method": {"name": "scaffold"}, "cut": {"name": "prefix"}}, "scaffold cannot run under a cut"),
    ({"model": {"name": "mlp", "hiden": [3]}}, "Did you mean 'hidden'"),
    ({"model": {"name": "mlp", "hidden": "wide"}}, "hidden of model 'mlp' is wrong"),
    ({"data": {"limt": 4}}, "Did you mean 'limit'"),
    ({"data": {"validation": 1.0}}, "data.validation is wrong"),
    ({"train": {"lr": float("inf")}}, "train.lr is wrong"),
    ({"train": {"clip": float("nan")}}, "train.clip is wrong"),
    ({"train": 3}, "train"),
])  # fmt: skip
def test_wrong_settings_are_sentences(sections, sentence):
    with pytest.raises(InputError, match=sentence):
        resolve(sections)


def test_settings_of_a_preset_policy_keep_its_others():
    method = method_of(resolve({"method": {"name": "scaffold"}, "merge": {"by_class": True}}))
    assert (method.merge.weights, method.merge.by_class) == ("equal", True)
    method = method_of(resolve({"method": {"name": "scaffold"}, "merge": {"name": "mean"}}))
    assert method.merge.weights == "samples"


def test_study_over_preset_over_default():
    private = [type(method_of(resolve(sections)).share).__name__ for sections in (
        {}, {"method": {"name": "fedbn"}}, {"method": {"name": "fedbn"}, "share": {"name": "all"}},
    )]  # fmt: skip
    assert private == ["AllTensors", "NotNorms", "AllTensors"]


def test_command_line_over_set_over_study(tmp_path):
    (tmp_path / "s.toml").write_text(
        '[run]\nrounds = 3\nseed = 3\nout = "a"\n[train]\nlr = 0.3\nepochs = 3\n[method]\nname = "fedbn"'
    )
    sections = override(
        read(tmp_path / "s.toml"), ["run.rounds=2", "run.seed=2", "train.lr=0.2", "method.name=scaffold"]
    )
    study = resolve(sections_of("fedavg", {"rounds": 1, "seed": None}, sections))
    assert (study.run.rounds, study.run.seed, study.run.out) == (1, 2, "a")
    assert (study.train.lr, study.train.epochs, study.train.batch_size) == (0.2, 3, 32)
    assert study.method.name == "fedavg"


def test_options_do_not_change_the_sections_they_are_laid_over():
    base = {"run": {"rounds": 3}}
    sections_of(None, {"rounds": 1}, override(base, ["run.rounds=2"]))
    assert base == {"run": {"rounds": 3}}


@pytest.mark.parametrize(("text", "value"), [
    ("1", 1), ("0.5", 0.5), ("1e-3", 0.001), ("true", True), ("'1'", "1"), ('"a b"', "a b"), ("plain", "plain"),
    ("[0.5, 1]", [0.5, 1]), ("dirichlet:0.1", "dirichlet:0.1"), ("pkg.module:Net", "pkg.module:Net"),
    ("", ""), ("a=b", "a=b"),
    ("True", "True"), (" 3 ", 3), ("/tmp/x.npz", "/tmp/x.npz"), ("# no comment", "# no comment"),
])  # fmt: skip
def test_values_of_set(text, value):
    found = override({}, [f"data.key={text}"])["data"]["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("setting", ["train.lr", "lr=3", "=3", ".lr=3", "train.=3", ""])
def test_settings_that_are_none(setting):
    with pytest.raises(InputError, match="section"):
        override({}, [setting])


def test_unknown_section_in_set():
    with pytest.raises(InputError, match="Did you mean 'train'"):
        override({}, ["trian.lr=3"])


def test_the_later_setting_wins():
    assert override({}, ["train.lr=1", "train.lr=2"]) == {"train": {"lr": 2}}


@pytest.mark.parametrize(
    "lay_over", [lambda s: override(s, ["run.rounds=3"]), lambda s: sections_of(None, {"rounds": 3}, s)]
)
def test_a_section_that_is_no_section_is_a_sentence(lay_over):
    with pytest.raises(InputError, match="run"):
        resolve(lay_over({"run": 3}))


def test_study_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.toml").write_text("[train\n")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    for name, reason in (("a", "not TOML"), ("b", "not TOML"), ("c", "No such file")):
        with pytest.raises(InputError, match=rf"{name}\.toml.*{reason}"):
            read(tmp_path / f"{name}.toml")


@pytest.fixture
def command(monkeypatch, capsys):
    def go(*words):
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out = capsys.readouterr()
        return end.value.code, out.out, out.err

    return go


def test_wrong_input_ends_with_2_and_no_traceback(command, tmp_path):
    for words in (["run", "fedavgg"], ["run", "--set", "train.lrr=3"], ["run", "a", "b"], ["run", tmp_path / "no.toml"],
                  ["list", "metods"], ["resume", tmp_path], ["run", "--rounds", "0"], ["run", "--nothing"],
                  ["nothing"]):  # fmt: skip
        code, out, err = command(*words)
        assert code == 2, words
        assert err
        assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


SMALL = {
    "run": {"rounds": 2},
    "data": {"limit": 100},
    "model": {"name": "mlp"},
    "fleet": {"clients": 2, "name": "uniform"},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run("fedavg", tmp_path_factory.mktemp("finished"), **SMALL)


def test_resuming_a_finished_run_prints_its_result(command, finished):
    before = {path: path.read_bytes() for path in finished.folder.rglob("*") if path.is_file()}
    code, out, _ = command("resume", finished.folder, "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == finished.summary
    assert before == {path: path.read_bytes() for path in finished.folder.rglob("*") if path.is_file()}


def test_a_second_run_never_overwrites_a_folder(finished):
    before = {path: path.read_bytes() for path in finished.folder.rglob("*") if path.is_file()}
    folders = {run("fedavg", finished.folder.parent, **SMALL).folder for _ in range(2)} | {finished.folder}
    assert len(folders) == 3
    assert set(finished.folder.parent.iterdir()) == folders
    assert before == {path: path.read_bytes() for path in finished.folder.rglob("*") if path.is_file()}


@pytest.fixture
def stopped(tmp_path):
    """A run with a checkpoint of its first round."""

    def stop(row):
        raise KeyboardInterrupt

    with pytest.raises(BaseException, match="nothing is lost") as error:
        run("fedavg", tmp_path, watch=stop, **SMALL)
    return error.value.folder


def change(folder, section, **values):
    study = json.loads((folder / "study.json").read_text())
    study[section] |= values
    (folder / "study.json").write_text(json.dumps(study))


def test_resume_refuses_a_changed_study_and_names_the_place(stopped, command):
    change(stopped, "train", lr=0.7)
    change(stopped, "run", seed=8)
    with pytest.raises(InputError, match=r"train\.lr was 0\.05 and is 0\.7; run\.seed was 3 and is 8"):
        resume(stopped)
    code, _, err = command("resume", stopped)
    assert code == 2
    assert "train.lr" in err
    change(stopped, "train", lr=0.05)
    change(stopped, "run", seed=3)
    assert resume(stopped).summary["rounds"] == 2


def test_resume_refuses_a_study_that_was_changed_before_the_first_checkpoint(stopped):
    (stopped / "checkpoint.json").unlink()
    change(stopped, "fleet", clients=3)
    with pytest.raises(InputError, match="clients"):
        resume(stopped)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"run": 3}', '{"train": {"lr": -1}}'])
def test_resume_of_a_broken_study_is_a_sentence(stopped, command, text):
    (stopped / "study.json").write_text(text)
    code, _, err = command("resume", stopped)
    assert code == 2
    assert "study.json" in err


def test_resume_of_a_damaged_checkpoint_is_a_sentence(stopped, command):
    for path in (stopped / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:20])
    code, _, err = command("resume", stopped)
    assert code in (1, 2)
    assert "fedloom: " in err
    assert "safetensors" in err


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(InputError, match="is not the folder of a run"):
        Store.open(tmp_path)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"epochs": 3, "uneven": 1.0, "least": 4}, "train.least is 4 epochs, but all that a client does is"),
        ({"steps": 2, "uneven": 1.0, "least": 4}, "train.least is 4 steps"),
        ({"epochs": 3, "least": 2}, "train.uneven = 0 says that nobody does less"),
    ],
)
def test_uneven_work_that_could_not_be_is_refused(train, words):
    with pytest.raises(InputError, match=words):
        resolve({"train": train})


def test_forked_workers_cannot_use_a_gpu():
    with pytest.raises(InputError, match="engine 'processes' forks workers, which cannot use a GPU"):
        resolve({"engine": {"name": "processes", "device": "cuda"}})
    assert resolve({"engine": {"name": "local", "device": "cuda"}}).engine.device == "cuda"
