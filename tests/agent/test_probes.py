"""Probes: sent once a round where fragments carry tokens, at times that tell nothing of the device."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from devices import PERIOD_S, SIGNER, SLOT_S, Slow, open_device
from served_boards import BLOCKS, WAITS, Served, plan, served

from agent.announcements import Phase
from agent.probes import probe_for
from agent.publisher import Publisher, Slots
from dpagent.protocol.codec import decode
from dpagent.protocol.dummies import as_sent
from dpagent.protocol.messages import Fragment, Plan, Receipts
from dpagent.protocol.tokens import fragment_bytes, without_token


def probes(fleet: Served) -> list[tuple[int, bytes]]:
    """Round and digest of those that leave."""
    return [(number, digest) for number, digests in fleet.device.probes().items() for digest in digests]


def receipted(fleet: Served, *digests: bytes) -> None:
    fleet.device.take_receipts(Receipts(b"".join(digests)))


def go_by(fleet: Served, number: int, **changes: Any) -> None:
    """A round without a receipt."""
    fleet.device.take_plan(plan(round=number, **changes), confirmed=False)
    for _ in range(6):
        fleet.pass_time(5 * PERIOD_S)
        fleet.answer(fleet.asks())
    fleet.pass_time(WAITS)
    fleet.device.advance()


def test_a_probe_has_the_length_of_a_fragment_and_holds_nothing() -> None:
    made = probe_for(plan(), 2)
    sent = as_sent(made.message, plan())
    probe = decode(made.message, Fragment)
    assert len(sent) == fragment_bytes(plan())
    assert (probe.round, probe.position, len(probe.id)) == (1, 2, 16)
    assert sent[24:].strip(b"\0") == Fragment.PROBE


def test_a_round_has_one_before_the_device_asks_for_anything(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        fleet.device.take_plan(plan())
        fleet.pass_time(PERIOD_S)
        ((number, digest),) = probes(fleet)
        assert number == 1
        fleet.run(plan())
        assert probes(fleet) == [(1, digest)], "the same, however often the plan comes"
        assert fleet.device.charged() == [1]


def test_a_receipt_that_comes_before_the_charge_counts(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        fleet.device.take_plan(plan())
        fleet.pass_time(PERIOD_S)
        ((_, digest),) = probes(fleet)
        receipted(fleet, digest)
        go_by(fleet, 1)
        assert fleet.device.charged() == [1]
        go_by(fleet, 2)
        assert fleet.device.charged() == [1, 2]
        go_by(fleet, 3)
        assert fleet.device.charged() == [1, 2], "none has come for the second"


def test_a_receipt_that_comes_after_the_next_plan_counts(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        go_by(fleet, 1)
        ((_, first),) = probes(fleet)
        go_by(fleet, 2)
        assert fleet.device.charged() == [1]
        ((number, _),) = probes(fleet)
        assert number == 2, "the one of the first round leaves no more"
        receipted(fleet, first)
        go_by(fleet, 2)
        assert fleet.device.charged() == [1, 2]


def test_receipts_of_fragments_empty_the_spool_and_let_nothing_go_on(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        go_by(fleet, 1)
        (digests,) = fleet.device.pending().values()
        assert len(digests) == BLOCKS
        receipted(fleet, *digests)
        assert fleet.device.pending() == {}
        go_by(fleet, 2)
        assert fleet.device.charged() == [1]


def test_a_plan_without_tokens_in_the_midst_of_a_job_is_no_way_round_it(tmp_path: Path) -> None:
    """Of a round with tokens, fragments' receipts let nobody go on, whatever the next plan says."""
    with served(tmp_path) as fleet:
        go_by(fleet, 1)
        (digests,) = fleet.device.pending().values()
        receipted(fleet, digests[0])
        go_by(fleet, 2, linkability="none")
        assert fleet.device.charged() == [1]


def test_it_still_waits_after_a_restart_and_sends_the_same_probe(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        go_by(fleet, 1)
        go_by(fleet, 2)
        before, identity, desk = probes(fleet), fleet.identity, fleet.desk
    with open_device(tmp_path / "device", identity=identity) as device:
        again = Served(device, desk, identity)
        device.give()
        device.take_plan(plan(round=2), confirmed=False)
        device.cycle.advance()
        assert probes(again) == before
        assert device.charged() == [1]


@pytest.mark.parametrize("alternations", [1, 5])
def test_plans_of_other_jobs_leave_one_probe_and_no_device_stuck(tmp_path: Path, alternations: int) -> None:
    with served(tmp_path) as fleet:
        go_by(fleet, 1)
        for number in range(alternations):
            fleet.device.take_plan(plan(job=bytes([number]) * 16, linkability="none"), confirmed=False)
            fleet.device.cycle.advance()
            go_by(fleet, 2)
            assert [round_number for round_number, _ in probes(fleet)] == [2]
        ((_, digest),) = probes(fleet)
        receipted(fleet, digest)
        go_by(fleet, 2)
        assert fleet.device.charged() == [1, 2]


def test_a_flood_of_plans_leaves_a_bounded_number(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        for number in range(200):
            fleet.device.take_plan(plan(job=number.to_bytes(16, "big")), confirmed=False)
            fleet.device.cycle.advance()
        (rows,) = fleet.device.state.connection.execute("SELECT count(*) FROM probes").fetchone()
        assert rows <= 65
        assert len(probes(fleet)) == 1


def sent_at(directory: Path, epoch: float, slots: int) -> tuple[list[float], list[float]]:
    """When probes leave, and fragments, from the plan on."""
    with served(directory) as fleet:
        device, clock = fleet.device, fleet.device.clock
        publisher = device.cycle._publisher
        publisher._epoch = clock.monotonic() + epoch * PERIOD_S
        departures = publisher._departures
        for chance in (publisher._random, departures._random, device.tokens._random):
            chance.uniform = lambda low, high: low + 0.4 * (high - low)  # type: ignore[method-assign]
        training = Slow(device, 0.1, longest_s=(slots - 0.5) * SLOT_S)
        times: dict[bool, list[float]] = {True: [], False: []}
        seal = departures._seal

        def noted(message: bytes, of: Plan) -> bytes:
            times[without_token(decode(message, Fragment))[1].probe].append(clock.monotonic() - began_at)
            return seal(message, of)

        departures._seal = noted
        began_at = clock.monotonic()
        device.take_plan(plan(jitter_window_s=0.0))
        for _ in range(round(15.0 / PERIOD_S) * 2):
            training.pass_time(PERIOD_S / 2)
            device.tokens.tend()
            fleet.answer(fleet.asks())
            publisher.publish_due()
        return times[True], times[False][:BLOCKS]


def test_its_time_tells_nothing_of_the_grid_nor_of_how_long_training_takes(tmp_path: Path) -> None:
    probe, fragments = sent_at(tmp_path / "a", 0.0, 1)
    assert len(probe) >= 2, "it has no receipt, and leaves again"
    assert len(fragments) == BLOCKS
    other_grid, later = sent_at(tmp_path / "b", -0.5, 1)
    assert other_grid == probe
    assert later != fragments
    slow, much_later = sent_at(tmp_path / "c", 0.0, 4)
    assert slow == probe
    assert min(much_later) >= max(fragments) + 3 * SLOT_S


def test_it_does_not_wait_for_the_fragments_before_it(tmp_path: Path) -> None:
    """The rate that a device sends at holds fragments back: a probe that waited behind them would tell when
    they left."""
    with served(tmp_path) as fleet:
        go_by(fleet, 1)
        publisher, line = fleet.device.cycle._publisher, fleet.device.line
        publisher._departures._fragments.next_to_leave = lambda now: None  # type: ignore[method-assign]
        state, now = fleet.device.state, fleet.device.clock.monotonic()
        ((_, probe),) = probes(fleet)
        state.probes.draw_times({probe: now - 1.0})
        state.reschedule((now - 2.0, digest) for digest in state.spool.pending())
        before = len(line.sent)
        assert publisher.due_in_s() < 1.0
        publisher.publish_due()
        assert len(line.sent) == before + 1
        assert state.probes.due(now, 9) == {}, "it was the probe"
        assert len(state.spool.due(now, 9)) == BLOCKS


def asked_at(directory: Path, epoch: float, longest_s: float) -> list[float]:
    """When a device asks by name after a plan that came while it trained for the one before, and tells by
    which key it did, where that was forgotten for lists of other jobs."""
    with served(directory) as fleet:
        device, clock = fleet.device, fleet.device.clock
        one = fleet.desk.keys.with_values({"moduli": fleet.desk.keys.moduli[:1]})
        device.tokens.watch._current.clear()
        device.tokens.watch._witness_at.clear()
        device.tokens.watch.take_keys(SIGNER.sign(one, "token-keys"))
        device.cycle._publisher._epoch = clock.monotonic() + epoch * PERIOD_S
        for chance in (device.tokens._random, device.tokens.watch._random):
            chance.uniform = lambda low, high: low + 0.4 * (high - low)  # type: ignore[method-assign]
        training = Slow(device, 0.1, longest_s=longest_s)
        device.take_plan(plan(compute_slot_s=40 * PERIOD_S))
        times: list[float] = []
        began_at = clock.monotonic()
        for step in range(round(14.0 / PERIOD_S) * 4):
            if step == round(11.0 / PERIOD_S) * 4:
                assert device.charged() == [1]
                assert device.announcements.current is not None
                assert device.announcements.current.phase is Phase.TRAIN
                device.tokens.watch.take_keys(fleet.desk.signed_keys)
                device.tokens.watch._witness_at.clear()
                device.take_plan(plan(round=2, compute_slot_s=40 * PERIOD_S))
            training.pass_time(PERIOD_S / 4)
            device.tokens.tend()
            asks = fleet.asks()
            times += [clock.monotonic() - began_at for _ in asks]
            fleet.answer(asks)
        told_at = [at - began_at for at, _ in device.tokens.watch._witness_at.values()]
        return times[1:] + told_at


def test_requests_after_a_plan_that_came_while_the_device_trained_tell_nothing_of_its_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator chooses when a plan comes, and knows whose the requests are. Before, they left within a
    period after the slots of the round before."""
    one, other = (asked_at(tmp_path / str(epoch), epoch, 0.5) for epoch in (0.0, -0.5))
    assert len(one) == 3
    assert one == other

    def end(publisher: Publisher, of: Plan, slots: Slots) -> float:
        return slots.begins_at + slots.number * publisher.slot_s(of)

    monkeypatch.setattr(Publisher, "end_on_any_grid", end)
    one, other = (asked_at(tmp_path / f"as before {epoch}", epoch, 0.5) for epoch in (0.0, -0.5))
    assert one != other


def test_what_has_no_receipt_leaves_again_and_writes_nothing_for_it(tmp_path: Path) -> None:
    """A coordinator that gives all boards receipts but one would see, by name, how that one comes to what its
    owner lets it write in a day."""
    with served(tmp_path) as fleet:
        go_by(fleet, 1)
        state, line = fleet.device.state, fleet.device.line
        fleet.device.clock.advance(4 * SLOT_S)
        fleet.device.cycle._publisher.publish_due()
        state.write_notes()
        before = len(line.sent)
        with closing(sqlite3.connect(state.file)) as other:
            version = "PRAGMA data_version"
            seen = other.execute(version).fetchone()
            for _ in range(20):
                fleet.device.clock.advance(5.0)
                fleet.device.cycle._publisher.publish_due()
                state.write_notes()
            assert len(line.sent) > before + 5 * BLOCKS
            assert other.execute(version).fetchone() == seen
            (digests,) = fleet.device.pending().values()
            receipted(fleet, digests[0])
            state.write_notes()
            assert other.execute(version).fetchone() != seen


@pytest.mark.parametrize("hides", [False, True])
def test_a_board_without_a_certificate_has_one_where_it_hides_that_it_sits_out(
    tmp_path: Path, hides: bool
) -> None:
    """A member that sits out sends as many messages as one that takes part; so does who is none."""
    with open_device(tmp_path, limits={"dummy_traffic": hides}) as device:
        device.give()
        device.take_plan(plan())
        device.advance()
        assert [len(digests) for digests in device.probes().values()] == hides * [1]
        assert len(device.pending().get(1, [])) == hides * BLOCKS


def test_none_leaves_once_its_job_is_over(tmp_path: Path) -> None:
    """Nobody gives it a receipt any more. Before, it left again every few seconds until the next job."""
    with served(tmp_path) as fleet:
        go_by(fleet, 1)
        publisher, line = fleet.device.cycle._publisher, fleet.device.line
        fleet.device.clock.advance(60.0)
        before = len(line.sent)
        publisher.publish_due()
        assert len(line.sent) > before, "without a receipt it leaves again"
        fleet.device.take_plan(plan(state="finished"), confirmed=False)
        assert probes(fleet) == []
        before = len(line.sent)
        for _ in range(3):
            fleet.device.clock.advance(60.0)
            publisher.publish_due()
        assert len(line.sent) == before
        assert publisher.due_in_s() == float("inf")


def test_a_member_goes_on_by_it_in_rounds_without_tokens_too(tmp_path: Path) -> None:
    """In a later round, of this job or another, it says by name how many rounds it has charged."""
    with served(tmp_path) as fleet:
        go_by(fleet, 1, linkability="none")
        ((number, digest),) = probes(fleet)
        assert number == 1
        (digests,) = fleet.device.pending().values()
        receipted(fleet, *digests)
        go_by(fleet, 2, linkability="none")
        assert fleet.device.charged() == [1], "a receipt of a fragment lets it not go on"
        receipted(fleet, digest)
        go_by(fleet, 2, linkability="none")
        assert fleet.device.charged() == [1, 2]
