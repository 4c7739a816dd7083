"""Pictures of structures that evolve: the numbers behind them, and that they are drawn."""

from __future__ import annotations

import pytest

from fedloom.errors import InputError
from fedloom.models.resolve import build
from fedloom.network import Network
from fedloom.policies.chromosome import Genes
from fedloom.report.evolution import ablation, compression, layers, pareto, rates, remaining
from tests.methods.tiny import run

LENET = {
    "model": {"name": "lenet5_bn", "hidden": None},
    "engine": {"precision": "float32"},
    "data": {"validation": 0.2},
}


def test_what_remains_of_each_layer():
    """The whole model's count is the supernet's; a half of the units by hand."""
    network = Network(lambda: build("evo_mnist", channels=1, classes=10, size=28), (1, 28, 28), 10)
    names = Genes.of(network).names
    whole = remaining(network, dict.fromkeys(names, 1.0))
    assert sum(each["MACs"][1] for each in whole.values()) == network.macs(network.initial(0))
    assert all(before == after for each in whole.values() for before, after in each.values())
    half = remaining(network, dict.fromkeys(names, 0.5))
    first, second, *_, last = half.values()
    assert first["weights"] == (64 * 9, 32 * 9)
    assert second["MACs"] == (64 * 128 * 9 * 14 * 14, 32 * 64 * 9 * 14 * 14)
    assert last["weights"] == (10240, 10 * 512 * 0.5)  # half of its inputs, and half of what is left of its weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    runs = [run("fedes", out, **LENET, method={"covariance": each}) for each in ("winners", "identity")]
    return [result.folder for result in [*runs, run("fedavg", out, **LENET)]]


def test_pictures_are_drawn(folders, tmp_path):
    made = [
        rates(folders[0], tmp_path / "rates.png"),
        layers(folders[0], tmp_path / "layers.png"),
        compression(folders[0], tmp_path / "compression.png"),
        ablation(folders[:2], tmp_path / "ablation.png"),
        pareto(folders, tmp_path / "pareto.png"),
    ]
    for path in made:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_runs_without_chromosomes_are_refused(folders, tmp_path):
    for draw in (rates, layers):
        with pytest.raises(InputError, match="has no chromosomes to show"):
            draw(folders[2], tmp_path / "none.png")
