"""Reports as bytes: there and back, of one length, in one way, and hostile payloads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleets import DIGITS, report_plan
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import PlanError
from dpagent.privacy.mechanisms.two_point import group_edges
from dpagent.protocol.bit_packing import pack_bits, unpack_bits
from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.dummies import as_sent, dummies_for
from dpagent.protocol.fragments import cut, read_tally, require_place
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.report_packing import read_reports
from dpagent.protocol.sizes import packed_bytes, report_width
from dpagent.protocol.task import RoundTask
from dpagent.protocol.update_size import values_of

WEIGHTS = DIGITS.initial_weights(0)


@given(st.integers(1, 29), st.data())
def test_reports_come_back_from_one_length(width: int, data: st.DataObject) -> None:
    reports = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=1, max_size=50))
    payload = pack_bits(np.array(reports, np.int64), width)
    assert len(payload) == packed_bytes(len(reports), width)
    assert payload[:1] != Fragment.DUMMY
    assert unpack_bits(payload, len(reports), width).tolist() == reports


@given(st.binary(min_size=6, max_size=6))
def test_no_two_payloads_say_the_same(payload: bytes) -> None:
    """Whatever is accepted is what an honest device would have sent."""
    try:
        reports = unpack_bits(payload, 9, 4)
    except ValueError:
        return
    assert pack_bits(reports, 4) == payload


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"", "0 bytes; expected 3"), (bytes(2), "2 bytes"), (bytes(4), "4 bytes"),
        (b"\1\0\0", "first byte"), (b"\0\0\1", "beyond the last value"),
        (pack_bits(np.array([4, 0, 0, 0, 0]), 3), "a place beyond its group"),
        (pack_bits(np.array([0, 0, 0, 0, 1]), 3), "beyond the last group"),
    ],
    ids=["empty", "short", "long", "marked", "a bit more", "a place too far", "a report too many"],
)  # fmt: skip
def test_a_payload_that_no_honest_device_sends_is_refused(payload: bytes, text: str) -> None:
    """Ten weights in four groups, of which fragments have five at most: 2, 3, 2 and 3 weights."""
    with pytest.raises(ValueError, match=text):
        read_reports(payload, 0, 5, dimension=10, coordinates=4)


def test_a_tally_counts_each_report_where_it_belongs() -> None:
    edges = group_edges(10, 4, 0, 4).tolist()
    assert edges == [0, 2, 5, 7, 10]
    # The second fragment of two groups: weights 5 to 9. Place 1 with a one, place 2 with a zero.
    payload = pack_bits(np.array([2 * 1 + 1, 2 * 2 + 0]), report_width(10, 4))
    tally = read_reports(payload, 1, 2, dimension=10, coordinates=4)
    assert tally.tolist() == [0, 1, 0, 0, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(("coordinates", "block"), [(40, 10), (7, 3), (1, 1), (DIGITS.parameter_count, 700)])
def test_what_devices_send_is_counted_by_weight(coordinates: int, block: int) -> None:
    """Three devices' reports, through fragments, against the mechanism's own count."""
    task = RoundTask.of(report_plan(coordinates=coordinates, block=block))
    release, plan = task.release, task.plan
    mechanism = release.two_point
    reports = [mechanism.report(WEIGHTS) for _ in range(3)]
    sums: dict[int, Any] = {}
    for report in reports:
        update = release.encoded(report)
        assert update.shape == (values_of(plan),) == (coordinates,)
        fragments = list(cut(update, plan))
        assert len(fragments) == release.blocks == -(-coordinates // block)
        assert len({len(encode(fragment)) for fragment in fragments}) == 1
        for fragment in fragments:
            tally = read_tally(fragment, plan, plan.release, release.blocks)
            sums[fragment.position] = sums.get(fragment.position, 0) + tally
    for counted, expected in zip(release.tally(sums), mechanism.tally(reports), strict=True):
        np.testing.assert_array_equal(counted, expected)


def test_fragments_elsewhere_and_of_other_lengths_are_refused_and_dummies_have_their_place() -> None:
    task = RoundTask.of(report_plan())
    release, plan = task.release, task.plan
    fragment = next(cut(release.update_of(WEIGHTS, WEIGHTS), plan))
    for changes, reason in (
        ({"position": release.blocks}, "bad position"), ({"payload": fragment.payload + b"\0"}, "wrong size"),
        ({"payload": b"\1" + fragment.payload[1:]}, "bad values"),
    ):  # fmt: skip
        with pytest.raises(MessageError) as caught:
            read_tally(replace(fragment, **changes), plan, plan.release, release.blocks)
        assert caught.value.reason == reason
    dummies = [decode(as_sent(encode(dummy), plan), Fragment) for dummy in dummies_for(plan)]
    assert [dummy.position for dummy in dummies] == [*range(release.blocks)]
    for dummy in dummies:
        assert dummy.dummy
        require_place(dummy, plan.wire, release.blocks)
        assert len(encode(dummy)) == len(encode(fragment))


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("release", {"coordinates": 0}), ("release", {"coordinates": 2**28 + 1}),
        ("release", {"coordinates": 1.0}), ("release", {"kind": "other"}),
        ("release", {"noise_multipliers": []}), ("release", {"noise_multipliers": [0.0]}),
        ("release", {"radii": []}), ("release", {"radii": [0.0, 0.1]}), ("release", {"radii": [0.1, 2e6]}),
        ("release", {"training": {"steps": 0, "batch": 8, "learning_rate": 0.1}}),
        ("release", {"training": {"steps": 1, "batch": 65_537, "learning_rate": 0.1}}),
        ("release", {"training": {"steps": 1, "batch": 8, "learning_rate": 0.0}}),
        ("release", {"more": 1}), ("wire", {"bytes": 12}), ("wire", {"block": 0}),
    ],
)  # fmt: skip
def test_plans_out_of_range_are_refused(section: str, changes: dict[str, Any]) -> None:
    import cbor2

    values = report_plan().as_dict()
    assert decode(cbor2.dumps(values), Plan) == report_plan()
    values[section] = values[section] | changes
    with pytest.raises(MessageError) as caught:
        decode(cbor2.dumps(values), Plan)
    assert caught.value.reason == "malformed"


def test_more_bits_than_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="bits are asked of"):
        report_plan(coordinates=DIGITS.parameter_count + 1, block=1)


@pytest.mark.parametrize(
    ("changes", "text"), [({"noise_multipliers": [0.5, 0.5, 1e5]}, "later round"), ({}, None)]
)
def test_the_events_of_a_job_are_those_of_all_rounds_left(changes: dict[str, Any], text: str | None) -> None:
    values = report_plan().as_dict()
    values["release"] |= changes
    release = RoundTask.of(Plan.checked(values)).release
    if text is None:
        assert [event.event.epsilon for event in release.events] == [2.0, 2.0, 4.0]
        assert {event.count for event in release.events} == {40}
    else:
        with pytest.raises(PlanError, match=text):
            _ = release.events


@pytest.mark.parametrize(
    ("changes", "is_pinned"),
    [
        ({"noise_multipliers": [0.5, 0.5, 0.26]}, True),
        ({"training": {"steps": 6, "batch": 8, "learning_rate": 0.1}}, False),
        ({"radii": [0.25] * len(DIGITS.parameter_shapes)}, False),
    ],
)
def test_bits_and_noise_are_pinned_and_training_and_ranges_are_not(
    changes: dict[str, Any], is_pinned: bool
) -> None:
    first, other = RoundTask.of(report_plan()), RoundTask.of(report_plan(release=changes))
    assert (other.schedule_digest != first.schedule_digest) is is_pinned


@pytest.mark.parametrize("count", [1, len(DIGITS.parameter_shapes) + 1])
def test_ranges_are_for_the_tensors_of_the_model(count: int) -> None:
    with pytest.raises(PlanError, match=f"radii for {count} tensors; the model has"):
        RoundTask.of(report_plan(release={"radii": [0.1] * count}))


def test_reports_do_not_go_with_another_method() -> None:
    values = report_plan().as_dict() | {"method": "dp-sgd"}
    with pytest.raises(PlanError, match="dp-sgd and mechanism two-point do not go together"):
        RoundTask.of(Plan.checked(values))
