"""Where the server's public images come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedloom
from fedloom.errors import InputError
from fedloom.runs.study import resolve
from fedloom.runs.world import world_of


def world(**data: object):
    sections = {"method": {"name": "fedgse"}, "data": {"limit": 1000, **data}, "fleet": {"clients": 4}}
    made = world_of(resolve(sections).model_dump_json())
    made.check()
    return made


def another(path, size: int = 8, classes: int = 10):
    x = np.full((40, size, size), 7, np.uint8)
    np.savez(path, x_train=x, y_train=np.arange(40) % classes, x_test=x[:10], y_test=np.arange(10) % classes)
    return str(path)


def test_images_held_out_are_in_nobodys_part():
    made = world(public=20)
    assert len(made.public) == 20
    assert not set(made.public.rows.tolist()) & set(made.split.train.rows.tolist())


def test_padding_is_everybodys(tmp_path):
    """Images, the model that is made for them, and public images of another data set."""
    made = world(pad=11, public=20, public_from=another(tmp_path / "other.npz"))
    assert made.network.shape == (1, 11, 11)
    assert made.images.x.shape[1:] == made.public.images.x.shape[1:] == (1, 11, 11)
    assert (made.public.images.x[:, :, 1:9, 1:9] == 7).all()
    with pytest.raises(InputError, match=r"data\.pad is 7, but images of 'digits' are 8 x 8"):
        world(pad=7)


def test_another_data_set_leaves_the_training_images_alone(tmp_path):
    made, without = world(public=20, public_from=another(tmp_path / "other.npz")), world(public=20)
    assert len(made.public) == 20
    assert (made.public.images.x == 7).all()
    assert torch.equal(made.public.images.y[made.public.rows].bincount(), torch.full((10,), 2))
    assert len(made.split.train.rows) > len(without.split.train.rows)


def test_clients_give_copies():
    made = world(public=5, public_from="clients")
    assert set(made.public.rows.tolist()) <= set(made.split.train.rows.tolist())
    assert len(set(made.public.rows.tolist())) == 5


def test_fedgse_runs_on_another_data_set(tmp_path):
    settings = {"data.limit": 200, "data.public": 20, "data.public_from": another(tmp_path / "other.npz")}
    result = fedloom.run("fedgse", set=settings, clients=4, rounds=1, out=tmp_path, fleet="low", engine="local")
    assert result.summary["failures"] == 0


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"public_from": "clients"}, r"data\.public is 0; say how many"),
        ({"public": 100, "public_from": "clients"}, "at most 1 % of their images: data.public is 100, allowed: up to"),
        ({"public": 10, "public_from": "mnisst"}, "mnisst"),
    ],
)
def test_what_cannot_be(data, sentence):
    with pytest.raises(InputError, match=sentence):
        world(**data)


def test_other_shapes_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"are \(1, 9, 9\) of 10 classes; 'digits' has \(1, 8, 8\) of 10"):
        world(public=10, public_from=another(tmp_path / "other.npz", size=9))
