"""FedAvgM, FedAdam, FedYogi: the server follows the mean change with a memory (Hsu et al. 2019; Reddi et al. 2021)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.policies.server import Adaptive, Momentum
from fedloom.types import Report
from tests.contract.study import final, rows
from tests.methods.tiny import NORMED, begin, close, far, run, same, server_of, world

WIDE = {"model": {"name": "mlp", "hidden": [4]}}
GROUP, OTHER = "classifier.1", "classifier.3"
RULES = [Momentum(rate=0.5, momentum=0.8), Adaptive(), Adaptive(yogi=True), Adaptive(rate=0.3, beta1=0.0, beta2=0.5)]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def joined(rule, server, reports):
    merge = rule.begin(server)
    for report in reports:
        merge.add(report)
    return server.next(merge.result())


def moved(server, generator, weight, where=None):
    """A report of a client that moved everything it holds at random."""
    held = server.network.units.take(server.tensors, where) if where else server.tensors
    change = {n: t + torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for n, t in held.items()}
    return Report(change, weight, where=where)


def by_hand(rule, x, changes):
    """NumPy, element by element; a change of None means that nobody voted in that round."""
    speed, first, second = 0.0, 0.0, getattr(rule, "tau", 0.0) ** 2
    for change in changes:
        if change is None:
            continue
        if isinstance(rule, Momentum):
            speed = rule.momentum * speed + change
            x = x + rule.rate * speed
            continue
        first = rule.beta1 * first + (1 - rule.beta1) * change
        if rule.yogi:
            second = second - (1 - rule.beta2) * change**2 * np.sign(second - change**2)
        else:
            second = rule.beta2 * second + (1 - rule.beta2) * change**2
        x = x + rule.rate * first / (np.sqrt(second) + rule.tau)
    return x


@every_rule
def test_two_rounds_by_hand(rule):
    server, generator = begin(world()), torch.Generator().manual_seed(0)
    start, changes = server.tensors, []
    for _ in range(2):
        reports = [moved(server, generator, weight) for weight in (1.0, 3.0)]
        changes.append({
            n: (0.25 * reports[0].tensors[n] + 0.75 * reports[1].tensors[n] - t).numpy()
            for n, t in server.tensors.items()
        })  # fmt: skip
        server = joined(rule, server, reports)
    for name, tensor in server.tensors.items():
        expected = by_hand(rule, start[name].numpy(), [change[name] for change in changes])
        assert np.allclose(tensor.numpy(), expected, rtol=0, atol=1e-12), name


@every_rule
def test_untouched_elements_and_their_moments_stay(rule):
    """Everybody, then units 0 and 1 only, then everybody: units 2 and 3 go on as if the second round had not been."""
    server, generator = begin(world(**WIDE)), torch.Generator().manual_seed(1)
    assert server.network.units.sizes[GROUP] == 4
    start, changes = server.tensors[f"{GROUP}.weight"].numpy(), []
    for where in (None, {GROUP: torch.tensor([0, 1])}, None):
        before, memory = server.tensors, server.memory.get("merge", {})
        report = moved(server, generator, 2.0, where)
        server = joined(rule, server, [report])
        if where is None:
            changes.append((report.tensors[f"{GROUP}.weight"] - before[f"{GROUP}.weight"]).numpy())
            continue
        changes.append(np.stack([*(report.tensors[f"{GROUP}.weight"] - before[f"{GROUP}.weight"][:2]).numpy()]))
        for name, rest in ((f"{GROUP}.weight", (slice(2, 4),)), (f"{GROUP}.bias", (slice(2, 4),)),
                           (f"{OTHER}.weight", (slice(None), slice(2, 4)))):  # fmt: skip
            assert torch.equal(server.tensors[name][rest], before[name][rest]), name
            assert not torch.equal(server.tensors[name], before[name])
            for moment, value in server.memory["merge"][name].items():
                assert torch.equal(value[rest], memory[name][moment][rest]), (name, moment)
                assert not torch.equal(value, memory[name][moment])
    for unit in range(4):
        seen = [changes[0][unit], changes[1][unit] if unit < 2 else None, changes[2][unit]]
        expected = by_hand(rule, start[unit], seen)
        assert np.allclose(server.tensors[f"{GROUP}.weight"][unit].numpy(), expected, rtol=0, atol=1e-12), unit


@every_rule
def test_tensors_that_nobody_sent_stay(rule):
    server = begin(world())
    bias = f"{OTHER}.bias"
    after = joined(rule, server, [Report({bias: server.tensors[bias] + 1}, 1.0)])
    assert [name for name, t in after.tensors.items() if not torch.equal(t, server.tensors[name])] == [bias]
    assert set(after.memory["merge"]) == {bias}


@every_rule
def test_no_report_changes_nothing(rule):
    server = begin(world())
    same(joined(rule, server, []).tensors, server.tensors)


@every_rule
def test_buffers_are_plain_means(rule):
    server = begin(world(**NORMED))
    ones, threes = ({n: torch.full_like(t, value) for n, t in server.tensors.items()} for value in (1, 3))
    after = joined(rule, server, [Report(ones, 1.0), Report(threes, 3.0)])
    for name in server.network.buffers:
        mean = torch.full_like(server.tensors[name], 2.5 if server.tensors[name].is_floating_point() else 2)
        assert torch.equal(after.tensors[name], mean), name
    assert not server.network.buffers & set(after.memory["merge"])


@pytest.mark.parametrize("model", [{}, NORMED])
def test_fedavgm_without_momentum_at_rate_1_is_fedavg(model, tmp_path):
    plain = run("fedavg", tmp_path, **model)
    calm = run("fedavgm", tmp_path, merge={"momentum": 0.0, "rate": 1.0}, **model)
    close(server_of(calm), server_of(plain), 1e-6 if model else 1e-12)
    assert [row["global_accuracy"] for row in rows(calm)] == [row["global_accuracy"] for row in rows(plain)]


def test_first_round_of_fedavgm_is_fedavg(tmp_path):
    once = {"run": {"rounds": 1}}
    close(server_of(run("fedavgm", tmp_path, **once)), server_of(run("fedavg", tmp_path, **once)))
    assert far(server_of(run("fedavgm", tmp_path)), server_of(run("fedavg", tmp_path))) > 1e-4


@pytest.mark.parametrize("method", ["fedavgm", "fedadam", "fedyogi"])
def test_moments_are_in_the_checkpoint(method, tmp_path):
    kept = {name for name in final(run(method, tmp_path)) if name.startswith("server/memory/merge/")}
    kinds = {"speed"} if method == "fedavgm" else {"first", "second"}
    assert {name.rpartition("/")[2] for name in kept} == kinds
    assert len(kept) == 4 * len(kinds)


def test_fedadam_and_fedyogi_are_their_presets(tmp_path):
    adam, yogi = (server_of(run(name, tmp_path)) for name in ("fedadam", "fedyogi"))
    assert far(adam, yogi) > 1e-9
    same(yogi, server_of(run("fedadam", tmp_path, merge={"yogi": True})))
