"""When a δ is too large to mean much."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.statement import (
    Adjacency,
    BudgetStatement,
    Trust,
    Unit,
    delta_warning,
    epsilon_warning,
    implies,
)


@pytest.mark.parametrize(
    ("delta", "records"), [(1e-5, 600), (1e-5, 9_999), (1e-3, 50), (1e-3, 100), (0.0, 1e9), (1e-9, 1e7)]
)
def test_a_delta_well_below_one_over_the_records_is_taken_without_a_word(
    delta: float, records: float
) -> None:
    assert delta_warning(delta, records) is None


@pytest.mark.parametrize(
    ("delta", "records", "limit"),
    [
        (0.5, 600, 1e-4),
        (2e-5, 1e4, 1e-5),
        (1e-3, 101, 9e-4),
        (0.0011, 5, 1e-3),
        (1.0, 1, 1e-3),
        (1e-5, 6e4, 1e-6),
    ],
)
def test_any_other_is_warned_about_with_one_that_will_do(delta: float, records: float, limit: float) -> None:
    sentence = delta_warning(delta, records)
    assert sentence is not None
    assert f"δ = {delta:g}" in sentence
    assert f"at most {limit:g}." in sentence


def test_a_guarantee_for_a_device_is_measured_by_the_devices_of_the_fleet() -> None:
    assert delta_warning(1e-5, 1_000, Unit.DEVICE) is None
    sentence = delta_warning(1e-5, 1e6, Unit.DEVICE)
    assert sentence is not None
    assert "a fleet's devices, 1/1e+06" in sentence
    assert "record" not in sentence


@given(delta=st.floats(0, 1), records=st.floats(1, 1e9))
def test_what_is_proposed_is_taken(delta: float, records: float) -> None:
    sentence = delta_warning(delta, records)
    if delta > 1e-3 or delta * records > 0.1000001:
        assert sentence is not None
    if sentence is not None:
        found = re.search(r"at most (\S+)\.$", sentence)
        assert found is not None
        assert delta_warning(float(found[1]) * (1 - 1e-5), records) is None


@pytest.mark.parametrize(
    ("delta", "records", "name"), [(math.nan, 10, "delta"), (1.5, 10, "delta"), (1e-5, 0, "records")]
)
def test_bad_values_are_named(delta: float, records: float, name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        delta_warning(delta, records)


def test_an_epsilon_that_protects_hardly_anybody_is_named() -> None:
    assert epsilon_warning(10.0, Unit.RECORD) is None
    sentence = epsilon_warning(10.5, Unit.DEVICE)
    assert sentence is not None
    assert "ε = 10.5" in sentence
    assert "device" in sentence


# --- statements -----------------------------------------------------------------------------------


def stated(**changes: Any) -> BudgetStatement:
    values: dict[str, Any] = {
        "unit": Unit.RECORD, "adjacency": Adjacency.ADD_OR_REMOVE_ONE, "trust": Trust.NONE,
        "mechanism": "noise", "epsilon": 2.0, "delta": 1e-5,
    }  # fmt: skip
    return BudgetStatement(**(values | changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [("unit", "record"), ("adjacency", None), ("trust", "none"), ("epsilon", -1e-9), ("epsilon", math.nan),
     ("epsilon", True), ("epsilon", "2"), ("delta", -1e-9), ("delta", 1.1), ("delta", math.nan)],
)  # fmt: skip
def test_a_statement_of_no_sense_is_refused(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=rf"^{name} is "):
        stated(**{name: value})


@given(epsilon=st.floats(0, 1e6), delta=st.floats(0, 1, exclude_max=True))
def test_a_sentence_never_states_less_than_the_figure(epsilon: float, delta: float) -> None:
    sentence = stated(epsilon=epsilon, delta=delta).sentence()
    (shown,) = re.findall(r"ε = ([^,]+),", sentence)
    assert epsilon <= float(shown) <= epsilon * (1 + 1e-5) + 1e-300


def test_no_guarantee_is_stated_as_none() -> None:
    for nothing in (stated(epsilon=math.inf), stated(delta=1.0)):
        assert not nothing.is_guarantee
        assert "no guarantee" in nothing.sentence()
        assert "ε" not in nothing.sentence()


@pytest.mark.parametrize("kind", [Unit, Adjacency, Trust])
def test_each_part_of_a_scope_has_words_of_its_own(kind: type[Unit | Adjacency | Trust]) -> None:
    assert len({part.meaning for part in kind}) == len(kind)


def test_a_scope_implies_itself_and_one_implies_three_more() -> None:
    """A bound for any records of a device, whomever one trusts, holds for one record, for zeros, and with
    trust. The reverse of none is proven."""
    scopes = [*itertools.product(Unit, Adjacency, Trust)]
    device = (Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.NONE)
    found = {(one, other) for one in scopes for other in scopes if implies(one, other) and one != other}
    assert all(implies(each, each) for each in scopes)
    assert found == {
        (device, (Unit.RECORD, Adjacency.ADD_OR_REMOVE_ONE, Trust.NONE)),
        (device, (Unit.DEVICE, Adjacency.ZERO_OUT, Trust.COORDINATOR)),
        (device, (Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.SHUFFLER)),
    }


@pytest.mark.parametrize(
    ("delta", "shown"),
    [
        (1e-5, "1e-5"),
        (1.2345641e-5, "1.23457e-5"),
        (0.1, "0.1"),
        (9.9999991e-6, "1e-5"),
        (0.0, "0"),
        (1 / 3, "0.333334"),
    ],
)
def test_a_delta_is_shown_rounded_up_as_an_epsilon_is(delta: float, shown: str) -> None:
    statement = BudgetStatement(Unit.RECORD, Adjacency.ADD_OR_REMOVE_ONE, Trust.NONE, "m", 1.0, delta)
    assert f"δ = {shown} (" in statement.sentence()
    assert float(shown) >= delta * (1 - 1e-12)
