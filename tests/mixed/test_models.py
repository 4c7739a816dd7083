"""Clients with models of their own: which model a client gets, who refuses, what is trained where."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.deploy import serve
from fedloom.engine.reference import Reference
from fedloom.engine.several import Several
from fedloom.errors import InputError, Unfit
from fedloom.fleet.dealt import dealt
from fedloom.fleet.nonsense import nonsense
from fedloom.readings import Accuracy
from fedloom.registry import entries, find
from fedloom.runs.start import sections_of
from fedloom.runs.study import Study, resolve
from fedloom.runs.world import world_of
from fedloom.types import Measure, Report, Samples
from tests.contract.study import final
from tests.core.small import Normed, Plain, images_of, network_of
from tests.methods.tiny import run, same, study_of, world

PUBLIC = {"data": {"public": 20}}
PAIR = ["mlp", {"name": "lenet5"}]
METHODS = {name: find("method", name) for name in entries("method")}
MIXING = sorted(name for name, method in METHODS.items() if method.mixes)


@given(st.lists(st.sampled_from([0.1, 0.25, 0.5, 1.0]), min_size=1, max_size=30), st.data())
def test_the_stronger_get_the_costlier_in_equal_shares(capacities, data):
    costs = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=len(capacities)))
    kinds = dealt(np.array(capacities), costs)
    for one, kind in zip(capacities, kinds, strict=True):
        for other, theirs in zip(capacities, kinds, strict=True):
            assert one <= other or costs[kind] >= costs[theirs]
    shares = np.bincount(kinds, minlength=len(costs))
    assert shares.max() - shares.min() <= 1


def test_models_by_hand():
    capacities = np.array([0.1, 1.0, 0.5, 0.5, 0.2])
    assert dealt(capacities, [5, 500, 50]).tolist() == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("model", [PAIR, {"name": PAIR}, {"name": "mlp", "others": [{"name": "lenet5"}]}])
def test_a_list_can_be_written_in_three_ways(model):
    study = resolve({"method": {"name": "fedmd"}, "model": model, "data": {"public": 20}})
    assert [each.name for each in study.model.each] == ["mlp", "lenet5"]
    assert study.model.label == "mlp + lenet5"
    assert Study.model_validate_json(study.model_dump_json()) == study
    assert resolve(study.model_dump()) == study


def test_settings_stand_with_their_model():
    study = study_of("fedmd", model={"name": ["mlp", {"name": "mlp", "hidden": [3]}], "hidden": None}, **PUBLIC)
    small = world_of(study.model_dump_json()).networks[1]
    assert small.shapes()["classifier.1.weight"][0] == 3


def test_an_option_takes_the_place_of_a_list():
    assert resolve(sections_of("fedavg", {"model": "mlp"}, {"model": PAIR})).model.label == "mlp"


@pytest.mark.parametrize("method", sorted(METHODS.keys() - set(MIXING)))
def test_who_needs_one_model_says_so_in_one_sentence(method):
    with pytest.raises(InputError) as refused:
        resolve({"method": {"name": method}, "model": PAIR})
    mine = [line for line in str(refused.value).splitlines() if method in line]
    assert mine == [
        f"{method} joins or hands on the tensors of one model, but [model] names 2: mlp + lenet5; name one, or use "
        "dsfl, feddf, fedmd or local"
    ]


@pytest.mark.parametrize(("model", "words"), [
    ([], "list of names"), (["mlp", 3], "list of names"), ([{"hidden": [3]}], "list of names"),
    ({"name": ["mlp", "lenet5"], "hidden": [3]}, "hidden must stand with one of them"),
    (["mlp", "lenet9"], "unknown model 'lenet9'"), (["mlp", {"name": "mlp", "hiden": [3]}], "Did you mean 'hidden'"),
])  # fmt: skip
def test_a_list_that_makes_no_sense(model, words):
    with pytest.raises(InputError) as refused:
        resolve({"method": {"name": "fedmd"}, "model": model, "train": {"lr": -1.0}})
    assert sum(words in line for line in str(refused.value).splitlines()) == 1
    assert "train.lr" in str(refused.value), "one error does not hide another"


def test_more_models_than_clients():
    place = world("fedmd", model={"name": ["mlp"] * 4, "hidden": None}, **PUBLIC)
    with pytest.raises(InputError, match=r"names 4 models, more than there are clients: fleet\.clients is 3"):
        place.check()


def test_weak_devices_get_the_smaller_model():
    fleet = {"name": "mixed", "clients": 4, "capacities": [1.0, 0.25]}
    place = world("fedmd", fleet=fleet, model={"name": PAIR, "hidden": None}, **PUBLIC)
    place.check()
    costs = [network.macs(network.initial(0)) for network in place.networks]
    strong, weak = int(np.argmax(costs)), int(np.argmin(costs))
    assert place.columns["kind"].tolist() == [
        strong if capacity == 1 else weak for capacity in place.columns["capacity"].tolist()
    ]
    with pytest.raises(Unfit, match="trains whole models"):
        world("fedmd", fleet=fleet, **PUBLIC).check()


@pytest.mark.parametrize("method", MIXING)
def test_everybody_trains_its_own_network(method, tmp_path):
    study = {"model": {"name": PAIR, "hidden": None}, "fleet": {"clients": 4, "name": "high"}, **PUBLIC}
    study |= {"method": {"steps": 3}} if method == "feddf" else {}
    result, place = run(method, tmp_path, select={"name": "powd"}, **study), world(method, **study)
    assert result.summary["failures"] == 0
    assert result.summary["model"] == "mlp + lenet5"
    kinds = place.columns["kind"].tolist()
    assert set(kinds) == {0, 1}
    owned = final(result)
    for client, kind in enumerate(kinds):
        mark = f"client{client}/own/"
        own = {name.removeprefix(mark): t.shape for name, t in owned.items() if name.startswith(mark)}
        assert own == ({} if method == "feddf" else place.networks[kind].shapes())
    work = [row for row in result.rows("clients") if row["job"] == "work"]
    if method == "feddf":
        sizes = [sum(shape.numel() for shape in network.shapes().values()) for network in place.networks]
        assert {row["parameters"] for row in work} == set(sizes)
        second = {n.partition("models/0/")[2]: t.shape for n, t in owned.items() if "memory/models/0/" in n}
        assert second == place.networks[1].shapes()
    else:
        assert {row["parameters"] for row in work} == {0 if method == "local" else 20 * 10}


@pytest.mark.parametrize("method", ["fedmd", "dsfl", "local"])
def test_a_list_of_equal_models_is_that_model(method, tmp_path):
    one, two = (
        final(run(method, tmp_path, model=model, **PUBLIC))
        for model in ({"hidden": [8]}, {"name": [{"name": "mlp", "hidden": [8]}] * 2, "hidden": None})
    )
    ignored = ("server/memory/models", "fleet/kind", "fleet/seconds")
    kept = [{name: t for name, t in each.items() if not name.startswith(ignored)} for each in (one, two)]
    same(*kept)


def test_each_request_goes_to_its_models_trainer_and_answers_keep_their_order():
    images, networks = images_of(), [network_of(Plain), network_of(Normed)]
    samples, nobody = Samples(images, torch.arange(20)), Samples(images, torch.arange(0))
    asked = [
        Measure(networks[kind].initial(seed), Accuracy(), part, kind=kind)
        for kind, seed, part in ((1, 0, samples), (0, 1, samples), (1, 2, nobody), (1, 3, samples), (0, 4, samples))
    ]
    answers = Several([Reference(network) for network in networks]).solve(asked)
    assert isinstance(answers[2], Exception)
    for request, answer in zip(asked[:2] + asked[3:], answers[:2] + answers[3:], strict=True):
        (alone,) = Reference(networks[request.kind]).solve([request])
        same(answer, alone)


ANSWERED = {"answers": torch.zeros(4, 3)}


@pytest.mark.parametrize(("tensors", "reason"), [
    (ANSWERED, ""), ({}, "it holds no 'answers'"), ({"answers": torch.zeros(4, 2)}, "shape (4, 2), expected (4, 3)"),
    (ANSWERED | {"last.bias": torch.zeros(3)}, "'last.bias' was not asked for"),
    ({"answers": torch.zeros(4, 3).double()}, "float64, expected torch.float32"),
    ({"answers": torch.full((4, 3), torch.nan)}, "not finite"),
])  # fmt: skip
def test_reports_like_something_else_than_the_model(tensors, reason):
    told = nonsense(Report(tensors), network_of(Plain), ANSWERED)
    assert reason in told
    assert bool(told) == bool(reason)


@pytest.mark.parametrize(("method", "model", "words"), [
    ("fedmd", '"mlp"', "public images at every client"), ("feddf", '["mlp", "lenet5"]', "mlp \\+ lenet5"),
])  # fmt: skip
def test_real_devices_refuse_what_they_cannot_do_yet(method, model, words, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(f'[method]\nname = "{method}"\n[model]\nname = {model}\n[data]\npublic = 20\n')
    with pytest.raises(InputError, match=words):
        serve.study_of(path, 3)
