"""FedPer, FedRep, Ditto and FedAMP: what stays at home, what moves when, and whose models meet."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
import torch
from torch import Tensor, nn

from fedloom.engine.reference import Reference
from fedloom.engine.stacked import Stacked
from fedloom.errors import InputError
from fedloom.methods import fedamp
from fedloom.methods.fedamp import FedAMP, attention, distances, usual
from fedloom.policies.adaptive import Adaptive
from fedloom.policies.layers import layers_of
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD
from fedloom.policies.share import Body
from fedloom.runs.study import resolve
from fedloom.steps import Descent
from fedloom.types import Fit, Task, Train
from tests.contract.study import final
from tests.core.small import CLASSES, SIDE, Normed, client_of, images_of, network_of
from tests.methods.tiny import NORMED, begin, close, gradient, numbers, run, same, sections_of, server_of, world
from tests.submodels.nets import NETS, network


def test_the_head_is_the_last_layers_with_their_norms():
    network = network_of(Normed)
    assert Body().private(network) == {"last.weight", "last.bias"}
    assert Body(3).private(network) == frozenset(network.names)
    place = world("fedper", model={"name": "digit_cnn", "hidden": None}, data={"size": 28})
    private = Body(2).private(place.network)
    assert len(private) == 2 + 2 + 5  # two linear layers, and a norm with statistics and counter
    assert private & place.network.buffers


class HeadFirst(nn.Module):
    """Declares its head first, its norms before its layers, and a layer that only training calls."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, CLASSES)
        self.norm = nn.BatchNorm1d(4)
        self.more, self.aside, self.body = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(SIDE * SIDE, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.more(self.norm(self.body(x.flatten(1)))))
        return self.head(self.aside(x) if self.training else x)


def test_layers_are_counted_from_the_output_however_they_are_declared():
    network = network_of(HeadFirst)
    layers = [[name.split(".")[0] for name in layer] for layer in layers_of(network)]
    assert layers == [["body", "body", "norm", "norm"], ["more", "more"], ["aside", "aside"], ["head", "head"]]
    assert Body().private(network) == {"head.weight", "head.bias"}
    assert Adaptive(top=1).keeps(network) == {"head.weight", "head.bias"}
    assert network.linears == ("body", "more", "head")


@pytest.mark.parametrize("name", [name for name in NETS if name != "dense"])
def test_models_that_declare_their_layers_in_order_keep_it(name):
    net = network(name)
    declared = [name for name, _ in net.module.named_parameters()]
    assert [name for layer in layers_of(net) for name in layer] == declared


def test_fedper_is_fedavg_with_own_heads(tmp_path):
    one, two = run("fedper", tmp_path / "a", **NORMED), run("fedavg", tmp_path / "b", **NORMED, share={"name": "body"})
    same(server_of(one), server_of(two))
    assert numbers(one) == numbers(two)
    first = world("fedper", **NORMED).network.initial(1)
    head = Body().private(world("fedper", **NORMED).network)
    for name, tensor in server_of(one).items():
        assert torch.equal(tensor, first[name]) == (name in head), name
    assert one.summary["global_accuracy"] is None


@pytest.mark.parametrize("trainer", [Reference, Stacked])
def test_what_is_not_named_rests(trainer):
    network = network_of(Normed, torch.float64)
    images, tensors = images_of(dtype=torch.float64), network.initial(0)
    clients = [client_of(range(12 * n, 12 * n + 12), network, images, train=Train(batch_size=4)) for n in range(2)]
    step = Descent(CrossEntropy(), SGD(0.9, 0.1), clip=1.0, only=frozenset({"second.weight"}))
    for fit in trainer(network).solve([Fit(tensors, step, client.plan(), client.fixed()) for client in clients]):
        moved = {name for name, tensor in fit.tensors.items() if not torch.equal(tensor, tensors[name])}
        assert moved == {"second.weight"} | network.buffers  # statistics follow every pass


def test_resting_agrees_in_both_trainers():
    network = network_of(Normed, torch.float64)
    images, tensors = images_of(dtype=torch.float64), network.initial(0)
    clients = [client_of(range(12 * n, 12 * n + 12), network, images, train=Train(batch_size=4)) for n in range(2)]
    step = Descent(CrossEntropy(), SGD(0.9, 0.1), clip=0.1, only=frozenset({"last.weight", "last.bias"}))
    fits = [Fit(tensors, step, client.plan(), client.fixed()) for client in clients]
    for one, other in zip(Reference(network).solve(fits), Stacked(network).solve(fits), strict=True):
        close(one.tensors, other.tensors, 1e-9)


def task_of(place):
    train = Train(**place.study.train.model_dump(include=set(Train.__dataclass_fields__)))
    return Task(0, 0, train=train, tensors={"model": place.network.initial(1)})


def steps_by_hand(place, tensors, plan, only=None, pull=0.0, anchor=None):
    lr = place.study.train.lr
    for (rows,) in plan.steps:
        batch = plan.images.batch(rows)
        slopes = gradient(place, tensors, batch.x, batch.y)
        tensors = {
            n: t - lr * (slopes[n] + (pull * (t - anchor[n]) if pull else 0)) if only is None or n in only else t
            for n, t in tensors.items()
        }
    return tensors


ALONE = {"fleet": {"clients": 1}, "partition": {"name": "iid"}, "run": {"rounds": 1}}


def test_fedrep_by_hand(tmp_path):
    result = run("fedrep", tmp_path, **ALONE, method={"head_epochs": 3})
    place = world("fedrep", **ALONE, method={"head_epochs": 3})
    task = task_of(place)
    client, head = place.client(task, {}), place.method.share.private(place.network)
    tensors = place.network.initial(1)
    plan = client.plan(train=replace(task.train, epochs=3), purpose="head")
    assert len(plan.steps) == 3 * len(client.plan().steps)
    tensors = steps_by_hand(place, tensors, plan, head)
    tensors = steps_by_hand(place, tensors, client.plan(), frozenset(tensors) - head)
    kept = {n.removeprefix("client0/own/"): t for n, t in final(result).items() if n.startswith("client0/own/")}
    assert kept.keys() == head
    close(kept, {name: tensors[name] for name in kept})
    first = place.network.initial(1)
    close(server_of(result), {name: first[name] if name in head else t for name, t in tensors.items()})


def test_ditto_by_hand(tmp_path):
    result = run("ditto", tmp_path / "a", **ALONE, method={"weight": 0.7})
    place = world("ditto", **ALONE, method={"weight": 0.7})
    client, common = place.client(task_of(place), {}), place.network.initial(1)
    close(server_of(result), steps_by_hand(place, common, client.plan()))
    own = steps_by_hand(place, common, client.plan(purpose="personal"), pull=0.7, anchor=common)
    mark = "client0/personal/"
    close({n.removeprefix(mark): t for n, t in final(result).items() if n.startswith(mark)}, own)


def test_ditto_is_fedavg_at_the_server(tmp_path):
    ditto, fedavg = run("ditto", tmp_path / "a"), run("fedavg", tmp_path / "b")
    same(server_of(ditto), server_of(fedavg))
    assert [row["global_accuracy"] for row in numbers(ditto)] == [row["global_accuracy"] for row in numbers(fedavg)]
    assert numbers(ditto)[-1]["local_accuracy"] != numbers(fedavg)[-1]["local_accuracy"]


def models_of(*values):
    return {str(n): {"w": torch.tensor([value, 0.0]), "b": torch.tensor([9.0 * n])} for n, value in enumerate(values)}


def weights_in(models, of, alpha, sigma):
    return attention(distances(models, [of], ["w"])[of], of, alpha, sigma)


def test_distances_are_looked_at_once(monkeypatch):
    looks, copy = [], fedamp.to_host
    monkeypatch.setattr(fedamp, "to_host", lambda tensors: (looks.append(len(tensors)), copy(tensors))[1])
    models = models_of(0.0, 1.0, 3.0, 7.0)
    apart = distances(models, ["1", "2"], ["w"])
    assert {of: {to: float(square) for to, square in row.items()} for of, row in apart.items()} == {
        "1": {"0": 1.0, "2": 4.0, "3": 36.0}, "2": {"0": 9.0, "1": 4.0, "3": 16.0}
    }  # fmt: skip
    assert looks == [5], "each pair once"


def test_attention_by_hand():
    weights = weights_in(models_of(0.0, 1.0, 2.0), "0", alpha=0.5, sigma=2.0)
    other = [0.25 * exp(-1 / 2), 0.25 * exp(-4 / 2)]
    assert weights == {"0": pytest.approx(1 - sum(other)), "1": pytest.approx(other[0]), "2": pytest.approx(other[1])}


def test_attention_never_exceeds_one_and_fades():
    assert weights_in(models_of(0.0, 0.0, 0.0), "1", 5.0, 1.0) == {"1": 0.0, "0": 0.5, "2": 0.5}
    assert weights_in(models_of(0.0, 9.0), "0", 0.1, 0.1)["0"] == 1.0
    shuffled = dict(reversed(models_of(0.0, 0.3, 0.7).items()))
    one, other = (weights_in(models, "2", 0.4, 1.0) for models in (models_of(0.0, 0.3, 0.7), shuffled))
    assert list(one.items()) == list(other.items())


def test_every_client_is_sent_its_own_mixture():
    place = world("fedamp", **NORMED)
    method = FedAMP(alpha=0.2, sigma=3.0)
    first = place.network.initial(1)
    server = begin(place)
    assert [others for _, others in method.mixtures(server, ["0"])] == [0.0]
    same(next(method.mixtures(server, ["0"]))[0], first)
    models = {str(n): {k: t + n / 100 if t.is_floating_point() else t + n for k, t in first.items()} for n in range(2)}
    server.memory["models"] = models
    names = [name for name in first if name not in place.network.buffers]
    far = sum(first[name].numel() for name in names)
    share = 0.2 / 3 * exp(-far / 100**2 / 3)
    assert share > 1e-3
    (mixture, others), (strange, _) = method.mixtures(server, ["1", "2"])
    assert others == pytest.approx(share, rel=1e-4)
    for name, tensor in first.items():
        expected = tensor + (1 - share) / 100 if tensor.is_floating_point() else tensor + 1
        assert torch.allclose(mixture[name], expected, atol=1e-6)
    same(strange, first)  # somebody who never reported


def test_without_a_sigma_the_median_distance_is_the_unit():
    """Weights are the same at any size of the model: all distances grow alike."""
    server = begin(world("fedamp"))
    first, names = server.tensors, ["0", "1", "2"]

    def weights(scale):
        steps = dict(zip(names, (0.0, 1.0, 3.0), strict=True))
        server.memory["models"] = {key: {n: t + scale * by for n, t in first.items()} for key, by in steps.items()}
        return [others for _, others in FedAMP(alpha=0.2).mixtures(server, names)]

    expected = [0.2 * (exp(-one / 4) + exp(-other / 4)) for one, other in ((1, 9), (1, 4), (9, 4))]
    assert weights(0.01) == pytest.approx(expected, rel=1e-6)
    assert weights(1.0) == pytest.approx(expected, rel=1e-6)
    assert weights(0.0) == pytest.approx([0.4] * 3), "equal models: any weights give the same mixture"
    assert usual({"0": {}}) == 1.0, "nobody else"


def test_by_default_the_others_count(tmp_path):
    """On any model, from the second round on; the ledger says how much."""
    for model in ({}, NORMED):
        result = run("fedamp", tmp_path, run={"rounds": 2}, **model)
        told = [(row["round"], row["others"]) for row in result.rows("clients") if row["job"] == "work"]
        assert [others for round, others in told if round == 0] == [0.0] * 3
        assert all(0.03 < others < 0.2 for round, others in told if round == 1)


def test_fedamp_is_held_near_its_mixture(tmp_path):
    result = run("fedamp", tmp_path / "a", **ALONE, method={"alpha": 0.5, "weight": 0.35})
    place = world("fedamp", **ALONE, method={"alpha": 0.5, "weight": 0.35})
    client, common = place.client(task_of(place), {}), place.network.initial(1)
    own = steps_by_hand(place, common, client.plan(), pull=0.7, anchor=common)
    mark = "client0/own/"
    close({n.removeprefix(mark): t for n, t in final(result).items() if n.startswith(mark)}, own)
    assert result.summary["global_accuracy"] is None


def test_models_that_are_alike_draw_nearer(tmp_path):
    """With a wide sigma the clients' models end nearer to each other than without attention."""

    def spread(name, **method):
        kept = final(run("fedamp", tmp_path / name, run={"rounds": 3}, method={"weight": 1.0, **method}))
        models = [
            torch.cat([t.flatten() for n, t in sorted(kept.items()) if n.startswith(f"client{c}/own/")])
            for c in range(3)
        ]
        return float(sum((one - other).norm() for one in models for other in models))

    assert spread("near", alpha=3.0, sigma=10.0) < spread("apart", alpha=3.0, sigma=1e-6)


@pytest.mark.parametrize("method", ["fedrep", "ditto", "fedamp"])
def test_whole_models_only(method):
    with pytest.raises(InputError, match=r"leave \[cut\] out"):
        resolve(sections_of(method, cut={"name": "prefix"}))
