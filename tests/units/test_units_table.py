"""Taking sub-models out of a model and putting them back."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from unit_nets import NETS

from fedloom.errors import InputError
from fedloom.units import Units, skeleton
from fedloom.units.table import Group

# A norm over all units, or over those that are kept, is another one for fewer.
NORM_FREE = [name for name in NETS if name not in ("mlp", "encoder by hand", "stream", "group norm of one block")]
a_net = st.sampled_from(list(NETS))
a_seed = st.integers(0, 10_000)
quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def outputs(module, tensors, x):
    output = functional_call(module, tensors, (x,))
    return output if isinstance(output, tuple) else (output,)


def accumulators(tensors):
    return [{name: torch.zeros(t.shape, dtype=torch.float64) for name, t in tensors.items()} for _ in range(2)]


@pytest.mark.parametrize("name", NETS)
def test_take_at_whole_is_the_identity(net, name):
    case = net(name)
    for where in ({}, {group: torch.arange(size) for group, size in case.units.sizes.items()}):
        taken = case.units.take(case.tensors, where)
        assert taken.keys() == case.tensors.keys()
        assert all(taken[key] is case.tensors[key] for key in taken)


@quick
@given(name=st.sampled_from(NORM_FREE), seed=a_seed)
def test_sub_model_is_the_full_model_with_all_else_zero(net, name, seed):
    case = net(name, seed)
    where = case.choice(seed)
    taken = case.units.take(case.tensors, where)
    zero = {key: torch.zeros_like(tensor) for key, tensor in case.tensors.items()}
    masked = case.units.place(taken, where, zero)
    small = outputs(skeleton(case.module, taken), taken, case.x)
    for part, full in zip(small, outputs(case.module, masked, case.x), strict=True):
        torch.testing.assert_close(part, full, rtol=1e-9, atol=1e-9)


def test_take_of_a_plain_network_by_hand(net):
    case = net("plain")
    first, second, third = torch.tensor([0, 2, 5]), torch.tensor([1, 6]), torch.tensor([3, 4, 8])
    taken = case.units.take(case.tensors, {"0": first, "4": second, "8": third})
    full = case.tensors
    columns = (second[:, None] * 4 + torch.arange(4)).flatten()
    assert torch.equal(taken["0.weight"], full["0.weight"][first])
    assert torch.equal(taken["1.running_var"], full["1.running_var"][first])
    assert torch.equal(taken["4.weight"], full["4.weight"][second][:, first])
    assert torch.equal(taken["5.weight"], full["5.weight"][second])
    assert torch.equal(taken["8.weight"], full["8.weight"][third][:, columns])
    assert torch.equal(taken["10.weight"], full["10.weight"][:, third])
    assert taken["10.bias"] is full["10.bias"]


def test_one_choice_per_residual_stream(net):
    case = net("residual")
    kept = torch.tensor([1, 4, 5])
    taken = case.units.take(case.tensors, {"wider.conv2": kept})
    for producer in ("wider.conv2.weight", "wider.project.bias", "again.conv2.weight", "again.norm2.running_mean"):
        assert torch.equal(taken[producer], case.tensors[producer][kept])
    for consumer in ("again.conv1.weight", "head.weight"):
        assert torch.equal(taken[consumer], case.tensors[consumer][:, kept])


def test_subset_of_names(net):
    case = net("residual")
    where = case.choice(3)
    some = {key: case.tensors[key] for key in ("stem.weight", "head.bias")}
    assert case.units.take(some, where).keys() == some.keys()


def test_contiguous_choice_is_a_view(net):
    case = net("residual")
    for first, last in ((0, 3), (2, 5)):
        taken = case.units.take(case.tensors, {"same.conv1": torch.arange(first, last)})
        taken["same.norm1.running_mean"].fill_(7.0)
        assert (case.tensors["same.norm1.running_mean"][first:last] == 7.0).all()


@pytest.mark.parametrize("kept", [[0, 1, 2], [0, 2, 5]])
def test_take_is_differentiable(net, kept):
    case = net("residual")
    weight = case.tensors["stem.weight"].clone().requires_grad_()
    taken = case.units.take({"stem.weight": weight}, {"stem": torch.tensor(kept)})
    taken["stem.weight"].sum().backward()
    assert weight.grad is not None
    assert (weight.grad.sum((1, 2, 3)) > 0).nonzero().flatten().tolist() == kept


@quick
@given(name=a_net, seed=a_seed)
def test_put_after_take_restores_the_elements_and_no_others(net, name, seed):
    case = net(name, seed)
    where = case.choice(seed)
    total, count = accumulators(case.tensors)
    taken = case.units.take(case.tensors, where)
    case.units.put(total, count, taken, where, 2.0)
    held = case.units.place({k: torch.ones_like(t) for k, t in taken.items()}, where, total)
    for key, full in case.tensors.items():
        assert set(count[key].flatten().tolist()) <= {0.0, 2.0}
        voted = count[key] > 0
        torch.testing.assert_close(total[key][voted] / 2, full[voted].double())
        assert not total[key][~voted].any()
        assert int(voted.sum()) == taken[key].numel()
        assert (held[key][voted] == 1).all()


@quick
@given(name=a_net, seed=a_seed)
def test_put_equals_a_loop_over_elements(net, name, seed):
    case = net(name, seed)
    generator = torch.Generator().manual_seed(seed)
    total, count = accumulators(case.tensors)
    slow_total, slow_count = ([dict.fromkeys(range(t.numel()), 0.0) for t in total.values()] for _ in range(2))
    numbers = {key: torch.arange(t.numel()).view(t.shape) for key, t in case.tensors.items()}
    for client in range(3):
        where = case.choice(seed + client)
        taken = {key: t.double() + client for key, t in case.units.take(case.tensors, where).items()}
        masks = {key: torch.rand(t.shape, generator=generator) < 0.7 for key, t in taken.items() if len(key) % 2}
        rows = torch.tensor([0, 2])
        case.units.put(total, count, taken, where, client + 0.5, masks=masks, rows=rows)
        places = case.units.take(numbers, where)
        for tensor, key in enumerate(case.tensors):
            for element, (value, place) in enumerate(
                zip(taken[key].flatten().tolist(), places[key].flatten().tolist(), strict=True)
            ):
                row = element // max(1, taken[key][0].numel()) if taken[key].ndim else 0
                if key in masks and not masks[key].flatten()[element]:
                    continue
                if key in case.units.output and row not in rows.tolist():
                    continue
                slow_total[tensor][place] += (client + 0.5) * value
                slow_count[tensor][place] += client + 0.5
    for tensor, key in enumerate(case.tensors):
        expected = [torch.tensor(list(slow[tensor].values())).double() for slow in (slow_total, slow_count)]
        torch.testing.assert_close(total[key].flatten(), expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(count[key].flatten(), expected[1])


@quick
@given(name=a_net, seed=a_seed)
def test_sum_of_counts_is_the_sum_of_sizes(net, name, seed):
    case = net(name)
    total, count = accumulators(case.tensors)
    elements = 0
    for client in range(4):
        where = case.choice(seed + client)
        taken = case.units.take(case.tensors, where)
        case.units.put(total, count, taken, where, 1.0)
        elements += sum(tensor.numel() for tensor in taken.values())
    assert sum(int(tensor.sum()) for tensor in count.values()) == elements


def test_elements_without_a_vote_may_be_nan(net):
    case = net("mlp")
    total, count = accumulators(case.tensors)
    broken = {"0.bias": torch.full((10,), math.nan)}
    case.units.put(total, count, broken, {}, 1.0, masks={"0.bias": torch.zeros(10, dtype=torch.bool)})
    assert not total["0.bias"].any()
    assert not count["0.bias"].any()


def test_put_refuses_a_wrong_shape(net):
    case = net("mlp")
    total, count = accumulators(case.tensors)
    with pytest.raises(InputError, match=r"tensor '0.bias' .* shape \[10\]; got \[1\]"):
        case.units.put(total, count, {"0.bias": torch.zeros(1)}, {}, 1.0)


@given(size=st.integers(1, 600), capacity=st.floats(0.001, 1))
def test_kept(size, capacity):
    kept = Units([Group("layer", size, (), ())], {}).kept(capacity)
    assert 1 <= kept["layer"] <= size
    if capacity == 1:
        assert kept["layer"] == size
    elif size > 1:
        assert kept["layer"] == min(size - 1, max(1, math.ceil(round(capacity * size, 6))))


@pytest.mark.parametrize(("capacity", "kept"), [(0.99, 9), (0.5, 5), (0.25, 3), (0.0625, 1), (0.7, 7), (1, 10)])
def test_kept_by_hand(net, capacity, kept):
    assert net("mlp").units.kept(capacity)["0"] == kept


@pytest.mark.parametrize("capacity", [0, -1, 1.5, math.nan])
def test_kept_refuses(net, capacity):
    with pytest.raises(InputError, match=r"capacity must be in \(0, 1\]"):
        net("mlp").units.kept(capacity)


@quick
@given(name=a_net, seed=a_seed)
def test_shapes_and_parameters(net, name, seed):
    case = net(name)
    where = case.choice(seed)
    kept = {group: len(units) for group, units in where.items()}
    taken = case.units.take(case.tensors, where)
    assert case.units.shapes(kept) == {key: tensor.shape for key, tensor in taken.items()}
    trained = [key for key, _ in case.module.named_parameters()]
    assert case.units.num_parameters(kept) == sum(taken[key].numel() for key in trained)


@pytest.mark.parametrize("units", [[], [1, 1], [2, 1], [0, 10], [-1, 2]])
def test_choice_refuses(net, units):
    with pytest.raises(InputError, match="units kept of group '0' must be rising numbers from 0 to 9"):
        net("mlp").units.take(net("mlp").tensors, {"0": torch.tensor(units)})


def test_unknown_group(net):
    with pytest.raises(InputError, match=r"unknown group 'stom'.*Did you mean 'stem'"):
        net("residual").units.take(net("residual").tensors, {"stom": torch.tensor([0])})


def test_plans_are_kept_and_forgotten(net):
    case = net("mlp")
    where = {"0": torch.tensor([0, 4])}
    assert case.units.plan(where) is case.units.plan({"0": torch.tensor([0, 4])})
    first = case.units.plan(where)
    for seed in range(1000):
        case.units.plan({"0": torch.randperm(10)[:5].sort().values, "3": torch.tensor([seed % 7])})
    assert case.units.plan(where) is not first


def test_table_travels_without_its_plans(net):
    case = net("residual")
    where = case.choice(5)
    expected = case.units.take(case.tensors, where)
    other = pickle.loads(pickle.dumps(case.units))
    assert not other._plans
    assert all(torch.equal(tensor, expected[key]) for key, tensor in other.take(case.tensors, where).items())
