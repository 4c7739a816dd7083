"""Copies of many tensors at a time give the tensors back, in one piece of memory."""

from __future__ import annotations

import torch

from fedloom.copies import on_host, to_device, to_host


def test_shapes_and_values_stay_and_the_memory_is_one():
    tensors = [torch.arange(6).view(2, 3), torch.tensor(7), torch.arange(0), torch.arange(8).view(2, 4).T]
    for copies in (to_device(tensors, "cpu"), to_host(tensors)):
        assert all(torch.equal(one, other) for one, other in zip(copies, tensors, strict=True))
        assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    assert to_device([], "cpu") == to_host([]) == []


def test_reads_come_back_by_name():
    reads = [{"right": torch.ones(3), "loss": torch.tensor(2.0)}, {}, {"right": torch.zeros(1)}]
    found = on_host(reads)
    assert [list(each) for each in found] == [["right", "loss"], [], ["right"]]
    assert torch.equal(found[0]["right"], torch.ones(3))
    assert float(found[0]["loss"]) == 2
