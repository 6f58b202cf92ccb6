"""Methods side by side: which runs, which bounds, which errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_records import record_of, with_settings

from dpagent.errors import ConfigurationError, UsageError
from dpagent.privacy.statement import Trust, Unit
from simulation.comparison import bounds_of, requests_by_method, scope_in_words, scopes_of
from simulation.request import Request

SUMS = record_of(rounds=4)
REPORTS = with_settings(record_of(rounds=3), method="ldp-fl", noise="two-point")


def test_all_fleets_hold_the_same_records(tmp_path: Path) -> None:
    requests = requests_by_method(Request(), ["ldp-fl", "dp-sgd"], tmp_path)
    assert list(requests) == ["ldp-fl", "dp-sgd"]
    assert [each.method for each in requests.values()] == ["ldp-fl", "dp-sgd"]
    assert {each.devices for each in requests.values()} == {10}, "the most that a method needs"
    given = requests_by_method(Request(devices=3), ["ldp-fl", "dp-sgd"], tmp_path)
    assert {each.devices for each in given.values()} == {3}


@pytest.mark.parametrize(
    "methods", [[], ["dp-sgd"], ["dp-sgd", "dp-sgd"], ["dp-sgd", "none"], ["dp-sgd", ""]]
)
def test_methods_have_to_be_known_and_different(methods: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected two or more different ones of dp-sgd, "):
        requests_by_method(Request(), methods, tmp_path)


def test_the_directory_of_a_single_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="holds the run of one method"):
        requests_by_method(Request(), ["dp-sgd", "ldp-fl"], tmp_path)


def test_a_bound_counts_where_it_holds_and_nowhere_else() -> None:
    record, device, trusting = (
        (Unit.RECORD, Trust.NONE), (Unit.DEVICE, Trust.NONE), (Unit.DEVICE, Trust.COORDINATOR)
    )  # fmt: skip
    assert scopes_of([REPORTS, SUMS]) == scopes_of([SUMS, REPORTS]) == [record, device]
    scopes = [record, device, trusting]
    assert bounds_of(SUMS, scopes) == [SUMS.epsilon, None, None]
    # Whatever a device's records become: so also for each of them, and whomever one trusts.
    assert bounds_of(REPORTS, scopes) == [REPORTS.epsilon] * 3
    assert len({scope_in_words(scope) for scope in scopes}) == 3
