"""Median, trimmed mean and Krum by hand, against NumPy and SciPy, and what they must withstand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from fedloom.encoding import Sparse, Ternary, dense, mask_of
from fedloom.errors import InputError, RunError
from fedloom.fleet.blocks import Summed
from fedloom.methods.depthfl import DepthFL
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedbn import FedBN
from fedloom.methods.fedgse import FedGSE
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.scaffold import Scaffold
from fedloom.policies.cut import Prefix
from fedloom.policies.merge import Mean
from fedloom.policies.robust import Krum, Median, Trimmed, middle
from fedloom.types import Report
from tests.core.test_merge import DOUBLE, GROUP, cut, filled, joined, many_reports, server_of

ELEMENTWISE = [Median(), Trimmed(0.0), Trimmed(0.25), Trimmed(0.4)]
EVERY = [*ELEMENTWISE, Krum(0), Krum(1), Krum(1, keep=2)]
AXIS = {"first.bias": 0, "second.weight": 1}  # where the group's units are
every_rule = pytest.mark.parametrize("rule", EVERY, ids=repr)
elementwise = pytest.mark.parametrize("rule", ELEMENTWISE, ids=repr)


def told(*values, name="last.bias"):
    """A report each, with this value everywhere; the weights are as unequal as can be."""
    return [Report(filled(value, (name,)), 10.0**place, client=place) for place, value in enumerate(values)]


def bias(rule, reports, server=None):
    return joined(server or server_of(), reports, rule)["last.bias"].tolist()


@pytest.mark.parametrize(("values", "expected"), [
    ([7], 7), ([1, 5, 3], 3), ([1, 5, 3, 100], 4), ([-1e30, 2, 1, 3, 1e30], 2), ([4, 4], 4),
])  # fmt: skip
def test_median_by_hand(values, expected):
    assert bias(Median(), told(*values)) == [expected] * 3


@pytest.mark.parametrize(("share", "values", "expected"), [
    (0.2, [1, 2, 3, 10, -50], 2), (0.39, [1, 2, 3, 10, -50], 2), (0.4, [1, 2, 4, 10, -50], 2),
    (0.2, [1, 2, 3, 6], 3), (0.25, [1, 2, 3, 600], 2.5), (0.0, [1, 2, 6], 3), (0.49, [1, 9], 5),
])  # fmt: skip
def test_trimmed_mean_by_hand(share, values, expected):
    assert bias(Trimmed(share), told(*values)) == [expected] * 3


@pytest.mark.parametrize("count", range(1, 120))
def test_so_many_are_cut(count):
    votes = torch.tensor(count)
    for hundredths in range(50):
        assert Trimmed(hundredths / 100).ends(votes) == hundredths * count // 100
    assert Trimmed(0.5 - 1e-12).ends(votes) == middle(votes) == (count - 1) // 2


@elementwise
def test_votes_are_counted_element_by_element(rule):
    """Three vote on the first, two on the second, nobody on the third."""
    values = [[1.0, 2.0, 0.0], [5.0, 8.0, 0.0], [9.0, 0.0, 0.0]]
    masks = [[True, True, False], [True, True, False], [True, False, False]]
    reports = [
        Report({"last.bias": Sparse.of(torch.tensor(value), torch.tensor(mask), partial=True)})
        for value, mask in zip(values, masks, strict=True)
    ]
    server = server_of()
    assert bias(rule, reports, server) == [5.0, 5.0, float(server.tensors["last.bias"][2])]


def test_cut_reports_are_joined_over_those_who_hold_a_unit():
    server = server_of()
    kept = [[0, 1], [0, 1, 3], [0, 3], [0]]
    reports = [
        Report(part, where=where) for part, where in (cut(v, k) for v, k in zip((1, 3, 8, 90), kept, strict=True))
    ]
    result, old = joined(server, reports, Median()), server.tensors
    assert result["first.bias"].tolist() == [5.5, 2.0, float(old["first.bias"][2]), 5.5]
    for unit, value in ((0, 5.5), (1, 2.0), (3, 5.5)):
        assert torch.equal(result["second.weight"][:, unit], torch.full((5, 3, 3), value))
    assert torch.equal(result["second.weight"][:, 2], old["second.weight"][:, 2])
    assert result["last.bias"].tolist() == [5.5] * 3
    assert torch.equal(result["last.weight"], old["last.weight"])


@pytest.mark.parametrize("whole_first", [True, False])
def test_whole_and_cut_reports_count_together(whole_first):
    part, where = cut(2, [0, 1])
    reports = [
        *(Report({"first.bias": torch.full((4,), value)}) for value in (6.0, 7.0)),
        Report({"first.bias": part["first.bias"]}, where=where),
    ]
    result = joined(server_of(), reports if whole_first else reports[::-1], Median())
    assert result["first.bias"].tolist() == [6.0, 6.0, 6.5, 6.5]


@pytest.mark.parametrize("rule", [Median(by_class=True), Trimmed(0.34, by_class=True)], ids=repr)
def test_rows_of_the_output_vote_by_class(rule):
    server, classes = server_of(), ([0, 1], [1], [1])
    reports = [
        Report(filled(value) | {"first.bias": torch.full((4,), value)}, classes=torch.tensor(rows))
        for value, rows in zip((2.0, 6.0, 7.0), classes, strict=True)
    ]
    result, old = joined(server, reports, rule), server.tensors
    assert result["last.bias"].tolist() == [2.0, 6.0, float(old["last.bias"][2])]
    assert torch.equal(result["last.weight"][2], old["last.weight"][2])
    assert result["first.bias"].tolist() == [6.0] * 4


def test_counters_are_rounded_and_stay_integers():
    name = "norm.num_batches_tracked"
    for rule, values, expected in (
        (Median(), (7, 9, 90), 9), (Median(), (7, 10), 8), (Trimmed(0.25), (1, 5, 6, 90), 6),
        (Krum(0, 2), (5, 8, 8), 6),
    ):  # fmt: skip
        result = joined(server_of(), [Report({name: torch.tensor(value)}) for value in values], rule)[name]
        assert (result.dtype, int(result)) == (torch.int64, expected), rule


def test_encodings_are_decoded():
    tensor = torch.tensor([0.0, 2.0, -2.0])
    reports = [Report({"last.bias": value}) for value in (Sparse.of(tensor), Ternary.of(tensor), torch.ones(3))]
    assert bias(Median(), reports) == [0.0, 2.0, -2.0]
    assert bias(Krum(0), reports) == [0.0, 2.0, -2.0]


@elementwise
def test_no_report_changes_nothing(rule):
    server = server_of()
    assert all(torch.equal(tensor, server.tensors[name]) for name, tensor in joined(server, [], rule).items())


@every_rule
def test_tensors_that_nobody_sent_are_untouched(rule):
    server = server_of()
    result = joined(server, told(1, 1, 1, 1, 1), rule)
    assert list(result) == list(server.tensors)
    assert result["last.bias"].tolist() == [1.0] * 3
    assert all(torch.equal(result[name], server.tensors[name]) for name in result.keys() - {"last.bias"})


@every_rule
def test_reports_are_not_changed_and_no_sums_are_made(rule):
    reports = told(*range(5))
    merge = rule.begin(server_of())
    assert not isinstance(merge, Summed)
    for report in reports:
        merge.add(report)
    assert torch.equal(merge.result()["last.bias"], merge.result()["last.bias"])
    for place, report in enumerate(reports):
        assert report.tensors["last.bias"].tolist() == [place] * 3


def voted(report, name, shape):
    """With NumPy and indices alone: what a report says of a tensor, NaN where it does not vote."""
    full = np.full(shape, np.nan)
    value = dense(report.tensors[name]).numpy()
    mask = mask_of(report.tensors[name])
    value = value if mask is None else np.where(mask.numpy(), value, np.nan)
    rows = [np.arange(size) for size in shape]
    if report.where is not None and name in AXIS:
        rows[AXIS[name]] = report.where[GROUP].numpy()
    full[np.ix_(*rows)] = value
    if name == "last.bias" and report.classes is not None:
        full[np.setdiff1d(np.arange(3), report.classes.numpy())] = np.nan
    return full


@given(many_reports())
@settings(deadline=None, max_examples=40)
def test_as_numpy_and_scipy_have_it(reports):
    server = server_of(DOUBLE)
    for rule, expected in (
        (Median(), np.median), (Trimmed(0.2), lambda votes: trim_mean(votes, 0.2)),
        (Trimmed(0.4), lambda votes: trim_mean(votes, 0.4)), (Trimmed(0.0), np.mean),
    ):  # fmt: skip
        result = joined(server, reports, rule)
        for name in ("first.bias", "second.weight", "last.bias"):
            old = server.tensors[name].numpy()
            votes = np.stack([voted(report, name, old.shape) for report in reports]).reshape(len(reports), -1)
            heard = [column[~np.isnan(column)] for column in votes.T]
            aim = [expected(each) if len(each) else was for each, was in zip(heard, old.reshape(-1), strict=True)]
            np.testing.assert_allclose(result[name].numpy().reshape(-1), aim, rtol=0, atol=1e-12)


@given(many_reports(), st.randoms())
@settings(deadline=None, max_examples=40)
def test_order_does_not_change_a_bit(reports, chance):
    server = server_of(DOUBLE)
    turned = list(reports)
    chance.shuffle(turned)
    for rule in ELEMENTWISE:
        straight, other = joined(server, reports, rule), joined(server, turned, rule)
        assert all(torch.equal(tensor, other[name]) for name, tensor in straight.items())


values, anything = st.floats(-(2**20), 2**20, width=32), st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(values, min_size=1, max_size=9), st.lists(anything, max_size=9))
def test_bad_ones_below_the_share_cannot_leave_the_range_of_the_good(good, bad):
    bad = bad[: len(good) - 1]
    result = bias(Median(), told(*good, *bad))[0]
    assert min(good) <= result <= max(good)
    bad = bad[: len(good) // 3]  # a quarter of all at most
    result = bias(Trimmed(0.25), told(*good, *bad))[0]
    slack = 1e-6 * max(map(abs, good))
    assert min(good) - slack <= result <= max(good) + slack


LINE = (4.5, 100, 0, 2.5, 1)  # with one attacker two neighbours count: of 1 they are at 0 and 2.5


@pytest.mark.parametrize(("rule", "expected"), [
    (Krum(1), 1.0), (Krum(1, keep=2), 1.75), (Krum(1, keep=3), 3.5 / 3), (Krum(1, keep=4), 2.0),
    (Krum(0, keep=5), 21.6),
])  # fmt: skip
def test_krum_by_hand(rule, expected):
    """Scores per element: 4.5: 4 + 12.25; 0: 1 + 6.25; 2.5: 2.25 + 4; 1: 1 + 2.25."""
    assert bias(rule, told(*LINE)) == pytest.approx([expected] * 3)


def test_krum_takes_a_report_as_it_is():
    reports = [Report({name: tensor.clone() for name, tensor in server_of(seed=seed).tensors.items()}, client=seed)
               for seed in (3, 3, 4, 5, 6)]  # fmt: skip
    result = joined(server_of(), reports, Krum(1))
    assert all(torch.equal(tensor, reports[0].tensors[name]) for name, tensor in result.items())


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_at_equality_the_smaller_number_comes_first(order):
    """One neighbour counts: clients 0 and 1 have each other."""
    reports = told(8, 9, 5)
    assert bias(Krum(0), [reports[place] for place in order]) == [8.0] * 3


@given(st.integers(0, 2), st.integers(0, 4), st.integers(1, 3), st.randoms())
@settings(deadline=None, max_examples=40)
def test_krum_as_written_in_the_paper(attackers, more, keep, chance):
    server, count = server_of(DOUBLE), 2 * attackers + 3 + more
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    reports = [
        Report({name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                for name, tensor in server.tensors.items() if tensor.is_floating_point()}, client=client)
        for client in range(count)
    ]  # fmt: skip
    vectors = [np.concatenate([tensor.numpy().reshape(-1) for tensor in r.tensors.values()]) for r in reports]
    near = [sorted(float(((one - other) ** 2).sum()) for other in vectors if other is not one) for one in vectors]
    scores = [sum(each[: count - attackers - 2]) for each in near]
    best = np.argsort(scores, kind="stable")[:keep]
    expected = np.mean([vectors[place] for place in best], 0)
    result = joined(server, reports, Krum(attackers, keep))
    found = np.concatenate([result[name].numpy().reshape(-1) for name in reports[0].tensors])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    turned = list(reports)
    chance.shuffle(turned)
    other = joined(server, turned, Krum(attackers, keep))
    assert all(torch.equal(tensor, other[name]) for name, tensor in result.items())


@pytest.mark.parametrize("count", [3, 6])
def test_krum_that_keeps_all_is_the_mean(count):
    server, reports = server_of(), told(*range(count))
    one, two = joined(server, reports, Krum(0, keep=count)), joined(server, reports, Mean(weights="equal"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("rule", "count", "needed"), [
    (Krum(1), 4, 5), (Krum(2), 6, 7), (Krum(0), 2, 3), (Krum(0), 0, 3), (Krum(1, keep=6), 6, 7),
])  # fmt: skip
def test_too_few_reports_are_a_sentence(rule, count, needed):
    server = replace(server_of(), round=4)
    with pytest.raises(RunError, match=rf"round 5: krum .* needs at least {needed} reports .* got {count}$"):
        joined(server, told(*range(count)), rule)
    joined(server, told(*range(needed)), rule)


def test_statistics_of_norm_layers_are_looked_at_and_counters_are_not():
    base = {name: tensor for name, tensor in server_of().tensors.items() if name.startswith("norm")}
    reports = [
        Report(base | {"norm.bias": base["norm.bias"] + value, "norm.num_batches_tracked": torch.tensor(10**place)})
        for place, value in enumerate((4.5, 9, 0, 2.5, 1))
    ]
    plain = joined(server_of(), reports, Krum(1))
    assert torch.equal(plain["norm.bias"], base["norm.bias"] + 1)
    poisoned = Report({**reports[4].tensors, "norm.running_var": base["norm.running_var"] + 1e3})
    result = joined(server_of(), [*reports[:4], poisoned], Krum(1))
    assert torch.equal(result["norm.bias"], base["norm.bias"] + 2.5)
    assert torch.equal(result["norm.running_var"], base["norm.running_var"])


def test_what_a_report_leaves_open_counts_as_unchanged():
    """Whoever sends nothing, or part of a model, stops nothing; it stands where the server stands."""
    server = server_of()
    far = [Report({name: tensor + 50 for name, tensor in filled(0).items()}, client=place) for place in range(4)]
    part, where = cut(900, [1])
    result = joined(server, [*far, Report(client=4), Report(part, where=where, client=5)], Krum(1))
    assert torch.equal(result["last.bias"], torch.full((3,), 50.0))
    assert torch.equal(result["first.bias"], server.tensors["first.bias"])


@pytest.mark.parametrize("method", [HeteroFL, DepthFL, FedGSE, lambda merge: FedAvg(cut=Prefix(), merge=merge)])
def test_krum_is_refused_where_clients_train_different_parts(method):
    with pytest.raises(InputError, match=r"merge 'krum' compares whole models, but clients of .* here"):
        method(merge=Krum()).check()
    method(merge=Median()).check()


@pytest.mark.parametrize("rule", [Median(), Trimmed(), Krum()], ids=repr)
def test_compositions(rule):
    FedAvg(merge=rule).check()
    FedBN(merge=rule).check()
    with pytest.raises(InputError, match=r"scaffold adds up control variates, which merge '.*' does not guard"):
        Scaffold(merge=rule).check()
