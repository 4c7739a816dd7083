"""Means by hand: weights, cuts, masks, classes, and the order that must not matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.encoding import Sparse, Ternary
from fedloom.policies.merge import Mean
from fedloom.policies.server import Adaptive, Momentum
from fedloom.types import Report, Server
from tests.core.small import CLASSES, Normed, network_of

NETWORK = network_of(Normed)
DOUBLE = network_of(Normed, torch.float64)


def server_of(network=NETWORK, seed=1):
    return Server(0, network.initial(seed), network)


def filled(value, names=("last.weight", "last.bias")):
    return {name: torch.full(NETWORK.shapes()[name], float(value)) for name in names}


def joined(server, reports, merge=None):
    merge = (merge or Mean()).begin(server)
    for report in reports:
        merge.add(report)
    return merge.result()


def test_two_clients_by_their_samples():
    server = server_of()
    result = joined(server, [Report(filled(1), 30.0), Report(filled(5), 10.0)])
    assert torch.equal(result["last.weight"], torch.full((CLASSES, 5), 2.0))
    assert torch.equal(result["last.bias"], torch.full((CLASSES,), 2.0))


def test_equal_weights_ignore_the_samples():
    result = joined(server_of(), [Report(filled(1), 30.0), Report(filled(5), 10.0)], Mean(weights="equal"))
    assert torch.equal(result["last.bias"], torch.full((CLASSES,), 3.0))


def test_tensors_that_nobody_sent_are_untouched():
    server = server_of()
    result = joined(server, [Report(filled(1), 3.0)])
    assert list(result) == list(server.tensors)
    for name in server.tensors.keys() - filled(1).keys():
        assert torch.equal(result[name], server.tensors[name])


def test_no_report_changes_nothing():
    server = server_of()
    assert all(torch.equal(tensor, server.tensors[name]) for name, tensor in joined(server, []).items())


def test_counters_are_rounded_and_stay_integers():
    server, name = server_of(), "norm.num_batches_tracked"
    result = joined(server, [Report({name: torch.tensor(7)}, 1.0), Report({name: torch.tensor(10)}, 2.0)])
    assert result[name].dtype == torch.int64
    assert int(result[name]) == 9
    assert int(joined(server, [Report({name: torch.tensor(7)}, 2.0), Report({name: torch.tensor(10)}, 1.0)])[name]) == 8


def test_sums_are_kept_in_double_precision():
    server = server_of()
    reports = [Report({"last.bias": torch.full((CLASSES,), value)}, 1.0) for value in (1e8, 1.0, -1e8, 1.0)]
    assert torch.equal(joined(server, reports)["last.bias"], torch.full((CLASSES,), 0.5))


def test_encodings_are_decoded():
    tensor = torch.tensor([0.0, 2.0, -2.0])
    for value in (Sparse.of(tensor), Ternary.of(tensor)):
        result = joined(server_of(), [Report({"last.bias": value}, 1.0), Report({"last.bias": torch.ones(3)}, 1.0)])
        assert torch.equal(result["last.bias"], torch.tensor([0.5, 1.5, -0.5]))


def test_a_partial_mask_leaves_elements_to_the_others():
    old = server_of().tensors["last.bias"]
    one = Sparse.of(torch.tensor([4.0, 0.0, 0.0]), torch.tensor([True, True, False]), partial=True)
    two = Sparse.of(torch.tensor([8.0, 0.0, 0.0]), torch.tensor([True, False, False]), partial=True)
    result = joined(server_of(), [Report({"last.bias": one}, 1.0), Report({"last.bias": two}, 3.0)])["last.bias"]
    assert result[0] == 7.0
    assert result[1] == 0.0
    assert torch.equal(result[2], old[2])


GROUP = "first"  # the four channels of the first convolution


def cut(values, kept, network=NETWORK):
    where = {GROUP: torch.tensor(kept)}
    shapes = network.shapes(where)
    return {
        name: torch.full(shapes[name], float(values), dtype=network.dtype)
        for name in ("first.bias", "second.weight", "last.bias")
    }, where


def test_cut_reports_are_averaged_over_those_who_hold_a_unit():
    assert NETWORK.units.sizes[GROUP] == 4
    server = server_of()
    (one, first), (two, second) = cut(2, [0, 1]), cut(6, [1, 3])
    result = joined(server, [Report(one, 1.0, where=first), Report(two, 3.0, where=second)])
    old = server.tensors
    assert torch.equal(
        result["first.bias"],
        torch.stack([torch.tensor(2.0), torch.tensor(5.0), old["first.bias"][2], torch.tensor(6.0)]),
    )
    assert torch.equal(result["second.weight"][:, 2], old["second.weight"][:, 2])
    assert torch.equal(result["second.weight"][:, 1], torch.full((5, 3, 3), 5.0))
    assert torch.equal(result["second.weight"][:, 0], torch.full((5, 3, 3), 2.0))
    assert torch.equal(result["last.bias"], torch.full((3,), 5.0))
    assert torch.equal(result["last.weight"], old["last.weight"])


@pytest.mark.parametrize("whole_first", [True, False])
def test_whole_and_cut_reports_count_together(whole_first):
    part, where = cut(2, [0, 1])
    reports = [
        Report({"first.bias": torch.full((4,), 6.0)}, 3.0),
        Report({"first.bias": part["first.bias"]}, 1.0, where=where),
    ]
    result = joined(server_of(), reports if whole_first else reports[::-1])
    assert torch.equal(result["first.bias"], torch.tensor([5.0, 5.0, 6.0, 6.0]))


def test_rows_of_the_output_vote_by_class():
    server = server_of()
    old = server.tensors["last.bias"]
    reports = [
        Report(filled(2) | {"first.bias": torch.full((4,), 2.0)}, 1.0, classes=torch.tensor([0, 1])),
        Report(filled(6) | {"first.bias": torch.full((4,), 6.0)}, 3.0, classes=torch.tensor([1])),
    ]
    result = joined(server, reports, Mean(by_class=True))
    assert torch.equal(result["last.bias"], torch.stack([torch.tensor(2.0), torch.tensor(5.0), old[2]]))
    assert torch.equal(result["last.weight"][2], server.tensors["last.weight"][2])
    assert torch.equal(result["first.bias"], torch.full((4,), 5.0))


def test_a_weight_of_zero_does_not_vote():
    server = server_of()
    result = joined(server, [Report(filled(9), 0.0)])
    assert torch.equal(result["last.bias"], server.tensors["last.bias"])


def test_a_report_is_not_changed_by_merging():
    report = Report(filled(3), 2.0)
    merge = Mean().begin(server_of())
    merge.add(report)
    merge.add(report)
    merge.result()
    assert torch.equal(report.tensors["last.bias"], torch.full((3,), 3.0))


@st.composite
def many_reports(draw):
    reports = []
    for seed in range(draw(st.integers(1, 5))):
        generator = torch.Generator().manual_seed(seed)
        kept = sorted(draw(st.sets(st.integers(0, 3), min_size=1)))
        where = {GROUP: torch.tensor(kept)} if draw(st.booleans()) else None
        shapes = DOUBLE.shapes(where)
        tensors = {
            name: torch.randn(shapes[name], generator=generator, dtype=torch.float64)
            for name in ("first.bias", "second.weight", "last.bias")
        }
        if draw(st.booleans()):
            mask = torch.rand(tensors["second.weight"].shape, generator=generator) < 0.5
            tensors["second.weight"] = Sparse.of(tensors["second.weight"], mask, partial=True)
        classes = torch.tensor(sorted(draw(st.sets(st.integers(0, 2), min_size=1)))) if draw(st.booleans()) else None
        reports.append(Report(tensors, float(draw(st.integers(1, 100))), where=where, classes=classes))
    return reports


@given(many_reports(), st.randoms())
@settings(deadline=None, max_examples=60)
def test_neither_order_nor_grouping_of_reports_matters(reports, chance):
    server = server_of(DOUBLE)
    straight = joined(server, reports)
    turned = list(reports)
    chance.shuffle(turned)
    halves = [Mean().begin(server), Mean().begin(server)]
    for place, report in enumerate(reports):
        halves[place % 2].add(report)
    halves[0].combine(halves[1].sums())
    for other in (joined(server, turned), halves[0].result()):
        for name, tensor in straight.items():
            assert torch.allclose(tensor, other[name], rtol=0, atol=1e-12), name


def test_combining_leaves_the_other_merge_alone():
    server = server_of()
    one, two = Mean().begin(server), Mean().begin(server)
    two.add(Report(filled(4), 1.0))
    one.combine(two.sums())
    one.add(Report(filled(8), 1.0))
    assert torch.equal(two.result()["last.bias"], torch.full((3,), 4.0))
    assert torch.equal(one.result()["last.bias"], torch.full((3,), 6.0))


@pytest.mark.parametrize("merge", [Mean(), Mean(by_class=True), Momentum(), Adaptive(yogi=True)])
def test_a_merge_looks_at_nothing(merge):
    """Tensors without values stand for those on a device that works behind the host: whoever looks at one fails."""
    server = server_of()
    server = Server(0, {name: tensor.to("meta") for name, tensor in server.tensors.items()}, NETWORK)
    classes = torch.tensor([0, 2]) if merge.by_class else None
    joined = merge.begin(server)
    for kept in ([0, 1], [0, 3]):  # one and the other: a slice, and positions that are copied
        where = {GROUP: torch.tensor(kept)}
        shapes = NETWORK.shapes(where)
        cut = {name: torch.empty(shape, dtype=NETWORK.dtypes[name], device="meta") for name, shape in shapes.items()}
        joined.add(Report(cut, 2.0, where=where, classes=classes))
    joined.add(Report(dict(server.tensors), 3.0, classes=classes))
    assert {name: tensor.shape for name, tensor in joined.result().items()} == NETWORK.shapes()
