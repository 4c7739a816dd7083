"""Plain data as bytes: everything that travels comes back, and nothing else is ever built."""

from __future__ import annotations

import contextlib
import json
import math
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedloom import wire
from fedloom.encoding import Sparse, Ternary
from fedloom.errors import InputError
from fedloom.types import Failure, Named, Report, Task, Train
from fedloom.wire import WireError

DTYPES = list(wire.DTYPES.values())
ARRAYS = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]


@st.composite
def tensors(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).remainder(7).to(dtype)
    if dtype.is_floating_point and tensor.numel() and draw(st.booleans()):
        tensor.view(-1)[0] = draw(st.sampled_from([torch.nan, torch.inf, -0.0]))
    if tensor.ndim and draw(st.booleans()):
        tensor = torch.stack([tensor, tensor + (0 if dtype == torch.bool else 1)], -1)[..., 1].transpose(0, -1)
    return tensor


plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
keys = st.text(max_size=3) | st.integers(-3, 3) | st.tuples(st.integers(0, 2), st.text(max_size=1)) | st.none()
leaves = (
    plain | tensors() | arrays.arrays(st.sampled_from(ARRAYS), arrays.array_shapes(min_dims=0, min_side=0, max_side=3))
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4)
    | st.lists(inner, max_size=3).map(tuple)
    | st.builds(Named, st.text(max_size=3), st.dictionaries(st.text(max_size=2), inner)),
    max_leaves=10,
)  # fmt: skip


def raw(tensor):
    flat = tensor.contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def equal(one, two):
    if isinstance(one, torch.Tensor):
        exact = one.dtype == two.dtype and one.shape == two.shape and isinstance(two, torch.Tensor)
        return exact and raw(one).equal(raw(two))
    if isinstance(one, np.ndarray):
        return (
            type(two) is np.ndarray
            and one.dtype == two.dtype
            and one.shape == two.shape
            and one.tobytes() == two.tobytes()
        )
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return one == two or (math.isnan(one) and math.isnan(two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(equal(item, two[key]) for key, item in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(equal, one, two))
    return equal(vars(one), vars(two)) if isinstance(one, Named) else one == two


@given(trees)
@settings(max_examples=150, deadline=None)
def test_any_tree_comes_back_and_its_size_is_known(tree):
    frame = wire.pack(tree)
    assert wire.size(tree) == len(frame)
    assert equal(tree, wire.unpack(frame))


@given(trees)
@settings(max_examples=100, deadline=None)
def test_any_tree_comes_back_from_the_disk(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    wire.save(tree, path)
    assert equal(tree, wire.load(path))


def test_tensors_whose_paths_read_alike_stay_apart_on_the_disk(tmp_path):
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    for tree in (
        {"a": {"b": one}, "a/b": two},
        {1: one, "1": two},
        {"a": [one], "a/0": two},
        {(0, "x"): one, "(0, 'x')": two},
    ):
        wire.save(tree, tmp_path / "tree.safetensors")
        assert equal(tree, wire.load(tmp_path / "tree.safetensors"))


def test_a_scalar_array_keeps_its_shape():
    assert wire.unpack(wire.pack(np.array(5.0))).shape == ()


def test_an_empty_array_travels():
    assert wire.unpack(wire.pack({"a": np.empty(0)}))["a"].shape == (0,)


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_column_travels(rows):
    column = torch.ones(rows, 2)[:, 1]
    assert torch.equal(wire.unpack(wire.pack(column)), column)


def test_views_travel_without_what_they_are_views_of():
    full = torch.arange(1000.0)
    assert wire.size(full[3:5]) < 100
    assert wire.size(torch.ones(()).expand(5, 5)) - wire.size(torch.ones(5, 5)) == 0
    assert torch.equal(wire.unpack(wire.pack(full.reshape(10, 100)[:, ::7])), full.reshape(10, 100)[:, ::7])


def test_bytes_by_hand():
    header = b'[[["float32",[2]]],{"a":{"~tensor":0}}]'
    frame = struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.0, 2.0)
    assert wire.pack({"a": torch.tensor([1.0, 2.0])}) == frame


MODEL = {
    "w": torch.arange(6.0).reshape(2, 3),
    "s": Sparse.of(torch.eye(5), torch.eye(5).bool(), partial=True),
    "t": Ternary.of(torch.tensor([0.5, -0.5, 0.0])),
}
MESSAGE = Task(
    client=3,
    round=1,
    tensors={"model": MODEL},
    where={"first": torch.tensor([0, 2])},
    numbers={"mu": 0.5},
    inbox={4: Report({"w": torch.ones(1)}, 2.0)},
    train=Train(lr=0.1),
    accepted=(0, 1),
    method=Named("fedavg"),
    model=Named("lenet5", {"hidden": (3, 4)}),
)


def test_a_task_comes_back_whole():
    again = wire.unpack(wire.pack(MESSAGE))
    assert type(again) is Task
    assert again.train == MESSAGE.train
    assert (again.method, again.model, again.accepted) == (MESSAGE.method, MESSAGE.model, (0, 1))
    assert torch.equal(again.tensors["model"]["s"].decode(), torch.eye(5))
    assert again.tensors["model"]["s"].partial
    assert torch.equal(again.inbox[4].tensors["w"], torch.ones(1))
    assert again.base is None


def test_every_truncation_and_every_extension_is_refused():
    frame = wire.pack(MESSAGE)
    for end in range(len(frame)):
        with pytest.raises(WireError):
            wire.unpack(frame[:end])
    with pytest.raises(WireError):
        wire.unpack(frame + b"\0")


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_damage_is_refused_or_changes_values_but_never_breaks_out(data):
    frame = bytearray(wire.pack(MESSAGE))
    for place in data.draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=4)):
        frame[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        wire.unpack(bytes(frame))


def frame_of(kinds, skeleton, raw=b""):
    header = json.dumps([kinds, skeleton]).encode()
    return struct.pack("<Q", len(header)) + header + raw


@pytest.mark.parametrize("shape", [
    [2**32, 2**32], [2**62, 4], [0, 2**62, 2**62], [2**63], [10**30], [-1, -1], [-1], [1.0], ["1"], None, "1",
    [[1]], {"a": 1},
])  # fmt: skip
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(WireError):
        wire.unpack(frame_of([["float32", shape]], {"~tensor": 0}, b"\0\0\0\0"))


@pytest.mark.parametrize("skeleton", [
    {"~tensor": 0}, {"~tensor": "a"}, {"~tensor": None}, {"~tuple": 3}, {"~dict": [[1]]}, {"~dict": [[[1], 2]]},
    {"~Popen": [["true"]]}, {"~os.system": ["true"]}, {"~Task": []},
    {"~Task": list(range(99))},
    {"~Outcome": {"client": 1}}, {"~": 1}, {"~Base": ["1", {}]}, {"~Server": [0, {}, None, {}]}, {"~array": 5},
])  # fmt: skip
def test_what_pack_never_makes_is_refused(skeleton):
    with pytest.raises(WireError):
        wire.unpack(frame_of([], skeleton))


@pytest.mark.parametrize("report", [
    Report(tensors=5), Report({3: torch.ones(1)}), Report({"a": 3.0}), Report(weight=True), Report(weight=None),
    Report(numbers={("a", 1): 1.0}), Report(numbers={"a": "b"}), Report(numbers={"a": 2**60}),
    Report(numbers={"a": 10**300}), Report(where=[1]), Report(where={"a": 1}), Report(classes=3),
    Report(extra={"control": torch.ones(1)}), Report({"a": Sparse("xy", torch.ones(1), torch.ones(1))}),
    Report({"a": Ternary((3,), torch.ones(1), 1.0)}), Report(client=2**63), Report(client=1.0),
    Task(0, 0, accepted=(1, 2, 3)), Task(0, 0, inbox={0: 1}), Task(0, 0, only=("a", 1)), Train(lr="fast"), Named(3),
    Failure(0, 0, 0, "raised", None),
])  # fmt: skip
def test_a_data_class_of_anything_but_what_it_says_is_refused(report):
    with pytest.raises(WireError, match="is not"):
        wire.unpack(wire.pack({"body": [report]}))


def test_a_deep_frame_is_refused():
    header = b"[[]," + b"[" * 100_000 + b"]" * 100_000 + b"]"
    with pytest.raises(WireError):
        wire.unpack(struct.pack("<Q", len(header)) + header)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(WireError):
        wire.unpack(noise)


@pytest.mark.parametrize("thing", [
    object(), {1, 2}, lambda: 0, torch.zeros(2, dtype=torch.complex64),
    np.zeros(2, dtype="uint16"), np.zeros(2, dtype=complex), [object()],
])  # fmt: skip
def test_what_unpack_would_not_take_is_not_packed(thing):
    with pytest.raises(TypeError):
        wire.pack(thing)


def test_numbers_of_numpy_become_plain():
    again = wire.unpack(wire.pack({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.float64(0.25)}))
    assert again == {"a": 0.5, "b": 3, "c": True, "d": 0.25}
    assert type(again["c"]) is bool


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path, plainly = tmp_path / "a.safetensors", safetensors.torch.save_file
    wire.save({"a": torch.ones(3)}, path)

    def cut_short(tensors, target, metadata):
        plainly(tensors, target, metadata)
        with open(target, "r+b") as file:
            file.truncate(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", cut_short)
    with pytest.raises(KeyboardInterrupt):
        wire.save({"a": torch.zeros(3)}, path)
    assert torch.equal(wire.load(path)["a"], torch.ones(3))


def test_damaged_files_are_told_by_name(tmp_path):
    path = tmp_path / "a.safetensors"
    wire.save({"a": torch.ones(3), "b": Failure(1, 2, 3, "raised", "x")}, path)
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError, match=r"a\.safetensors cannot be read"):
            wire.load(path)
    with pytest.raises(InputError):
        wire.load(tmp_path / "missing.safetensors")


@pytest.mark.parametrize(
    "metadata",
    [None, {"tree": "3 4"}, {"tree": '{"~tensor": "x"}'}, {"tree": '{"~tuple": 3}'}, {"tree": '{"~Nothing": []}'}],
)
def test_a_safetensors_file_that_is_no_tree_is_refused(tmp_path, metadata):
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors", metadata=metadata)
    with pytest.raises(InputError):
        wire.load(tmp_path / "a.safetensors")
