"""Sparse and ternary values: exact decoding, exact bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.encoding import Sparse, Ternary, dense, mask_of

NUMBERS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8]  # fmt: skip
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def sparse_tensors(draw):
    shape, dtype = draw(shapes), draw(st.sampled_from([*NUMBERS, torch.bool]))
    size = torch.Size(shape).numel()
    values = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 100]), min_size=size, max_size=size))
    return torch.tensor(values).reshape(shape).to(dtype)


def same(one, two):
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)


@given(sparse_tensors())
def test_sparse_decodes_exactly_in_the_fewest_bytes(tensor):
    value, elements, kept = Sparse.of(tensor), tensor.numel(), int((tensor != 0).sum())
    assert same(value.decode(), tensor)
    assert torch.equal(value.mask, tensor != 0)
    assert value.nbytes == kept * tensor.itemsize + min(-(-elements // 8), 4 * kept)
    assert mask_of(value) is None


@given(sparse_tensors(), st.data())
def test_partial_sparse_sends_what_was_kept_and_nothing_else(tensor, data):
    size = tensor.numel()
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool)
    kept = kept.reshape(tensor.shape)
    value = Sparse.of(tensor, kept, partial=True)
    assert torch.equal(mask_of(value), kept)
    assert same(value.decode(), torch.where(kept, tensor, torch.zeros_like(tensor)))
    assert value.values.numel() == int(kept.sum())


def test_sparse_bytes_by_hand():
    # 100 elements: a bitmap has 13 bytes, positions 4 bytes each. Up to 3 elements positions are smaller.
    for kept, places in ((0, 0), (1, 4), (3, 12), (4, 13), (100, 13)):
        tensor = torch.zeros(10, 10)
        tensor.view(-1)[:kept] = 1.5
        value = Sparse.of(tensor)
        assert value.nbytes == 4 * kept + places
        assert value.places.dtype == (torch.uint8 if places == 13 else torch.int32)
        assert same(value.decode(), tensor)


def test_sparse_keeps_what_is_not_a_number_and_takes_views():
    tensor = torch.tensor([[0.0, torch.nan, 1.0], [torch.inf, 0.0, -1.0]])
    decoded = Sparse.of(tensor.T).decode()
    assert torch.equal(decoded.nan_to_num(7), tensor.T.nan_to_num(7))


def test_a_device_is_not_asked_what_it_holds():
    """A tensor without values stands for one on a device that works behind the host."""
    tensor = torch.empty(8, 5, device="meta")
    for size in (1, 30):
        value = Sparse.at(tensor, torch.empty(size, dtype=torch.long, device="meta"), partial=True)
        assert (value.numel(), value.nbytes) == (size, 4 * size + min(5, 4 * size))
        assert value.decode().shape == value.mask.shape == tensor.shape
    assert Ternary.trusted(tensor).decode().shape == tensor.shape


@given(
    shapes,
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.floats(2**-10, 1000),
    st.data(),
)
def test_ternary_is_two_bits_an_element_and_one_number(shape, dtype, scale, data):
    size = torch.Size(shape).numel()
    signs = data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=size, max_size=size))
    tensor = (torch.tensor(signs).to(dtype) * torch.tensor(scale, dtype=dtype)).reshape(shape)
    value = Ternary.of(tensor)
    assert same(value.decode(), tensor)
    assert value.nbytes == -(-2 * size // 8) + dtype.itemsize
    assert dense(value).shape == shape


@pytest.mark.parametrize("size", [0, 1, 4, 5, 1000])
def test_all_zeros_and_empty_are_ternary(size):
    tensor = torch.zeros(size)
    assert same(Ternary.of(tensor).decode(), tensor)
    assert Ternary.of(tensor).nbytes == -(-size // 4) + 4


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=20))
@settings(max_examples=200)
def test_ternary_refuses_exactly_what_is_not_ternary(numbers):
    tensor = torch.tensor(numbers)
    if len({abs(number) for number in numbers} - {0.0}) > 1:
        with pytest.raises(ValueError, match="-s, 0 and s"):
            Ternary.of(tensor)
    else:
        assert torch.equal(Ternary.of(tensor).decode(), tensor)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_ternary_refuses_what_is_not_finite(value):
    with pytest.raises(ValueError, match="-s, 0 and s"):
        Ternary.of(torch.tensor([value, 0.0, 1.0]))


def test_dense_is_the_tensor_itself():
    tensor = torch.ones(3)
    assert dense(tensor) is tensor
    assert mask_of(tensor) is None
