"""Every client normalises its images by its own statistics, and nobody else ever sees them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedloom import wire
from fedloom.data.levels import count_levels, moments
from fedloom.engine.local import Local
from fedloom.errors import InputError
from fedloom.fleet.outgoing import arrived
from fedloom.runs.world import World
from fedloom.types import Report, Task
from tests.methods.tiny import close, far, run, server_of, world

PERSONAL = {"data": {"normalise": "personal"}}


def colours(path, *, per_client=6, clients=3, constant=False, unseen=False):
    """Three domains of colour images that differ in light and tint, as a file."""
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(clients), per_client)
    low = np.array([0, 60, 120])[groups % 3][:, None, None, None]
    x = (generator.integers(0, 100, (len(groups), 8, 8, 3)) + low).astype(np.uint8)
    if constant:
        x[..., 1] = 77
    y = np.arange(len(groups)) % 2
    kept = groups != clients - 1 if unseen else np.ones(len(groups), bool)
    np.savez(path, x_train=x[kept], y_train=y[kept], g_train=groups[kept], x_test=x, y_test=y, g_test=groups)
    return {"name": str(path), "limit": None}


def domains(path, **more):
    data = colours(path, **more) | {"normalise": "personal"}
    return {"data": data, "partition": {"name": "domain"}, "fleet": {"clients": 2 if more.get("unseen") else 3}}


def in_numpy(place: World, client: int):
    x = place.dataset.x[place.split.train[client]] / 255
    return x.mean((0, 2, 3)), x.std((0, 2, 3))


@settings(max_examples=25, deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(*map(st.integers, (1, 1, 1, 1), (9, 3, 5, 5)))))
def test_moments_are_those_of_numpy(x):
    mean, std = moments(count_levels(x))
    truth = (x / 255).std((0, 2, 3))
    assert np.allclose(mean, (x / 255).mean((0, 2, 3)), rtol=0, atol=1e-12)
    assert np.allclose(std, np.where(np.ptp(x, axis=(0, 2, 3)) > 0, truth, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("colour", [False, True])
def test_client_statistics_match_numpy(colour, tmp_path):
    place = world("fedavg", **(domains(tmp_path / "c.npz") if colour else PERSONAL))
    seen = []
    for number in range(3):
        client = place.client(Task(number, 0), {})
        for part in (client.train, client.validation, client.test):
            mean, std = in_numpy(place, number)
            assert np.allclose(part.images.mean.flatten(), mean, rtol=0, atol=1e-6)
            assert np.allclose(part.images.std.flatten(), std, rtol=0, atol=1e-6)
        batch = client.train.images.batch(client.train.rows)
        assert torch.allclose(batch.x.mean((0, 2, 3)), torch.zeros(batch.x.shape[1], dtype=torch.float64), atol=1e-9)
        seen.append(float(client.train.images.mean.sum()))
    assert len(set(seen)) == 3


def test_a_constant_channel_becomes_zero(tmp_path):
    place = world("fedavg", **domains(tmp_path / "c.npz", constant=True))
    client = place.client(Task(0, 0), {})
    batch = client.train.images.batch(client.train.rows)
    assert torch.equal(batch.x[:, 1], torch.zeros_like(batch.x[:, 1]))
    assert torch.isfinite(batch.x).all()


@pytest.mark.parametrize("augment", ["none", "randaugment"])
def test_clients_of_one_sample_train(augment, tmp_path):
    changes = domains(tmp_path / "c.npz", per_client=1)
    changes["data"] |= {"augment": augment}
    result = run("fedavg", tmp_path, **changes, run={"rounds": 2})
    assert result.summary["failures"] == 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in server_of(result).values())


def test_statistics_are_in_no_task_and_no_report(tmp_path, monkeypatch):
    frames, plain = [], Local.run

    def record(self, tasks):
        for task in tasks:
            frames.append(wire.pack(arrived(task, self.place.network)))
            (outcome,) = plain(self, [task])
            frames.append(wire.pack(outcome.report))
            assert outcome.state is None
            yield outcome

    monkeypatch.setattr(Local, "run", record)
    run("fedavg", tmp_path, **PERSONAL)
    assert len(frames) == 2 * 2 * 3 * 2  # tasks and reports of work and evaluation: 2 rounds, 3 clients
    place = world("fedavg", **PERSONAL)
    for number in range(3):
        images = place.client(Task(number, 0), {}).train.images
        for value in (images.mean, images.std):
            for kind in (torch.float32, torch.float64):
                mark = value.to(kind).numpy().tobytes()
                assert mark in wire.pack(Report({"weight": value.to(kind)}))  # it would be seen
                assert not any(mark in frame for frame in frames)
    assert not any(word in frame for frame in frames for word in (b"mean", b"std"))


def test_stacked_clients_keep_their_own_statistics(tmp_path):
    changes = PERSONAL | {"partition": {"name": "iid"}, "data": {"normalise": "personal", "limit": 96}}
    alone, together, common = (
        server_of(run("fedavg", tmp_path / name, **changes | more))
        for name, more in {
            "alone": {},
            "together": {"engine": {"trainer": "stacked"}},
            "common": {"data": {"normalise": "global", "limit": 96}},
        }.items()
    )
    close(alone, together, 1e-9)
    assert far(alone, common) > 1e-6


def test_statistics_of_augmented_images(tmp_path):
    changes = domains(tmp_path / "c.npz")
    plain = world("fedavg", **changes).client(Task(0, 0), {}).train.images
    changes["data"]["normalise"] = "personal_augmented"
    same = world("fedavg", **changes).client(Task(0, 0), {}).train.images
    changes["data"]["augment"] = "randaugment"
    other = world("fedavg", **changes).client(Task(0, 0), {}).train.images
    assert torch.equal(plain.mean, same.mean)
    assert not torch.equal(plain.mean, other.mean)


@pytest.mark.parametrize("stats", ["data", "model"])
def test_all_test_images_by_statistics_of_the_data_or_of_the_model(stats, tmp_path):
    place = world("fedavg", **domains(tmp_path / "c.npz"), evaluate={"on": "all", "test_stats": stats})
    data, client = place.dataset, place.client(Task(1, 0), {})
    assert client.test.rows.tolist() == data.test_rows.tolist()
    batch = client.test.images.batch(client.test.rows)
    for row in (0, 7, 17):
        group = data.groups[data.test_rows[row]] if stats == "data" else data.groups[place.split.train[1]][0]
        whole = data.x[: data.trained][data.groups[: data.trained] == group] / 255
        own = data.x[place.split.train[1]] / 255
        of = whole if stats == "data" else own
        truth = (data.x[data.test_rows[row]] / 255 - of.mean((0, 2, 3))[:, None, None]) / of.std((0, 2, 3))[
            :, None, None
        ]
        assert np.allclose(batch.x[row], truth, atol=1e-9)


@pytest.mark.parametrize("normalise", ["global", "fixed", "personal"])
def test_the_global_model_of_a_personal_method_is_tested_by_the_statistics_of_all_training_images(normalise, tmp_path):
    changes = domains(tmp_path / "c.npz", constant=True)
    changes["data"]["normalise"] = normalise
    place = world("fedcpn", **changes, evaluate={"on": "all", "test_stats": "model"})
    x = place.dataset.x[: place.dataset.trained] / 255
    images = place.home().test.images
    assert np.allclose(images.mean.flatten(), x.mean((0, 2, 3)), rtol=0, atol=1e-9)
    assert np.allclose(images.std.flatten(), [x[:, 0].std(), 1, x[:, 2].std()], rtol=0, atol=1e-9)


def test_fixed_numbers_are_one_half_where_statistics_are_not_personal(tmp_path):
    changes = domains(tmp_path / "c.npz")
    changes["data"]["normalise"] = "fixed"
    place = world("fedcpn", **changes, method={"normalise": "study"})
    for images in (place.home().test.images, place.client(Task(1, 0), {}).train.images):
        assert images.mean.flatten().tolist() == images.std.flatten().tolist() == [0.5] * 3


def test_unseen_groups_alone(tmp_path):
    changes = domains(tmp_path / "c.npz", unseen=True)
    place = world("fedavg", **changes, evaluate={"on": "unseen", "test_stats": "model"})
    for client in (place.client(Task(1, 0), {}), place.home()):
        assert set(place.dataset.groups[client.test.rows.numpy()].tolist()) == {2}
    assert run("fedavg", tmp_path, **changes, evaluate={"on": "unseen", "test_stats": "model"}).summary["rounds"] == 2


def test_what_cannot_be_tested_is_refused(tmp_path):
    changes = domains(tmp_path / "c.npz", unseen=True)
    with pytest.raises(InputError, match="no training images of 2 to take statistics from"):
        run("fedavg", tmp_path, **changes, evaluate={"on": "unseen"})
    with pytest.raises(InputError, match="has no such test images"):
        run("fedavg", tmp_path, **PERSONAL, evaluate={"on": "unseen"})


def test_accuracy_of_every_group(tmp_path):
    changes = domains(tmp_path / "c.npz")
    result = run("fedcpn", tmp_path, **changes, evaluate={"on": "all"})
    rows = [row for row in result.rows("clients") if row["job"] == "evaluate"]
    assert len(rows) == 2 * 3
    for row in (*rows, *result.rows("metrics")):
        of, whole = ("global_accuracy_", "global_accuracy") if "job" not in row else ("accuracy_", "accuracy")
        assert sum(row[f"{of}{group}"] for group in range(3)) / 3 == pytest.approx(row[whole])
