"""FedES: chromosomes of any model, the cases in which it must be FedAvg, who votes, who survives, what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from time import process_time

import numpy as np
import pytest
import torch

from fedloom.encoding import Sparse, dense
from fedloom.engine.reference import Reference
from fedloom.errors import InputError
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedes import redrawn
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.chromosome import Genes, largest
from fedloom.policies.objective import CrossEntropy
from fedloom.policies.optimizer import SGD
from fedloom.policies.score import Activation, Scale
from fedloom.readings import Accuracy
from fedloom.runs.study import resolve
from fedloom.runs.world import world_of
from fedloom.steps import Descent
from fedloom.types import Fit, Images, Measure, Plan, Samples
from tests.contract.study import final
from tests.methods.tiny import run, same, sections_of, server_of
from tests.submodels.federation import Federation, solved

LENET = {
    "model": {"name": "lenet5_bn", "hidden": None},
    "engine": {"precision": "float32"},
    "data": {"validation": 0.2},
}
ONES = {"method": {"first": 1.0, "sigma": 0.0, "redraw": False}}


@dataclass(frozen=True)
class OnTheSameSubset(FedAvg):
    """FedAvg on the training images that FedES draws."""

    def work(self, client, task):
        return (yield from super().work(redrawn(client), task))


def network(name, channels=1, classes=10, size=28):
    return Network(lambda: build(name, channels=channels, classes=classes, size=size), (channels, size, size), classes)


@pytest.mark.parametrize(
    ("name", "shape", "units", "matrices"),
    [
        ("evo_mnist", (1, 10, 28), [64, 128, 256, 1024, 1024], 3),
        ("evo_cifar", (3, 10, 32), [64, 192, 384, 256, 256, 4096, 1024], 3),
        ("evo_mobile", (1, 62, 28), [64, 128, 256, 512, 512, 1024, 1024], 3),
        ("lenet5_bn", (1, 10, 28), [6, 16, 120, 84], 3),
    ],
)
def test_genes_of_the_papers_networks(name, shape, units, matrices):
    """L = N_c + 2 N_f - 1: one gene a convolution (or separable block), two a linear layer, one for the last."""
    of = network(name, *shape)
    genes = Genes.of(of)
    assert [of.units.sizes[group] for group in genes.groups] == units
    assert len(genes.matrices) == matrices
    assert len(genes) == len(genes.names) == len(units) + matrices


def test_genes_of_a_residual_network():
    of = network("resnet18", 3, 10, 32)
    genes = Genes.of(of)
    assert set(genes.groups) == set(of.units.sizes)
    assert genes.matrices == tuple(n for n, t in of.module.named_parameters() if t.ndim == 2)


def test_largest_weights_stay_and_nothing_else():
    genes = Genes(("a",), ("w",))
    w = torch.tensor([[0.1, -5.0, 2.0], [0.0, 1.0, -0.2]])
    pruned = genes.prune({"w": w, "b": w[0]}, [1.0, 0.5])
    assert isinstance(pruned["w"], Sparse)
    assert torch.equal(dense(pruned["w"]), torch.tensor([[0.0, -5.0, 2.0], [0.0, 1.0, 0.0]]))
    assert pruned["b"] is not None
    assert pruned["w"].numel() == 3
    assert genes.prune({"w": w}, [0.2, 1.0])["w"] is w
    assert len(largest(torch.zeros(7), 0.3)) == ceil(0.3 * 7)
    assert genes.prune({"w": w.to("meta")}, [1.0, 0.5])["w"].numel() == 3, "a device is not asked how many"


def test_scale_is_the_norms_scale_else_the_activation():
    of, generator = network("evo_mnist"), torch.Generator().manual_seed(0)
    tensors = of.initial(0)
    norms = [name for name in of.names if name in of.norms and name.endswith("weight")]
    tensors |= {name: torch.randn(tensors[name].shape, generator=generator) for name in norms}
    x = torch.randint(0, 256, (9, 1, 28, 28), dtype=torch.uint8, generator=generator)
    images = Images(x, torch.arange(9), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    trainer, samples = Reference(of), Samples(images, torch.arange(9))
    scale, activation = trainer.solve([Measure(tensors, what, samples, 4) for what in (Scale(), Activation())])
    groups = list(of.units.sizes)
    for group, name in zip(groups[:3], norms, strict=True):
        assert torch.allclose(scale[group] / 9, tensors[name].abs().double())
    for group in groups[3:]:
        assert torch.equal(scale[group], activation[group])


def test_units_are_kept_group_by_group():
    units = network("lenet5_bn").units
    one, two, *rest = units.sizes
    assert units.kept({one: 0.5, two: 1.0}) == {one: 3, two: 16, **{name: units.sizes[name] for name in rest}}
    with pytest.raises(InputError, match=r"capacity must be in \(0, 1\]; got 0"):
        units.kept({one: 0.0})


@pytest.mark.parametrize("changes", [{}, LENET], ids=["mlp", "lenet5_bn"])
def test_ones_and_sigma_zero_are_fedavg_exactly(changes, tmp_path):
    changes = {"data": {"validation": 0.2}, **changes}
    same(server_of(run("fedavg", tmp_path, **changes)), server_of(run("fedes", tmp_path, **changes, **ONES)))


def test_ones_are_fedavg_on_the_images_drawn_in_the_round(tmp_path):
    drawn = {"method": {**ONES["method"], "redraw": True}}
    expected = server_of(run(f"{__name__}:OnTheSameSubset", tmp_path, **LENET))
    found = server_of(run("fedes", tmp_path, **LENET, **drawn))
    same(expected, found)
    fixed = server_of(run("fedes", tmp_path, **LENET, **ONES))
    assert any(not torch.equal(found[name], fixed[name]) for name in found)


def test_validation_images_are_drawn_anew_and_never_trained_on():
    federation = Federation("fedes", **LENET)
    held = []
    for round in range(2):
        before = federation.client(1, round)
        after = redrawn(before)
        train, validation = (set(part.rows.tolist()) for part in (after.train, after.validation))
        assert not train & validation
        assert train | validation == set(before.train.rows.tolist()) | set(before.validation.rows.tolist())
        assert (len(after.train), len(after.validation)) == (len(before.train), len(before.validation))
        held.append(validation)
        assert redrawn(replace(before, train=replace(before.train, augment=torch.flip))).train.augment is torch.flip
    assert held[0] != held[1]


def test_two_candidates_a_client_and_the_better_or_smaller_survives():
    federation = Federation("fedes", **LENET, method={"sigma": 0.2})
    genes, offspring_won = Genes.of(federation.network), set()
    for _ in range(4):
        population = federation.method.population(federation.server, federation.fleet)
        federation.round()
        assert len(federation.engine.fits) == 2 * len(federation.engine.outcomes)
        for number, outcome in enumerate(federation.engine.outcomes):
            task, report = federation.engine.tasks[number], outcome.report
            both = [task.tensors["chromosome"][name].numpy() for name in ("parent", "offspring")]
            assert np.array_equal(both[0], population["genes"][outcome.client])
            fits = federation.engine.fits[2 * number : 2 * number + 2]
            client = redrawn(federation.world.client(task, {}))
            found = []
            for fit, chromosome in zip(fits, both, strict=True):
                kept = federation.network.units.kept(genes.units(chromosome))
                assert {n: t.shape for n, t in fit.tensors.items()} == federation.network.units.shapes(kept)
                left = genes.prune(solved(federation.world, fit).tensors, chromosome.tolist())
                read = solved(
                    federation.world, Measure({n: dense(v) for n, v in left.items()}, Accuracy(), client.validation)
                )
                found.append((float(read["right"].sum()), -sum(v.numel() for v in left.values()), left))
            won = int(found[1][:2] > found[0][:2])
            assert report.numbers["won"] == won
            assert [report.numbers[name] for name in genes.names] == both[won].tolist()
            assert -found[won][1] == outcome.entry()["parameters"]
            for name, value in found[won][2].items():
                assert torch.equal(dense(value), dense(report.tensors[name])), name
            offspring_won.add(won)
    assert offspring_won == {0, 1}


def test_pruned_and_dropped_elements_do_not_vote():
    federation = Federation("fedes", **LENET, method={"first": 0.6, "sigma": 0.15})
    before = {name: tensor.clone() for name, tensor in federation.server.tensors.items()}
    after = federation.round().tensors
    units, untouched = federation.network.units, 0
    total = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in before.items()}
    count = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in before.items()}
    for outcome in federation.engine.outcomes:
        report, plan = outcome.report, units.plan(outcome.report.where)
        for name, value in report.tensors.items():
            kept = value.mask if isinstance(value, Sparse) else torch.ones(value.shape, dtype=torch.bool)
            rows = [torch.arange(size) for size in before[name].shape]
            for dim, places in plan.get(name, ()):
                rows[dim] = rows[dim][places]
            index = torch.meshgrid(*rows, indexing="ij") if rows else ()
            total[name][index] += torch.where(kept, dense(value).double(), 0.0) * report.weight
            count[name][index] += kept.double() * report.weight
    for name, old in before.items():
        mean = total[name] / count[name]
        mean = mean if old.is_floating_point() else mean.round()
        assert torch.equal(after[name], torch.where(count[name] > 0, mean.to(old.dtype), old)), name
        untouched += int((count[name] == 0).sum())
    assert untouched > 0
    sparse = [v for o in federation.engine.outcomes for v in o.report.tensors.values() if isinstance(v, Sparse)]
    assert sparse
    for value in sparse:
        elements = torch.Size(value.shape).numel()
        assert value.nbytes == 4 * value.numel() + min(ceil(elements / 8), 4 * value.numel())


def test_the_subnetwork_is_really_smaller():
    """Parameters, multiply-accumulates and bytes as computed by hand; a step takes less time."""
    of = network("evo_mnist")
    whole, rates = of.initial(0), dict.fromkeys(of.units.sizes, 0.25)
    small = of.units.take(whole, {group: torch.arange(kept) for group, kept in of.units.kept(rates).items()})
    c1, c2, c3, f1, f2 = 16, 32, 64, 256, 256
    macs = 28**2 * 9 * c1 + 14**2 * 9 * c1 * c2 + 7**2 * 9 * c2 * c3 + 16 * c3 * f1 + f1 * f2 + 10 * f2
    assert of.macs(small) == macs < of.macs(whole) / 10
    weights = 9 * c1 + 9 * c1 * c2 + 9 * c2 * c3 + 16 * c3 * f1 + f1 * f2 + 10 * f2
    assert sum(t.numel() for n, t in small.items() if t.ndim > 1) == weights
    pruned = Genes.of(of).prune(small, [0.25] * 5 + [0.5, 0.5, 1.0])
    linear = 16 * c3 * f1
    assert pruned["classifier.1.weight"].nbytes == 4 * linear // 2 + linear // 8
    images = Images(torch.zeros(32, 1, 28, 28, dtype=torch.uint8), torch.zeros(32, dtype=torch.long),
                    torch.zeros(1, 1, 1), torch.ones(1, 1, 1))  # fmt: skip
    plan, fixed = Plan(images, [(torch.arange(32),)] * 2, [0, 0], 2, 0), {"lr": torch.tensor(0.01)}
    trainer, seconds, threads = Reference(of), [], torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other on a busy machine tell its load, not the model's size
    for tensors in (whole, small):
        fit, best = Fit(tensors, Descent(CrossEntropy(), SGD()), plan, fixed), float("inf")
        for _ in range(2):
            begin = process_time()
            (answer,) = trainer.solve([fit])
            best = min(best, process_time() - begin)
        assert answer.macs == 3 * of.macs(tensors) * 64
        seconds.append(best)
    torch.set_num_threads(threads)
    assert seconds[1] < 0.7 * seconds[0]


def test_same_seed_same_evolution(tmp_path):
    def evolution(**changes):
        return {n: t for n, t in final(run("fedes", tmp_path, **LENET, **changes)).items() if "evolution" in n}

    one, two, other = evolution(), evolution(), evolution(run={"seed": 2})
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["server/memory/evolution/genes"], other["server/memory/evolution/genes"])


def test_capacity_bounds_the_structured_genes():
    federation = Federation("fedes", **LENET, fleet={"clients": 4, "name": "low"})
    capacity = federation.fleet.columns["capacity"]
    assert capacity.min() < 1
    for _ in range(3):
        federation.round()
    population = federation.server.memory["evolution"]
    groups = len(Genes.of(federation.network).groups)
    assert (population["genes"][:, :groups] <= capacity[:, None]).all()
    assert population["genes"][:, groups:].max() > capacity.min()


def test_what_was_found_is_the_mean_of_those_who_tried():
    federation = Federation("fedes", **LENET, fleet={"clients": 4, "onlookers": 0.5})
    for _ in range(3):
        federation.round()
    genes = federation.server.memory["evolution"]["genes"]
    trying = ~federation.fleet.columns["onlooker"]
    assert trying.sum() == 2
    assert (genes[~trying] == 0.8).all()
    assert list(federation.method.found(federation.server).values()) == genes[trying].mean(axis=0).tolist()


def test_local_model_is_the_last_survivor():
    federation = Federation("fedes", **LENET)
    federation.round()
    outcome = federation.engine.outcomes[0]
    client = federation.world.client(federation.engine.tasks[0], outcome.state)
    own = federation.answer(federation.method.final(client, client.task))
    assert {
        name: torch.equal(tensor, dense(outcome.report.tensors[name])) for name, tensor in own.items()
    } == dict.fromkeys(own, True)


def test_other_cuts_and_importance_compose(tmp_path):
    for cut in ({"score": "activation"}, {"name": "random"}, {"name": "prefix"}):
        result = run("fedes", tmp_path, **LENET, cut=cut)
        assert result.summary["failures"] == 0
    assert all(0.05 <= rate <= 1 for rate in result.summary["found"].values())


@pytest.mark.parametrize(
    ("score", "temperature"), [("activation", 0.02), ("scale", 0.02), ("gradient", 0.01), ("magnitude", 2.0)]
)
def test_importance_is_a_mean_so_a_temperature_means_the_same_for_all(score, temperature):
    """The same images three or sixty times over say the same: sums would be so many times as sharp."""
    cut = {"score": score, "temperature": temperature}
    federation = Federation("fedes", **LENET, cut=cut, method={"redraw": False})
    client, kept = federation.client(0), []
    for copies in (1, 3, 60):
        validation = replace(client.validation, rows=client.validation.rows.repeat(copies))
        work = federation.method.work(replace(client, validation=validation), client.task)
        kept.append(work.send(solved(federation.world, next(work)))[0].tensors)
    same(kept[0], kept[1])
    same(kept[0], kept[2])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cut": {"name": "whole"}}, "fedes keeps a share of each layer and needs a cut"),
        ({"cut": {"samples": 5}}, "fedes scores units on a client's validation images; leave cut.samples out"),
        ({"method": {"least": 0.9}}, "method.least of fedes must be at most method.first; got 0.9 and 0.8"),
        ({"method": {"first": 0.0}}, "first of method 'fedes' is wrong: input should be greater than 0; got 0.0"),
    ],
)
def test_nonsense_is_refused(changes, said):
    with pytest.raises(InputError) as error:
        resolve(sections_of("fedes", **changes))
    assert said in str(error.value)


def test_without_validation_data_it_is_refused():
    with pytest.raises(InputError, match="fedes needs validation data at every client"):
        world_of(resolve(sections_of("fedes", data={"validation": 0.0})).model_dump_json()).check()


def test_it_learns_and_shrinks(tmp_path):
    changes = {
        "data": {"name": "digits", "limit": 400, "validation": 0.2}, "partition": {"name": "classes:4"},
        "fleet": {"clients": 5}, "train": {"lr": 0.2, "batch_size": 16, "epochs": 2}, "run": {"rounds": 8},
        "model": LENET["model"], "engine": LENET["engine"],
    }  # fmt: skip
    result = run("fedes", tmp_path, **changes)
    assert result.summary["local_accuracy"] > 0.8
    assert result.summary["global_accuracy"] > 0.3
    whole = sum(t.numel() for t in server_of(result).values())
    assert result.summary["mean_parameters"] < 0.8 * whole
