"""A device that sits a round out sends as much, at such times, as one that takes part."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from devices import PERIOD_S, Device, open_device
from fleets import make_plan, terms
from ledgers import DATASET

from agent.announcements import Phase
from agent.departures import sealed_for
from agent.limits import BeyondLimitError
from agent.rounds import RoundState
from agent.training_messages import Order, Prepared, WorkerError
from dpagent.protocol.codec import MessageError, decode
from dpagent.protocol.dummies import MAX_DUMMIES
from dpagent.protocol.messages import Fragment, Plan, Receipts
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.task import RoundTask

JOB, OTHER_JOB = b"j" * 16, b"k" * 16
ON: dict[str, Any] = {"limits": {"dummy_traffic": True}}
SPENT: dict[str, Any] = {"limits": {"dummy_traffic": True, "maximum_job_epsilon": 1e-6}}
"""No job fits what is left."""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with open_device(tmp_path, **ON) as device:
        device.give()
        yield device


def state_of(device: Device, plan: Plan) -> RoundState:
    known = device.state.round(plan.job.hex(), plan.round)
    assert known is not None
    return known.state


def due_times(device: Device) -> list[float]:
    rows = device.state.connection.execute("SELECT due_at FROM times")
    return sorted(row[0] for row in rows)


def messages(device: Device) -> list[bytes]:
    device.state.write_notes()
    rows = device.state.connection.execute("SELECT message FROM messages")
    return [row[0] for row in rows]


def declined_plan(**changes: Any) -> Plan:
    """A plan that is beyond any budget."""
    return make_plan(**terms(noise_multipliers=[0.05] * 3), **changes)


def test_a_declined_round_is_answered_by_as_many_messages_of_one_size(tmp_path: Path, device: Device) -> None:
    plan = declined_plan()
    device.take_plan(plan)
    device.advance()
    assert (device.charged(), state_of(device, plan)) == ([], RoundState.SAT_OUT)
    dummies = [decode(message, Fragment) for message in messages(device)]
    assert all(each.dummy and each.payload == Fragment.DUMMY for each in dummies)
    positions = sorted(each.position for each in dummies)
    assert positions == list(range(RoundTask.of(plan).release.blocks))
    with open_device(tmp_path / "other", **ON) as other:
        other.give()
        other.take_plan(make_plan())
        other.advance()
        assert other.charged() == [1]
        fragments = messages(other)
        assert not any(decode(message, Fragment).dummy for message in fragments)
        assert len(fragments) == len(dummies)
        sizes = {len(sealed_for(message, plan)) for message in fragments + messages(device)}
        assert len(sizes) == 1


def test_their_window_is_that_of_an_update(device: Device) -> None:
    plan = declined_plan()
    device.take_plan(plan)
    began_at = device.clock.monotonic()
    device.advance()
    times = due_times(device)
    opens_at = began_at + plan.compute_slot_s
    # The slots begin at a point of the grid, a quarter of a period or more after the decision began.
    assert opens_at <= times[0] < times[-1] <= opens_at + 1.25 * PERIOD_S + plan.jitter_window_s


def test_a_device_without_dummy_traffic_stays_silent(tmp_path: Path) -> None:
    with open_device(tmp_path) as device:
        device.give()
        device.take_plan(declined_plan())
        device.advance()
        assert len(device.declined()) == 1
        assert messages(device) == []


@pytest.mark.parametrize(
    "plan",
    [
        declined_plan(compute_slot_s=0.001, jitter_window_s=0.1),
        declined_plan(jitter_window_s=0.1),
        declined_plan(sealing_key=bytes(32)),
        declined_plan(wire={"block": 1}),
    ],
    ids=["slot", "jitter", "key", "fragments"],
)
def test_a_plan_that_shows_dummies_or_asks_for_too_many_gets_none(tmp_path: Path, plan: Plan) -> None:
    assert RoundTask.of(plan).release.blocks < MAX_DUMMIES or plan.wire.block == 1
    limits = {"dummy_traffic": True, "minimum_compute_slot_s": 0.5, "minimum_jitter_window_s": 0.5}
    with open_device(tmp_path, limits=limits) as device:
        device.give()
        device.take_plan(plan)
        device.clock.advance(1.0)
        device.advance()
        assert (device.pending(), len(device.declined())) == ({}, 1)


def test_a_plan_that_this_version_cannot_run_is_answered_too(device: Device) -> None:
    plan = make_plan(mechanism={"name": "of-the-future"}, clipping={"count_weight": 0.1})
    device.take_plan(plan)
    device.advance()
    assert state_of(device, plan) is RoundState.SAT_OUT
    assert len(messages(device)) == -(-(plan.model.parameters + 1) // plan.wire.block)


def test_a_spent_budget_is_answered_round_after_round(tmp_path: Path) -> None:
    with open_device(tmp_path, **SPENT) as device:
        device.give()
        for number in (1, 2, 3):
            plan = make_plan(round=number)
            device.take_plan(plan)
            device.clock.advance(10.0)
            device.advance()
            ((_, digests),) = device.pending().items()
            assert set(device.pending()) == {number}
            assert len(digests) == RoundTask.of(plan).release.blocks
        assert device.state.ledger.epsilon_spent(DATASET) == 0.0
        device.take_plan(make_plan(round=3, state="finished"))
        assert device.pending() == {}


def test_receipts_drop_dummies_and_leave_the_round_sat_out(device: Device) -> None:
    plan = declined_plan()
    device.take_plan(plan)
    device.advance()
    digests = [receipt_digest(decode(message, Fragment).id) for message in messages(device)]
    for count, digest in enumerate(digests, 1):
        device.take_receipts(Receipts(digest))
        assert len(messages(device)) == len(digests) - count
    assert state_of(device, plan) is RoundState.SAT_OUT


@pytest.mark.parametrize("sits_out", [False, True], ids=["takes part", "sits out"])
@pytest.mark.parametrize("trial_s", [0.0, 2.0], ids=["at once", "after the trial"])
def test_a_round_that_is_too_short_is_answered_by_nothing_and_decided_on_again(
    tmp_path: Path, trial_s: float, sits_out: bool
) -> None:
    """If its deadline alone settled it, a round too short for all devices would never end, however often its
    deadline is put off. One that takes part is silent too while it is too late."""
    with open_device(tmp_path, **(SPENT if sits_out else ON)) as device:
        device.worker.longest_s = trial_s
        now = device.clock.unix()
        plan = make_plan(deadline=now + (1.0 if trial_s else 0.1))
        device.give()
        device.take_plan(plan)
        device.advance()
        assert (device.charged(), device.pending()) == ([], {})
        assert state_of(device, plan) is RoundState.DECLINED
        device.take_plan(plan.with_values({"deadline": now + 60.0}))
        device.clock.advance(1.0)
        for _ in range(100):
            device.clock.advance(PERIOD_S)
            device.cycle.advance()
        assert device.charged() == ([] if sits_out else [1])
        assert len(messages(device)) == RoundTask.of(plan).release.blocks
        assert state_of(device, plan) is (RoundState.SAT_OUT if sits_out else RoundState.SPOOLED)


def test_a_round_is_sat_out_once_and_for_all(tmp_path: Path) -> None:
    """Fragments beside its dummies would show: after a restart, when the deadline is put off, and when the
    plan comes back after another job."""
    plan = declined_plan()
    later = plan.with_values({"deadline": plan.deadline + 1.0})
    with open_device(tmp_path, **ON) as device:
        device.give()
        device.take_plan(plan)
        device.advance()
        pending = device.pending()
        device.take_plan(later)
        device.advance()
        assert device.pending() == pending
    with open_device(tmp_path, **ON) as device:
        device.give()
        device.take_plan(later)
        device.advance()
        assert device.pending() == pending
        assert min(due_times(device)) > device.clock.monotonic(), "at their old times all would leave at once"
        device.take_plan(make_plan(job=OTHER_JOB))
        device.clock.advance(10.0)
        device.advance()
        device.take_plan(later)
        device.clock.advance(10.0)
        device.advance()
        assert set(device.state.spool.pending().values()) == {(OTHER_JOB.hex(), 1)}
        assert device.charged() == [1]


def answered(device: Device, plan: Plan) -> bool:
    """Whether the device has something to send for a round, once it is announced and its time has come."""
    device.take_plan(plan)
    device.clock.advance(10.0)
    device.advance()
    return (plan.job.hex(), plan.round) in device.state.spool.pending().values()


def test_what_other_rounds_have_still_to_send_is_given_up_whatever_a_round_is_declined_for(
    tmp_path: Path,
) -> None:
    """As where one is charged: else the first plan, sent again, tells who sat the second one out."""
    first = make_plan(job=JOB)
    unknown = make_plan(job=OTHER_JOB, mechanism={"name": "of-the-future"}, clipping={"count_weight": 0.1})
    with open_device(tmp_path, **ON) as device:
        device.give()
        assert answered(device, first)
        assert answered(device, unknown)
        assert set(device.state.spool.pending().values()) == {(OTHER_JOB.hex(), 1)}
        assert not answered(device, first)


@pytest.mark.parametrize("sits_out", [False, True], ids=["takes part", "sits out"])
def test_a_round_is_over_for_good_however_many_come_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sits_out: bool
) -> None:
    """A charge stays in the ledger. A round that was sat out, and then forgotten, was answered once more."""
    monkeypatch.setattr("agent.rounds._KEPT", 3)
    old = make_plan(job=JOB, round=2)
    settings = SPENT if sits_out else ON
    with open_device(tmp_path, **settings) as device:
        device.give()
        assert answered(device, old)
        for number in range(1, 8):
            assert answered(device, declined_plan(job=bytes([number]) * 16))
        assert device.state.round(JOB.hex(), 2) is None, "its row is forgotten"
        for plan in (old, old.with_values({"deadline": old.deadline + 1.0})):
            assert not answered(device, plan)
    with open_device(tmp_path, **settings) as device:
        device.give()
        assert not answered(device, old)
        with pytest.raises(MessageError, match="replayed"):
            device.take_plan(make_plan(job=JOB, round=1))
        assert device.charged() == ([] if sits_out else [2])
        assert answered(device, make_plan(job=JOB, round=3))


@pytest.mark.parametrize("sits_out", [False, True], ids=["takes part", "sits out"])
def test_a_device_is_silent_in_jobs_that_it_could_not_remember(tmp_path: Path, sits_out: bool) -> None:
    """It remembers as many as it may have charges, as a coordinator can sign any number. It is silent whether
    it would take part or not; a job that it remembers goes on."""
    limits = {"dummy_traffic": True, "maximum_charges": 6, "maximum_model_mib": 1}
    large = make_plan(job=b"m" * 16)
    large = large.with_values({"model": large.model.with_values({"parameters": 3 << 20})})
    with open_device(tmp_path, limits=limits | (SPENT["limits"] if sits_out else {})) as device:
        device.give()
        assert answered(device, make_plan(job=JOB, round=1))
        for number in range(1, 6):
            assert answered(device, declined_plan(job=bytes([number]) * 16))
        for plan in (make_plan(job=OTHER_JOB), declined_plan(job=b"l" * 16), large):
            assert not answered(device, plan)
            assert state_of(device, plan) is RoundState.DECLINED
        assert "the number of jobs, with this one, is 7" in device.declined()[0][1]
        assert device.charged() == ([] if sits_out else [1])
        assert answered(device, make_plan(job=JOB, round=2))


@pytest.mark.parametrize("sits_out", [False, True], ids=["takes part", "sits out"])
def test_after_a_power_cut_among_the_slots_as_many_slots_begin_again(tmp_path: Path, sits_out: bool) -> None:
    """Else dummies leave one slot after it, and an update after as many as training takes."""
    plan, settings = make_plan(), SPENT if sits_out else ON
    slots, trial_s = 3, 2.5 * make_plan().compute_slot_s
    with open_device(tmp_path, **settings) as device:
        device.worker.longest_s = trial_s
        device.give()
        device.take_plan(plan)
        until = device.clock.monotonic() + 1.5 * plan.compute_slot_s
        while device.clock.monotonic() < until:
            device.clock.advance(PERIOD_S / 10)
            device.cycle.advance()
        assert device.pending() == {}
    with open_device(tmp_path, **settings) as device:
        device.worker.longest_s = trial_s
        device.give()
        device.take_plan(plan)
        began_at = device.clock.monotonic()
        while not device.pending():
            device.clock.advance(PERIOD_S / 10)
            device.cycle.advance()
        assert device.clock.monotonic() >= began_at + (slots - 0.25) * plan.compute_slot_s
        assert state_of(device, plan) is (RoundState.SAT_OUT if sits_out else RoundState.SPOOLED)


@pytest.mark.parametrize("sits_out", [False, True], ids=["takes part", "sits out"])
def test_a_later_round_among_the_slots_leaves_the_earlier_one_unanswered(
    tmp_path: Path, sits_out: bool
) -> None:
    plan = make_plan()
    with open_device(tmp_path, **(SPENT if sits_out else ON)) as device:
        device.worker.longest_s = 2.5 * plan.compute_slot_s
        device.give()
        device.take_plan(plan)
        until = device.clock.monotonic() + 1.5 * plan.compute_slot_s
        while device.clock.monotonic() < until:
            device.clock.advance(PERIOD_S / 10)
            device.cycle.advance()
        device.take_plan(make_plan(round=2))
        for _ in range(1_000):
            device.clock.advance(PERIOD_S / 10)
            device.cycle.advance()
            assert 1 not in device.pending(), "not for a moment"
        assert state_of(device, plan) is (RoundState.SAT_OUT if sits_out else RoundState.EXPIRED)
        assert device.pending().keys() == {2}


def test_a_charged_round_that_the_limits_exclude_by_now_is_answered_by_dummies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent.training import Trainer

    plan = make_plan()

    def power_cut(*_: object) -> None:
        raise KeyboardInterrupt

    with open_device(tmp_path, **ON) as device, monkeypatch.context() as patch:
        patch.setattr(Trainer, "noisy_update", power_cut)
        device.give()
        device.take_plan(plan)
        with pytest.raises(KeyboardInterrupt):
            device.advance()
    stricter = {"limits": ON["limits"] | {"maximum_sampling_rate": 0.01}}
    for _ in range(2):
        with open_device(tmp_path, **stricter) as device:
            device.give()
            device.take_plan(plan)
            device.advance()
            assert state_of(device, plan) is RoundState.EXPIRED
            assert len(messages(device)) == RoundTask.of(plan).release.blocks
            assert all(decode(message, Fragment).dummy for message in messages(device))
            assert device.state.repeatable() == []
    with open_device(tmp_path, **ON) as device:
        device.give()
        device.take_plan(plan)
        device.advance()
        assert (device.charged(), state_of(device, plan)) == ([1], RoundState.EXPIRED)


def test_a_round_that_is_being_sat_out_and_is_too_large_by_now_is_sat_out_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was decided on again, and could run beside its dummies."""
    plan = make_plan()
    with open_device(tmp_path, **SPENT) as device:
        device.worker.longest_s = 2.5 * plan.compute_slot_s
        device.give()
        device.take_plan(plan)
        while state_of(device, plan) is RoundState.OFFERED:
            device.clock.advance(PERIOD_S / 2)
            device.cycle.advance()
        assert state_of(device, plan) is RoundState.SITTING_OUT

    def beyond(*_: object) -> None:
        raise BeyondLimitError("the model", 2, "at most 1 MiB", "maximum_model_mib")

    for settings, is_too_large in ((SPENT, True), (ON, False)):
        with open_device(tmp_path, **settings) as device, monkeypatch.context() as patch:
            if is_too_large:
                patch.setattr("agent.announcements.require_size", beyond)
            device.give()
            device.take_plan(plan)
            for _ in range(200):
                device.clock.advance(PERIOD_S / 2)
                device.cycle.advance()
            assert (device.charged(), state_of(device, plan)) == ([], RoundState.SAT_OUT)
            assert len(messages(device)) == RoundTask.of(plan).release.blocks


def test_dummies_of_many_rounds_repeat_no_id_and_fill_no_disk(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    seen: set[bytes] = set()
    for number in (1, 2, 3):
        device.take_plan(declined_plan(round=number))
        device.clock.advance(10.0)
        device.advance()
        rows = device.state.connection.execute("SELECT round, digest FROM fragments").fetchall()
        assert {row[0] for row in rows} == {number}
        seen |= {row[1] for row in rows}
    assert len(seen) == 3 * RoundTask.of(make_plan()).release.blocks
    assert "expired" not in caplog.text


PRICE_S, TRIAL_S = 0.19 * PERIOD_S, 0.05 * PERIOD_S
NEXT = make_plan(job=b"n" * 16, deadline=1e9, compute_slot_s=PERIOD_S)


def begins_after(
    directory: Path, ending: str, trial_s: float, limits: dict[str, Any], grid: float
) -> tuple[float, int]:
    """When the slots of a round begin, in seconds since the plan before it, which led to no charge; and how
    many plans were priced."""
    directory.mkdir()
    priced: set[bytes] = set()
    with open_device(directory, limits=ON["limits"] | limits) as device:
        device.give()
        admit, at_once, publisher = (
            device.cycle._questions.price,
            device.worker.prepare,
            device.cycle._publisher,
        )
        unanswered: list[tuple[float, Future[Prepared], Future[Prepared]]] = []

        def slow_admit(plan: Plan, model: Any) -> Any:
            answer = admit(plan, model)
            if answer.result().why_not is None and plan.job not in priced:
                priced.add(plan.job)
                device.clock.compute(PRICE_S)
            return answer

        def slow_prepare(order: Order) -> Future[Prepared]:
            unanswered.append((device.clock.monotonic() + trial_s, Future(), at_once(order)))
            return unanswered[-1][1]

        def pass_time(seconds: float) -> None:
            until = device.clock.monotonic() + seconds
            while device.clock.monotonic() < until:
                device.clock.advance(TRIAL_S / 20)
                if unanswered and device.clock.monotonic() >= unanswered[0][0]:
                    _, future, answer = unanswered.pop(0)
                    if ending == "fails" and answer is first:
                        future.set_exception(WorkerError("the training process ended", trial_s))
                    else:
                        future.set_result(Prepared(answer.result().longest_s, trial_s))
                device.cycle.advance()

        device.cycle._questions.price, device.worker.prepare = slow_admit, slow_prepare  # type: ignore[method-assign]
        publisher._epoch = device.clock.monotonic() - grid * PERIOD_S
        began_at, plan = device.clock.monotonic(), NEXT.with_values({"job": JOB})
        device.take_plan(plan)
        device.cycle.advance()
        first = unanswered[0][2]
        if ending == "is too late":
            device.take_plan(plan.with_values({"deadline": device.clock.unix() + 2e-3}))
        if ending == "is replaced":
            device.take_plan(NEXT)
        pass_time(began_at + trial_s + 1.1 * PRICE_S - device.clock.monotonic())
        device.take_plan(plan if ending == "is replaced" else NEXT)
        announced = device.announcements.current
        assert announced is not None
        while announced.phase is not Phase.TRAIN:
            pass_time(PERIOD_S / 10)
        return announced.begins_at - began_at, len(priced)


@pytest.mark.parametrize("trial_s", [TRIAL_S, TRIAL_S / 30], ids=["short price", "long price"])
@pytest.mark.parametrize("ending", ["is replaced", "fails", "is too late"])
def test_a_price_does_not_show_in_the_round_after_one_that_led_to_no_charge(
    tmp_path: Path, ending: str, trial_s: float
) -> None:
    """Nine times as long, it did: who declines before the price was ready sooner by that."""
    for number in range(3):
        grid, times = number / 3, {}
        for name, limits in (("prices", {}), ("declines", {"maximum_sampling_rate": 0.01})):
            times[name], priced = begins_after(tmp_path / f"{name}{number}", ending, trial_s, limits, grid)
            assert (priced > 0) is (name == "prices")
        assert times["prices"] == pytest.approx(times["declines"], abs=1e-3 * PERIOD_S), grid
