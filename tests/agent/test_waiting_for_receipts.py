"""No second round is charged before a receipt of the first: a broker may acknowledge what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devices import SLOT_S, Device, open_device
from fleets import make_plan

from agent.announcements import Phase
from agent.rounds import RoundState
from dpagent.protocol.codec import decode
from dpagent.protocol.messages import Fragment, Receipts
from dpagent.protocol.task import RoundTask

MIXER = bytes([9, *[0] * 31])
"""The base point of the curve: any key that can be sealed to."""


def plan(number: int, **changes: Any) -> Any:
    return make_plan(round=number, mechanism={"noise_multipliers": [4.0] * 10}, **changes)


def goes_by(device: Device, number: int, **changes: Any) -> None:
    """A round is announced, and the device does what it can; no receipt comes."""
    device.take_plan(plan(number, **changes), confirmed=False)
    device.give()
    device.clock.advance(SLOT_S)
    device.advance()


def receipts(device: Device, count: int) -> None:
    """Receipts of so many fragments that are pending, or of probes."""
    (digests,) = (device.pending() or device.probes()).values()
    device.take_receipts(Receipts(b"".join(digests[:count])))


def sent(device: Device) -> int:
    """How many messages leave in the next window."""
    line: Any = device.cycle._publisher._session
    before = len(line.sent)
    device.clock.advance(4 * SLOT_S)
    device.cycle._publisher.publish_due()
    return len(line.sent) - before


def test_a_device_whose_fragments_never_arrive_spends_one_round_of_a_job(device: Device) -> None:
    for number in range(1, 10):
        goes_by(device, number)
    assert device.charged() == [1]
    goes_by(device, 1, job=b"k" * 16)
    assert device.charged() == [1, 1], "the next job may be at a broker that is mended"


def test_rounds_that_are_replaced_before_anything_leaves_are_no_way_round_it(device: Device) -> None:
    """A broker that holds plans back chooses when each arrives."""
    for number in range(1, 4):
        device.take_plan(plan(number), confirmed=False)
        device.give()
        while device.is_ready and number not in device.charged():
            device.clock.advance(max(device.cycle.due_in_s(), 1e-6))
            device.cycle.advance()
    device.advance()
    assert device.charged() == [1]


@pytest.mark.parametrize("rate", [1.0, 0.01], ids=["takes part", "sits out"])
def test_a_round_that_is_replaced_while_it_trains_has_the_next_one_wait(tmp_path: Path, rate: float) -> None:
    """Also where it is sat out: who does would else be known by who goes on."""
    with open_device(tmp_path, limits={"dummy_traffic": True, "maximum_sampling_rate": rate}) as device:
        device.take_plan(plan(1), confirmed=False)
        device.give()
        while (current := device.announcements.current) is None or current.phase is not Phase.TRAIN:
            device.clock.advance(max(device.cycle.due_in_s(), 1e-6))
            device.cycle.advance()
        goes_by(device, 2)
        device.advance()
        assert device.pending() == {}
        assert device.state.awaits_receipt(plan(1).job.hex(), by_probe=False)
        known = device.state.round(plan(2).job.hex(), 2)
        assert known is not None
        assert known.state is RoundState.OFFERED


def test_one_receipt_is_enough_and_one_is_wanted_of_each_round(device: Device) -> None:
    goes_by(device, 1)
    receipts(device, 1)
    goes_by(device, 2)
    goes_by(device, 3)
    assert device.charged() == [1, 2]


def test_a_device_that_waits_sends_one_probe_and_decides_when_its_receipt_comes(device: Device) -> None:
    goes_by(device, 1)
    assert device.probes() == {}, "without tokens, fragments will do"
    sent(device)
    goes_by(device, 2)
    assert device.pending() == {}
    probes = device.probes()
    assert {number: len(digests) for number, digests in probes.items()} == {2: 1}
    assert sent(device) == 1
    (message,) = device.state.connection.execute("SELECT message FROM probes").fetchone()
    assert decode(message, Fragment).probe
    device.take_plan(plan(2), confirmed=False)
    assert device.probes() == probes, "the same one when the round is announced again"
    receipts(device, 1)
    device.advance()
    assert device.charged() == [1, 2]


def test_through_a_mixer_it_asks_as_often_as_it_would_send(device: Device) -> None:
    """A mixer lets nothing out before there are enough messages, and all boards may wait."""
    goes_by(device, 1, mixer=MIXER)
    goes_by(device, 2, mixer=MIXER)
    (asked,) = device.probes().values()
    assert len(asked) == RoundTask.of(plan(2)).release.blocks
    receipts(device, 1)
    device.advance()
    assert device.charged() == [1, 2]


def test_a_device_waits_without_turning_round_and_without_a_training_process(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for days keeps no memory for it."""
    ended: list[float] = []
    monkeypatch.setattr(device.worker, "end", lambda: ended.append(device.clock.monotonic()))
    goes_by(device, 1)
    goes_by(device, 2)
    left_s = device.cycle.due_in_s()
    assert 600 < left_s < 1_200
    device.clock.advance(left_s - 1.0)
    device.cycle.advance()
    assert ended == []
    device.clock.advance(1.0)
    device.cycle.advance()
    assert len(ended) == 1
    assert device.cycle.due_in_s() == float("inf")
    device.clock.advance(3_600.0)
    device.cycle.advance()
    assert len(ended) == 1
    receipts(device, 1)
    device.advance()
    assert device.charged() == [1, 2]


def test_it_asks_for_no_receipt_of_a_round_that_is_nearly_over(device: Device) -> None:
    goes_by(device, 1)
    goes_by(device, 2, deadline=device.clock.unix() + SLOT_S)
    assert device.pending() == {}
    assert sent(device) == 0


def test_it_still_waits_after_a_restart(tmp_path: Path) -> None:
    with open_device(tmp_path) as device:
        goes_by(device, 1)
    with open_device(tmp_path) as device:
        goes_by(device, 2)
        probes = device.probes()
        assert device.charged() == [1]
    with open_device(tmp_path) as device:
        goes_by(device, 2)
        assert device.probes() == probes, "one a round, whatever happens in between"
        receipts(device, 1)
        device.advance()
        assert device.charged() == [1, 2]


@pytest.mark.parametrize("late", [False, True], ids=["never", "after the next plan"])
def test_who_sits_out_waits_as_who_takes_part(tmp_path: Path, late: bool) -> None:
    """Where dummies hide it, receipts that are withheld, or come late, must not tell the two apart."""
    seen = []
    for rate in (1.0, 0.01):
        limits = {"dummy_traffic": True, "maximum_sampling_rate": rate}
        with open_device(tmp_path / str(rate), limits=limits) as device:
            trace: list[Any] = []
            goes_by(device, 1)
            (first,) = device.pending().values()
            trace.append(sent(device))
            device.take_plan(plan(2), confirmed=False)
            if late:
                device.take_receipts(Receipts(first[0]))
            goes_by(device, 2)
            trace += [sent(device), *(len(them) for them in (device.pending() | device.probes()).values())]
            goes_by(device, 3)
            trace += [sent(device), *(len(them) for them in (device.pending() | device.probes()).values())]
            assert len(device.charged()) == ((1 + late) if rate == 1.0 else 0)
            seen.append(trace)
    assert seen[0] == seen[1]
