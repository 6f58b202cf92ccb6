"""Topics: one level of the tree is one fleet, whatever it is called."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dpagent.protocol.receipts import receipt_place
from dpagent.protocol.topics import FleetName, Topics
from dpagent.schema.base import checked_as
from dpagent.schema.problems import SchemaError

BAD = [
    "",
    "a/b",
    "+",
    "#",
    "a+",
    "a#b",
    "a b",
    "-a",
    "_a",
    "ä",
    "a" * 64,
    "a\n",
    "\na",
    "a\0",
    "a\r",
    "$SYS",
    "a.b",
]
GOOD = ["a", "A", "0", "a-b_C9", "a" * 63]


@pytest.mark.parametrize("fleet", BAD)
def test_bad_names_are_refused(fleet: str) -> None:
    with pytest.raises(ValueError, match="expected 1 to 63"):
        Topics(fleet)
    with pytest.raises(SchemaError):
        checked_as(FleetName, fleet)


@pytest.mark.parametrize("fleet", GOOD)
def test_good_names_make_topics_below_their_own_level(fleet: str) -> None:
    assert checked_as(FleetName, fleet) == fleet
    topics = Topics(fleet)
    names = [topics.plan, topics.model_chunk(0), topics.model_chunks, topics.fragments, topics.receipts]
    names += [topics.own_receipts, topics.receipt(receipt_place(bytes(16)))]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.startswith(f"dpagent/v1/{fleet}/")
        assert name.count("/") <= 4
    assert topics.receipt("a" * 32) == topics.own_receipts.replace("+", "a" * 32)
    assert topics.model_chunk(17) == topics.model_chunks.replace("+", "17")


@given(st.text(max_size=70))
@example("a\n")
def test_both_checks_agree_on_any_name(fleet: str) -> None:
    try:
        Topics(fleet)
        by_topics = True
    except ValueError:
        by_topics = False
    try:
        checked_as(FleetName, fleet)
        by_schema = True
    except SchemaError:
        by_schema = False
    assert by_topics == by_schema
