"""Every registered network: shapes, parameter counts and MACs against hand-computed and published numbers."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
import torch_pruning
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import fedloom.models
from fedloom.errors import InputError
from fedloom.models.resolve import build
from fedloom.registry import describe, entries, find

for module in pkgutil.iter_modules(fedloom.models.__path__, "fedloom.models."):
    importlib.import_module(module.name)

NAMES = [
    "lenet5",
    "lenet5_bn",
    "alexnet",
    "alexnet_bn",
    "cnn",
    "cnn4",
    "digit_cnn",
    "evo_mnist",
    "evo_cifar",
    "evo_mobile",
    "resnet18",
    "resnet34",
    "mlp",
]
SMALL = {
    "alexnet": {"hidden": 64},
    "alexnet_bn": {"hidden": 64},
    "evo_cifar": {"width": 0.25},
    "resnet18": {"width": 0.25},
    "resnet34": {"width": 0.25},
}


def shape_only(name: str, channels: int, classes: int, size: int, **fields: object) -> nn.Module:
    """The network without its numbers: fast, and PyTorch still checks every shape."""
    with torch.device("meta"):
        return build(name, channels=channels, classes=classes, size=size, **fields)


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def macs(network: nn.Module, channels: int, size: int) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()(torch.empty(1, channels, size, size, device="meta"))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("channels", "size"),
    [(1, 8), (1, 16), (1, 28), (1, 32), (3, 8), (3, 16), (3, 28), (3, 32), (3, 9), (3, 27), (3, 64)],
)
@pytest.mark.parametrize("name", NAMES)
def test_any_image_gives_logits(name: str, channels: int, size: int) -> None:
    network = shape_only(name, channels, 7, size)
    assert network(torch.empty(2, channels, size, size, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("name", NAMES)
def test_trains_on_the_embedded_digits_size(name: str) -> None:
    network = build(name, channels=1, classes=10, size=8, **SMALL.get(name, {}))
    network(torch.randn(4, 1, 8, 8)).square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


def test_these_are_all_there_are() -> None:
    searched = {"darts", "darts_search", "narrowed"}  # tried with the searches that make them
    ours = {name for name, entry in entries("model").items() if entry.path.startswith("fedloom.models.")}
    assert ours - searched == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_registered_with_a_summary_and_a_paper(name: str) -> None:
    entry = describe("model", name, find("model", name))
    assert entry.path.startswith("fedloom.models.")
    assert entry.summary.endswith(".")
    assert entry.paper
    assert {"channels", "classes"} <= {field["name"] for field in entry.fields}


@pytest.mark.parametrize(
    ("name", "channels", "classes", "size", "fields", "expected"),
    [
        ("lenet5", 1, 10, 28, {}, 61_706),
        ("lenet5", 1, 10, 32, {}, 61_706),
        ("lenet5", 3, 10, 32, {}, 62_006),
        ("lenet5", 1, 10, 8, {}, 156 + 2_416 + 65 * 120 + 121 * 84 + 85 * 10),
        ("lenet5_bn", 1, 10, 28, {}, 61_706 + 2 * (6 + 16 + 120 + 84)),
        ("alexnet", 3, 1000, 224, {}, 61_100_840),
        ("alexnet", 3, 10, 32, {}, 23_272_266),
        ("alexnet_bn", 3, 10, 32, {}, 23_272_266 + 2 * (64 + 192 + 384 + 256 + 256 + 4096 + 4096)),
        ("cnn", 1, 10, 28, {}, 1_663_370),
        ("cnn4", 1, 10, 32, {}, 640 + 73_856 + 295_168 + 1_180_160 + 2 * 960 + 5_130),
        ("cnn4", 1, 10, 8, {"widths": (4, 8)}, 40 + 296 + 2 * 12 + 90),
        ("digit_cnn", 3, 10, 28, {}, 14_219_210),
        ("resnet18", 3, 10, 32, {}, 11_173_962),
        ("resnet34", 3, 10, 32, {}, 21_282_122),
        ("mlp", 1, 10, 28, {"hidden": (200, 200)}, 199_210),
        ("mlp", 1, 10, 8, {"hidden": ()}, 650),
    ],
)
def test_parameters(
    *, name: str, channels: int, classes: int, size: int, fields: dict[str, object], expected: int
) -> None:
    assert count(shape_only(name, channels, classes, size, **fields)) == expected


@pytest.mark.parametrize(
    ("name", "channels", "classes", "size", "convolutions", "linears", "norms", "expected_macs"),
    [  # published: 369 k + 5.2 M and 34.61 M MACs; 23.23 M and 187.9 M; 9.94 M and 19.73 M, cut to these digits
        ("evo_mnist", 1, 10, 28, 369_664, 5_255_178, 896, 34_606_080),
        ("evo_cifar", 3, 10, 32, 2_251_584, 20_986_890, 2_304, 187_901_952),
        ("evo_mobile", 1, 62, 28, 444_864, 9_502_782, 2_944, 19_734_912),
    ],
)
def test_evolution_networks_meet_the_published_numbers(
    *,
    name: str,
    channels: int,
    classes: int,
    size: int,
    convolutions: int,
    linears: int,
    norms: int,
    expected_macs: int,
) -> None:
    network = shape_only(name, channels, classes, size)
    kinds = {nn.Conv2d: convolutions, nn.Linear: linears, nn.BatchNorm2d: norms}
    for kind, expected in kinds.items():
        assert sum(count(layer) for layer in network.modules() if isinstance(layer, kind)) == expected
    assert count(network) == convolutions + linears + norms
    assert macs(network, channels, size) == expected_macs


def test_evolution_networks_are_narrowed_everywhere() -> None:
    network = shape_only("evo_cifar", 3, 10, 32, width=0.1)
    kept = [layer.weight.shape[0] for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert kept == [7, 20, 39, 26, 26, 410, 103, 10]  # 6.4, 19.2, 38.4, 25.6, 25.6, 409.6, 102.4, rounded up; classes


@pytest.mark.parametrize(
    ("name", "channels", "size", "shape"),
    [
        ("lenet5", 1, 28, (16, 5, 5)),
        ("lenet5", 1, 32, (16, 5, 5)),
        ("lenet5", 1, 8, (16, 2, 2)),
        ("lenet5", 1, 16, (16, 4, 4)),
        ("lenet5", 3, 64, (16, 13, 13)),
        ("cnn", 1, 28, (64, 7, 7)),
        ("alexnet", 3, 224, (256, 6, 6)),
        ("alexnet", 3, 64, (256, 4, 4)),
        ("digit_cnn", 3, 28, (128, 7, 7)),
        ("evo_mnist", 1, 28, (256, 4, 4)),
        ("evo_cifar", 3, 32, (256, 4, 4)),
        ("evo_mobile", 1, 28, (512, 4, 4)),
    ],
)
def test_classic_feature_maps(name: str, channels: int, size: int, shape: tuple[int, ...]) -> None:
    network = shape_only(name, channels, 10, size)
    assert network.features(torch.empty(2, channels, size, size, device="meta"))[0].shape == shape


def test_resnet_stages_halve_the_image() -> None:
    network = shape_only("resnet18", 3, 10, 32, width=0.5)
    maps = network.stem(torch.empty(2, 3, 32, 32, device="meta"))
    shapes = []
    for stage in network.stages:
        maps = stage(maps)
        shapes.append(tuple(maps.shape[1:]))
    assert shapes == [(32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4)]


@pytest.mark.parametrize("name", ["lenet5", "cnn4", "evo_mobile", "resnet18"])
def test_layers_are_defined_in_the_order_they_run(name: str) -> None:
    """Counting layers from the output (FedCPN's p) relies on it."""
    network = build(name, channels=1, classes=10, size=8, **SMALL.get(name, {}))
    ran: list[nn.Module] = []
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: ran.append(layer))
    network(torch.randn(2, 1, 8, 8))
    assert ran == layers


@pytest.mark.parametrize("name", NAMES)
def test_traces_without_touching_values(name: str) -> None:
    network = build(name, channels=3, classes=10, size=8, **SMALL.get(name, {})).eval()
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(torch.fx.symbolic_trace(network)(images), network(images))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "evo_mobile"])
def test_runs_with_narrower_tensors(name: str) -> None:
    """Halves every layer but the first's input and the last's output; depthwise layers need other `groups` for that."""
    network = build(name, channels=3, classes=10, size=16, **SMALL.get(name, {}))
    layers = [key for key, layer in network.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    halves = {}
    for key, tensor in network.state_dict().items():
        owner = key.rpartition(".")[0]
        rows = slice(None) if owner == layers[-1] else slice(tensor.shape[0] // 2 if tensor.ndim else 0)
        columns = slice(None) if owner == layers[0] or tensor.ndim < 2 else slice(tensor.shape[1] // 2)
        halves[key] = tensor if not tensor.ndim else tensor[rows, columns] if tensor.ndim > 1 else tensor[rows]
    assert functional_call(network, halves, (torch.randn(2, 3, 16, 16),)).shape == (2, 10)


@pytest.mark.parametrize("name", NAMES)
def test_unit_graph_can_be_cut(name: str) -> None:
    """torch-pruning finds groups in every network, and the network still runs when each of them is halved."""
    images = torch.randn(2, 3, 8, 8)
    network = build(name, channels=3, classes=10, size=8, **SMALL.get(name, {})).eval()
    graph = torch_pruning.DependencyGraph().build_dependency(network, example_inputs=images)
    output = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    before = count(network)
    roots = [
        (group[0].dep.target.module, group[0].dep.handler) for group in graph.get_all_groups(ignored_layers=[output])
    ]
    for layer, cut in roots:
        graph.get_pruning_group(layer, cut, list(range(graph.get_out_channels(layer) // 2))).prune()
    assert roots
    assert count(network) < 0.6 * before
    assert network(images).shape == (2, 10)


def test_too_small_an_image_is_the_users_error() -> None:
    with pytest.raises(InputError, match="images of 3x3 pixels are too small"):
        build("lenet5", channels=1, classes=10, size=3)
    with pytest.raises(InputError, match="too small"):
        build("cnn4", channels=1, classes=10, size=8, widths=(4,) * 6)
