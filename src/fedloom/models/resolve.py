"""From a model's name and settings to the network, and its first weights from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedloom.errors import InputError, kind_of
from fedloom.registry import find
from fedloom.settings import allowed, built, checked

__all__ = ["build", "check_logits", "initialise"]


def build(name: str, *, channels: int, classes: int, size: int, **fields: Any) -> nn.Module:
    """Make the network of a registered name or an import path `package.module:Net`.

    It gets those of channels, classes and size (side of the image) that it names, and the fields.

    >>> build("mlp", channels=1, classes=10, size=8, hidden=[32]).classifier[1]
    Linear(in_features=64, out_features=32, bias=True)
    """
    sizes = {"channels": channels, "classes": classes, "size": size}
    for what, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{what} of model '{name}' must be a whole number above 0; got {value!r}")
    what, make = f"model '{name}'", find("model", name)
    names, anything = allowed(what, make)
    given = {key: value for key, value in sizes.items() if anything or key in names}
    arguments = given | checked(what, make, fields, reserved=given)
    network = built(what, make, arguments)
    if not isinstance(network, nn.Module):
        raise InputError(f"model '{name}' makes {kind_of(network)}; expected a torch.nn.Module")
    _check_parameters(what, network)
    return network


def _check_parameters(what: str, network: nn.Module) -> None:
    """Refuse a model that cannot be trained, or not as it is."""
    parameters = dict(network.named_parameters())
    if not parameters:
        raise InputError(f"{what} has no parameters, so there is nothing to train")
    for path, parameter in parameters.items():
        if is_lazy(parameter):
            raise InputError(
                f"{what} does not know the shape of '{path}' before its first image; name the sizes of its lazy "
                "layers, or let it see one image of zeros at the end of its __init__"
            )
        if parameter.dtype != torch.float32:
            raise InputError(
                f"{what} has '{path}' in {str(parameter.dtype).removeprefix('torch.')}; expected float32: what a run "
                "computes in is engine.precision"
            )


def initialise(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a network whose first weights depend on the seed alone; PyTorch's global generators are left as they were.

    >>> network = initialise(lambda: build("mlp", channels=1, classes=10, size=8), seed=7)
    """
    # torch.manual_seed would seed every GPU as well; here only the CPU draws.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return make()


def check_logits(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Refuse a model that does not turn images into logits; without this, every client would fail on it."""
    what, images = f"model {type(module).__name__}", torch.zeros(2, *shape)
    training, threads = module.training, torch.get_num_threads()
    torch.set_num_threads(1)  # workers are forked later, and threads do not survive that
    try:
        with torch.no_grad():
            logits = module.eval()(images)
    except Exception as error:
        raise InputError(
            f"{what} fails on images of shape {list(images.shape)}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}{_oblong(shape)}"
        ) from error
    finally:
        module.train(training)
        torch.set_num_threads(threads)
    got = list(logits.shape) if isinstance(logits, Tensor) else kind_of(logits)
    if got != [2, classes]:
        raise InputError(
            f"{what} must answer images of shape {list(images.shape)} with logits of shape {[2, classes]}, "
            f"one for each class; got {got}"
        )


def _oblong(shape: tuple[int, ...]) -> str:
    """Advice for images that are not square; nothing for those that are."""
    height, width = shape[-2:]
    squared = f"; models are told one side of an image: make them square with --set data.size={max(shape[-2:])}"
    return "" if height == width else squared
