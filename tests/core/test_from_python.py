"""What `import fedloom` gives: what is in it, models as classes, a result that can be read."""

from __future__ import annotations

import pytest
from torch import nn

import fedloom
from fedloom.errors import InputError
from fedloom.methods.fedprox import FedProx
from tests.core.small import Plain

SMALL = {"clients": 2, "rounds": 1, "engine": "local", "set": {"data.limit": 60}}


class Net(nn.Module):
    """A linear model of a size that the study sets."""

    def __init__(self, classes: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, classes, bias=bias))

    def forward(self, x):
        return self.layers(x)


def test_run_is_among_its_names():
    assert "run" in dir(fedloom)


def test_a_class_stands_for_its_import_path(tmp_path):
    study = {"model": {"name": "mlp", "hidden": [3]}}
    result = fedloom.run(FedProx, study, model=Net, out=tmp_path, **SMALL)
    assert (result.study.method.name, result.study.model.name) == ("fedprox", "tests.core.test_from_python:Net")
    assert repr(result).startswith("<Result method=fedprox rounds=1 global_accuracy=0.")
    assert repr(result).endswith(f" folder={result.folder}>")


@pytest.mark.parametrize(("model", "got"), [(Plain(), "a Plain"), (lambda classes: Plain(), "<lambda>")])
def test_what_no_other_process_can_import_is_refused(model, got):
    with pytest.raises(InputError, match=r"model takes a name, or a class .* put it into a module of its own") as told:
        fedloom.run("fedavg", model=model, **SMALL)
    assert got in str(told.value)
