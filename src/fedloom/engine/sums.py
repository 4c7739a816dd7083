"""Reports that are added up by the worker that they were made at: what goes on to the server then."""

from __future__ import annotations

from dataclasses import replace

from fedloom import wire
from fedloom.engine.worker import Workplace
from fedloom.fleet.blocks import Summed, Sums
from fedloom.fleet.nonsense import Form, nonsense
from fedloom.network import Network
from fedloom.types import Failure, Outcome, Report, Server, Tensors

__all__ = ["added", "kept_back"]


def kept_back(outcome: Outcome, network: Network, form: Form) -> Outcome:
    """What goes on where a report is added up here: it has no tensors; one that cannot be used is a failure."""
    report = outcome.report
    if report is None:
        return outcome
    if reason := nonsense(report, network, form, outcome.finite):
        failure = Failure(outcome.client, outcome.round, outcome.stage, "nonsense", reason)
        return replace(outcome, report=None, parameters=0, failure=failure)
    return replace(outcome, report=Report({}, report.weight, report.numbers, client=report.client))


def added(place: Workplace, model: Tensors, outcomes: list[Outcome]) -> tuple[list[Outcome], Sums | None]:
    """Outcomes without tensors and the sum of their reports; or the outcomes as they are, if that is less to send."""
    bare = [kept_back(outcome, place.network, place.form) for outcome in outcomes]
    reports = [
        outcome.report
        for outcome, kept in zip(outcomes, bare, strict=True)
        if outcome.report is not None and kept.failure is None
    ]
    joined = place.merge.begin(Server(0, model, place.network))
    if not isinstance(joined, Summed) or any(report.tensors.keys() - model.keys() for report in reports):
        return outcomes, None
    for report in reports:
        joined.add(report)
    sums = joined.sums()
    return (bare, sums) if wire.size(sums) < wire.size([report.tensors for report in reports]) else (outcomes, None)
