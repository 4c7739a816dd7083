"""From name and fields to a network, with errors that say what to do, and weights that follow from the seed."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

import fedloom.models.cnn
import fedloom.models.mlp
import fedloom.models.resnet  # noqa: F401
from fedloom.errors import InputError
from fedloom.models.resolve import build, initialise

IMAGE: dict[str, Any] = {"channels": 1, "classes": 10, "size": 8}


class OwnNet(nn.Module):
    """A user's network that wants to know two of the three sizes and has fields of all kinds."""

    def __init__(
        self,
        classes: int,
        size: int,
        depth: int,
        *,
        kind: Literal["a", "b"] = "a",
        rate: float = 0.5,
        flag: bool = False,
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.given = (classes, size, depth, kind, rate, flag)


class Open(nn.Module):
    """A user's network that takes whatever comes."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.given = given


def constant(classes: int) -> int:
    return classes


def linear(classes: int, bias=True) -> nn.Module:  # type: ignore[no-untyped-def]
    return nn.Linear(2, classes, bias=bias)


NOT_CALLABLE = 3
HERE = __name__


def test_passes_the_sizes_that_are_named() -> None:
    assert build(f"{HERE}:OwnNet", **IMAGE, depth=2).given == (10, 8, 2, "a", 0.5, False)
    assert build(f"{HERE}:Open", **IMAGE, extra="x").given == {**IMAGE, "extra": "x"}
    assert build(f"{HERE}:linear", **IMAGE, bias=None).bias is None


def test_fields_reach_the_network_as_their_type() -> None:
    network = build("mlp", **IMAGE, hidden=[16, 8])
    assert [layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear)] == [16, 8, 10]
    given = build(f"{HERE}:OwnNet", **IMAGE, depth=2, kind="b", rate=1, flag=True).given
    assert given[3:] == ("b", 1.0, True)
    assert isinstance(given[4], float)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("cnn5", {}, "unknown model 'cnn5'"),
        ("mlp", {"hiden": (3,)}, "unknown setting of model 'mlp' 'hiden'; allowed: hidden. Did you mean 'hidden'?"),
        ("cnn", {"widths": (3,)}, "model 'cnn' has no settings; got 'widths'"),
        ("mlp", {"hidden": 64}, "hidden of model 'mlp' is wrong: input should be a valid array; got 64"),
        (
            "mlp",
            {"hidden": (8, "x")},
            "hidden[1] of model 'mlp' is wrong: input should be a valid integer; got (8, 'x')",
        ),
        ("mlp", {"hidden": (0,)}, "hidden[0] of model 'mlp' is wrong: input should be greater than 0; got (0,)"),
        ("cnn4", {"widths": ()}, "widths of model 'cnn4' is wrong"),
        (
            "resnet18",
            {"width": "half"},
            "width of model 'resnet18' is wrong: input should be a valid number; got 'half'",
        ),
        ("resnet18", {"width": 0}, "input should be greater than 0; got 0"),
        ("resnet18", {"width": float("nan")}, "input should be a finite number of at most 64 bits; got nan"),
        (f"{HERE}:OwnNet", {}, "needs a value for depth; got no settings"),
        (f"{HERE}:OwnNet", {"rate": 0.1}, "needs a value for depth; got rate"),
        (f"{HERE}:OwnNet", {"depth": True}, "input should be a valid integer; got True"),
        (f"{HERE}:OwnNet", {"depth": torch.tensor(1)}, "input should be a valid integer; got tensor(1)"),
        (f"{HERE}:OwnNet", {"depth": 1, "kind": "c"}, "input should be 'a' or 'b'; got 'c'"),
        (f"{HERE}:constant", {}, "makes an int; expected a torch.nn.Module"),
        (f"{HERE}:NOT_CALLABLE", {}, "expected a class or function"),
        (f"{HERE}:Missing", {}, "cannot be imported"),
        ("no.such.module:Net", {}, "cannot be imported"),
    ],
)
def test_wrong_input_is_one_sentence(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build(name, **IMAGE, **fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["channels", "classes", "size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_sizes_are_whole_numbers(what: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{what} of model 'mlp' must be a whole number above 0"):
        build("mlp", **{**IMAGE, what: value})


def test_weights_follow_from_the_seed() -> None:
    first, again, other = (initialise(lambda: build("cnn", **IMAGE), seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_global_generator_is_left_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    initialise(lambda: build("cnn", **IMAGE), seed=5)
    assert torch.equal(torch.rand(4), expected)


def test_global_generator_is_left_alone_when_building_fails() -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(InputError):
        initialise(lambda: build("mlp", **IMAGE, hidden=(-1,)), seed=5)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_weights_are_drawn_on_the_cpu_whatever_the_default_device() -> None:
    expected = initialise(lambda: build("mlp", **IMAGE), seed=5).state_dict()
    with torch.device("meta"):
        drawn = initialise(lambda: build("mlp", **IMAGE), seed=5).state_dict()
    assert all(torch.equal(expected[key], drawn[key]) for key in expected)
