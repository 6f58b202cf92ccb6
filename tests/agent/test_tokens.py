"""A device's tokens: asked for before the charge, durable, used once, and never of a key that others lack."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from devices import PERIOD_S, SIGNER, Device, open_device
from members import certified
from served_boards import BLOCKS, SITS_OUT, WAITS, Served, plan, served
from token_desks import JOB, Desk

from agent.announcements import Phase
from agent.custody import back_up
from coordinator.blind_signing import PrivateKey
from coordinator.issuing import Issuer
from dpagent import faults
from dpagent.faults import FaultPoint
from dpagent.protocol.blind_signatures import Blinded, PublicKey, blind
from dpagent.protocol.codec import MessageError
from dpagent.protocol.issuing import Statement, Verdict, Wish
from dpagent.protocol.messages import Receipts
from dpagent.protocol.tokens import without_token


def test_a_round_is_charged_once_its_tokens_are_there_and_its_fragments_carry_them(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        fleet.device.take_plan(plan())
        fleet.pass_time(20 * PERIOD_S)
        assert fleet.device.charged() == []
        fleet.answer(fleet.asks())
        fleet.pass_time(5.0)
        assert fleet.device.charged() == []
        fleet.pass_time(WAITS)
        fleet.device.advance()
        assert fleet.device.charged() == [1]
        spooled = fleet.spooled()
        assert len(spooled) == BLOCKS
        for fragment in spooled:
            token, rest = without_token(fragment)
            assert fleet.desk.round_key(1).is_valid(token, fragment.position)
            assert len(rest.payload) == plan().wire.bytes
        assert fleet.device.state.tokens.tokens(JOB, 1) == ()


def test_all_announced_rounds_are_asked_for_before_the_charge(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        charged = []
        publish = fleet.device.line.publish

        def noted(topic: str, payload: bytes) -> int | None:
            if topic.endswith("/ask"):  # A digest of the keys leaves at some time as well.
                charged.append(fleet.device.charged())
            return publish(topic, payload)

        fleet.device.line.publish = noted  # type: ignore[method-assign]
        fleet.device.take_plan(plan())
        fleet.pass_time(20 * PERIOD_S)
        assert charged == [[], [], []]
        requests = [fleet.device.state.tokens.request(JOB, number, "testers") for number in (1, 2, 3)]
        assert [request.wish for request in requests if request] == [Wish.TAKES_PART] * 3
        fleet.answer(fleet.asks())
        fleet.run(plan(round=2), plan(round=3))
        assert fleet.device.charged() == [2, 3]
        assert fleet.asks() == []


def times_of_a_round(directory: Path, epoch: float, answered_after: float) -> tuple[list[float], list[float]]:
    """When requests leave, and when the windows of their rounds open, from the plan on: on a grid with an
    epoch, with answers that come so much later."""
    with served(directory) as fleet:
        clock, times = fleet.device.clock, noted_by(fleet)
        fleet.device.cycle._publisher._epoch = clock.monotonic() + epoch * PERIOD_S
        fleet.device.tokens._random.uniform = lambda low, high: 0.3 * (low + high)  # type: ignore[method-assign]
        began_at = clock.monotonic()
        fleet.device.take_plan(plan(jitter_window_s=0.0))
        waiting: list[tuple[float, bytes]] = []
        for _ in range(round(14.0 / PERIOD_S) * 2):
            clock.advance(PERIOD_S / 2)
            fleet.device.tokens.tend()
            waiting += [(clock.monotonic() + answered_after, ask) for ask in fleet.asks()]
            for at, ask in list(waiting):
                if at <= clock.monotonic():
                    fleet.answer([ask])
                    waiting.remove((at, ask))
            fleet.device.cycle.advance()
            fleet.device.cycle._publisher.publish_due()
            probes = [digest for digests in fleet.device.probes().values() for digest in digests]
            if any(topic.endswith("/fragments") for topic in fleet.device.line.topics):
                fleet.device.take_receipts(Receipts(b"".join(probes)))
        asked = [at - began_at for topic, _, at in times if topic.endswith("/ask")]
        sent = [at - began_at for topic, _, at in times if topic.endswith("/fragments")]
        return asked, sent[-BLOCKS:]


def test_requests_tell_nothing_of_the_grid_and_answers_nothing_of_the_window(tmp_path: Path) -> None:
    """The coordinator knows whose the requests are. If they left on the device's grid, or a round began with
    the answer, it would know when the device's window opens, and so whose the fragments are."""
    asked, sent = times_of_a_round(tmp_path / "a", 0.0, 0.1)
    other_grid, later = times_of_a_round(tmp_path / "b", -0.5, 0.1)
    assert other_grid == asked
    assert len(sent) == len(later) == BLOCKS
    assert later != sent
    slow, same = times_of_a_round(tmp_path / "c", 0.0, 5.0)
    assert (slow, same) == (asked, sent)


def test_a_round_that_was_asked_for_begins_after_all_requests_on_any_grid(tmp_path: Path) -> None:
    """Else its window would open by when the answer came."""
    with served(tmp_path) as fleet:
        for period_s in (PERIOD_S, 5.0, 60.0):
            fleet.device.cycle._publisher.period_s = period_s
            begins_s = fleet.device.tokens.begins_at(100.0) - 100.0
            # The open round's request leaves within a period and a quarter; the rest is for the answer.
            assert begins_s >= max(10.0, 3 * period_s)


def test_nothing_shows_which_message_became_which_token(tmp_path: Path) -> None:
    """On the disk, once the answer is there; a charge needs none of it."""
    with served(tmp_path) as fleet:
        fleet.device.take_plan(plan())
        fleet.pass_time(20 * PERIOD_S)
        before = fleet.device.state.tokens.unanswered("testers")
        fleet.answer(fleet.asks())
        assert len(before) == 3
        for each in before:
            kept = fleet.device.state.tokens.request(JOB, each.key.number, "testers")
            assert kept is not None
            assert (kept.blinded, kept.inverses, kept.nonces) == ((), (), ())
            assert len(fleet.device.state.tokens.tokens(JOB, each.key.number)) == BLOCKS


def test_a_backup_of_the_books_holds_no_token_and_no_probe(tmp_path: Path) -> None:
    """A thief of a token has a member's share of a round; and whose a probe is, its receipt tells."""
    copy = tmp_path / "copy.db"
    with served(tmp_path) as fleet:
        fleet.device.take_plan(plan())
        fleet.pass_time(20 * PERIOD_S)
        fleet.answer(fleet.asks())
        state = fleet.device.state
        tokens = [each for number in (1, 2, 3) for each in state.tokens.tokens(JOB, number)]
        ((probe,),) = fleet.device.probes().values()
        message = state.probes.message(probe)
        assert len(tokens) == 3 * BLOCKS
        assert message is not None
        state.write_notes()
        back_up(state.files.state_dir, copy)
    with closing(sqlite3.connect(copy)) as stolen:
        assert stolen.execute("SELECT count(*) FROM token_requests").fetchone() == (0,)
        assert stolen.execute("SELECT count(*) FROM probes WHERE message IS NOT NULL").fetchone() == (0,)
    found = copy.read_bytes()
    assert not any(each in found for each in [message, *tokens])


def noted_by(fleet: Served) -> list[tuple[str, int, float]]:
    """Topic, length and time of what leaves from now on."""
    publish, times = fleet.device.line.publish, list[tuple[str, int, float]]()

    def noted(topic: str, payload: bytes) -> int | None:
        anybodys = topic.replace(fleet.identity.device_id, "DEVICE")
        times.append((anybodys, len(payload), fleet.device.clock.monotonic()))
        return publish(topic, payload)

    fleet.device.line.publish = noted  # type: ignore[method-assign]
    return times


def test_a_device_that_declines_asks_at_the_same_times_with_as_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a broker sees of both, from the plan to the window: topic, length and time of each message. And as
    much work: to blind a message takes a small board milliseconds."""
    seen, made = [], list[bytes]()

    def noted(key: PublicKey, message: bytes) -> Blinded:
        made.append(message)
        return blind(key, message)

    monkeypatch.setattr("agent.tokens.blind", noted)
    for name, limits in (("a", {}), ("b", SITS_OUT)):
        with served(tmp_path / name, limits={"dummy_traffic": True, **limits}) as fleet:
            clock = fleet.device.clock
            times = noted_by(fleet)
            fleet.device.cycle._publisher._epoch = clock.monotonic() - PERIOD_S / 3
            fleet.device.tokens._random.uniform = lambda low, high: 0.3 * (low + high)  # type: ignore[method-assign]
            fleet.device.take_plan(plan())
            for _ in range(600):
                clock.advance(PERIOD_S / 2)
                fleet.device.tokens.tend()
                fleet.answer(fleet.asks())
                fleet.device.cycle.advance()
                fleet.device.cycle._publisher.publish_due()
                if any(topic.endswith("/fragments") for topic in fleet.device.line.topics):
                    probes = [digest for digests in fleet.device.probes().values() for digest in digests]
                    fleet.device.take_receipts(Receipts(b"".join(probes)))
            asks = [each for each in times if each[0].endswith("/ask")]
            fragments = [each[:2] for each in times if each[0].endswith("/fragments")]
            seen.append((asks, fragments))
            assert len(fleet.device.charged()) == (not limits)
            assert len(made) == (1 + bool(limits)) * 3 * BLOCKS
            expected = Wish.LIMITS if limits else Wish.TAKES_PART
            assert {entry.wish for entry in fleet.desk.entries()} == {expected}
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 3
    assert len(seen[0][1]) == BLOCKS + 1, "and a probe"


@pytest.mark.parametrize(
    ("changes", "noise", "wish"),
    [
        ({"limits": SITS_OUT}, 4.0, Wish.LIMITS),
        ({}, 0.1, Wish.BUDGET),
        ({"data": {"classes": 12}}, 4.0, Wish.UNABLE),
    ],
)
def test_the_operator_is_told_a_public_reason(
    tmp_path: Path, changes: dict[str, Any], noise: float, wish: Wish
) -> None:
    with served(tmp_path, **changes) as fleet:
        fleet.run(plan(mechanism={"noise_multipliers": [noise] * 3}))
        assert {entry.wish for entry in fleet.desk.entries()} == {wish}
        assert {entry.verdict for entry in fleet.desk.entries()} == {Verdict.NOTED}
        ((number, reason, _),) = fleet.device.declined()
        assert number == 1
        assert reason


def test_a_request_is_on_disk_before_it_leaves_and_the_same_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path) as fleet:
        identity, desk = fleet.identity, fleet.desk
        left: list[list[str]] = []

        def reached(point: FaultPoint) -> None:
            if point is FaultPoint.TOKENS_ASKED:
                left.append([topic for topic in fleet.device.line.topics if topic.endswith("/ask")])

        monkeypatch.setattr(faults, "reached", reached)
        fleet.device.take_plan(plan())
        fleet.pass_time(20 * PERIOD_S)
        before = [desk.opener.open(ask) for ask in fleet.asks()]
        assert left == [[]], "when they are on disk"
        # Signed, and the answer is lost.
        for ask in before:
            desk.issuer.answer(identity.device_id, _sealed(desk, ask), desk.keys)
        with open_device(tmp_path / "copy", identity=identity):
            pass
    again = Desk(tmp_path / "members", SIGNER, tokens=BLOCKS, sealing_secret=desk.sealing_secret)
    with open_device(tmp_path / "device", identity=identity) as device:
        restarted = Served(device, again, identity)
        device.give()
        device.take_plan(plan())
        restarted.pass_time(20 * PERIOD_S)
        asks = restarted.asks()
        assert [again.opener.open(ask).blinded for ask in asks] == [before[0].blinded]
        restarted.answer(asks)
        restarted.pass_time(WAITS)
        device.advance()
        assert device.charged() == [1]
        assert {entry.verdict for entry in again.entries()} == {Verdict.GRANTED}
    again.close()


def _sealed(desk: Desk, ask: Any) -> bytes:
    from dpagent.protocol.issuing import seal_ask

    return seal_ask(ask, desk.opener.public_key, "testers")


def test_a_request_without_an_answer_leaves_again_later_and_later(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        fleet.device.take_plan(plan())
        counts = []
        for seconds in (2.0, 28.0, 70.0):
            fleet.pass_time(seconds)
            counts.append(len(fleet.asks()))
        assert counts[0] == 3
        assert 3 <= counts[1] <= 6
        assert 3 <= counts[2] <= 9
        assert fleet.device.charged() == []


def test_a_device_without_a_certificate_sits_out(tmp_path: Path) -> None:
    with open_device(tmp_path) as device:
        device.give()
        device.take_plan(plan())
        device.advance()
        ((_, reason, _),) = device.declined()
        assert "enrol" in reason
        assert device.line.sent == []


def test_what_was_declined_says_nothing_of_rounds_that_are_asked_for_later(tmp_path: Path) -> None:
    """Its owner may have mended why, and the board may decide again by a plan that it has declined."""
    desk = Desk(tmp_path / "members", SIGNER, tokens=BLOCKS)
    identity = desk.member()
    two = SIGNER.sign(desk.keys.with_values({"moduli": desk.keys.moduli[:2]}), "token-keys")
    for limits, keys, number in ((SITS_OUT, two, 1), ({}, desk.signed_keys, 2)):
        with open_device(tmp_path / "device", identity=identity, limits=limits) as device:
            device.tokens.watch.take_keys(keys)
            device.give()
            Served(device, desk, identity).run(plan(round=number))
            assert device.charged() == []
            assert "maximum_job_epsilon" in device.declined()[-1][1]
    wishes = {entry.round: entry.wish for entry in desk.entries()}
    desk.close()
    assert wishes == {1: Wish.LIMITS, 2: Wish.LIMITS, 3: Wish.TAKES_PART}


def test_tokens_that_were_not_asked_for_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes part by them has signed that it does not: the auditor's file would lack what it spends."""
    monkeypatch.setattr(Issuer, "_verdict", lambda *_: Verdict.GRANTED)
    with served(tmp_path, limits=SITS_OUT) as fleet:
        fleet.run(plan())
        identity, desk = fleet.identity, fleet.desk
        assert {entry.verdict for entry in desk.entries()} == {Verdict.GRANTED}
        assert [fleet.device.state.tokens.tokens(JOB, number) for number in (1, 2, 3)] == [()] * 3
    with open_device(tmp_path / "device", identity=identity) as device:
        device.tokens.watch.take_keys(desk.signed_keys)
        device.give()
        Served(device, desk, identity).run(plan(round=2))
        assert device.charged() == []


def test_a_refused_device_sits_out_and_says_why(tmp_path: Path) -> None:
    with served(tmp_path, device_epsilon=1.5) as fleet:
        fleet.run(plan(), plan(round=2))
        assert fleet.device.charged() == [1]
        ((number, reason, _),) = fleet.device.declined()
        assert (number, "device_epsilon" in reason) == (2, True)


@pytest.mark.parametrize("wrong_from", [0, BLOCKS - 1])
def test_answers_that_are_no_signatures_are_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_from: int
) -> None:
    """A coordinator that signs otherwise, if only once, to know the messages again, is shown none."""
    sign = PrivateKey.blind_sign

    def signed(key: PrivateKey, place: int, blinded: bytes) -> bytes:
        return sign(key, place if place < wrong_from else (place + 1) % BLOCKS, blinded)

    monkeypatch.setattr(PrivateKey, "blind_sign", signed)
    with served(tmp_path) as fleet:
        fleet.run(plan())
        assert fleet.device.charged() == []
        ((_, reason, _),) = fleet.device.declined()
        assert "no tokens" in reason
        assert fleet.device.state.tokens.tokens(JOB, 1) == ()


def test_a_ledger_that_went_back_takes_no_tokens(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        fleet.run(plan())
        identity, desk = fleet.identity, fleet.desk
        assert fleet.device.charged() == [1]
        # Round 4's key comes, and the board's statement says how far its ledger has come.
    again = Desk(tmp_path / "members", SIGNER, tokens=BLOCKS, rounds=5, sealing_secret=desk.sealing_secret)
    with open_device(tmp_path / "device", identity=identity) as device:
        ahead = Served(device, again, identity)
        device.tokens.watch.take_keys(again.signed_keys)
        device.give()
        ahead.run(plan(round=2))
        assert device.charged() == [1, 2]
    with open_device(tmp_path / "older", identity=identity) as device:
        # A board that is set up anew with the key of the one before: its ledger has one entry.
        older = Served(device, again, identity)
        keys = again.keys.with_values({"moduli": again.keys.moduli})
        device.tokens.watch.take_keys(SIGNER.sign(keys, "token-keys"))
        device.give()
        again.registry.database.execute("DELETE FROM grants WHERE round = 3")
        older.run(plan(round=3))
        assert device.charged() == []
        ((_, reason, _),) = device.declined()
        assert "older copy" in reason
    again.close()


@pytest.mark.parametrize("said", ["nothing signed", "another's", "what it has"])
def test_a_board_believes_nobody_else_that_its_ledger_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Its owner would be told to write off all that is left of the budget."""
    with served(tmp_path) as fleet:
        other = fleet.desk.member()

        def later(_: Issuer, device: object, statement: Statement) -> bytes:
            further = replace(statement, entries=statement.entries + (said != "what it has"))
            signed = {"nothing signed": bytes(64), "another's": other.sign(further.signed)}
            return further.to_bytes() + signed.get(said, fleet.identity.sign(further.signed))

        with monkeypatch.context() as patch:
            patch.setattr(Issuer, "_later_ledger", later)
            fleet.device.take_plan(plan())
            fleet.pass_time(20 * PERIOD_S)
            fleet.answer(fleet.asks())
        assert len(fleet.device.state.tokens.unanswered("testers")) == 3, "it asks again"
        fleet.pass_time(25.0)
        fleet.answer(fleet.asks())
        fleet.device.advance()
        assert fleet.device.charged() == [1]


@pytest.mark.parametrize("linkability", ["fragment", "round"])
def test_a_plan_of_another_linkability_than_its_keys_is_sat_out(tmp_path: Path, linkability: Any) -> None:
    other = "round" if linkability == "fragment" else "fragment"
    tokens = 1 if linkability == "round" else BLOCKS
    limits = {"linkability": ["fragment", "round"]}
    with served(tmp_path, linkability=linkability, tokens=tokens, limits=limits) as fleet:
        fleet.run(plan(linkability=other))
        assert fleet.device.charged() == []
        assert {entry.wish for entry in fleet.desk.entries()} == {Wish.UNABLE}


def test_rounds_whose_fragments_belong_together_need_the_owners_word(tmp_path: Path) -> None:
    for name, limits, charged in (("a", {}, []), ("b", {"linkability": ["round"]}, [1])):
        with served(tmp_path / name, linkability="round", tokens=1, limits=limits) as fleet:
            fleet.run(plan(linkability="round"))
            assert fleet.device.charged() == charged
            tokens = {without_token(fragment)[0] for fragment in fleet.spooled()}
            assert len(tokens) == len(charged)


def test_a_plan_with_more_fragments_than_tokens_is_sat_out(tmp_path: Path) -> None:
    with served(tmp_path, tokens=BLOCKS - 1) as fleet:
        fleet.run(plan())
        assert fleet.device.charged() == []
        ((_, reason, _),) = fleet.device.declined()
        assert "3 tokens" in reason


def test_a_charged_round_whose_tokens_are_gone_is_given_up(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        identity = fleet.identity
        fleet.device.take_plan(plan())
        fleet.pass_time(20 * PERIOD_S)
        fleet.device.cycle._worker = Stuck(fleet.device)
        fleet.answer(fleet.asks())
        fleet.pass_time(WAITS)
        assert fleet.device.charged() == [1]
        with fleet.device.state.written():
            fleet.device.state.tokens.empty()
    with open_device(tmp_path / "device", identity=identity) as device:
        device.give()
        device.take_plan(plan())
        device.advance()
        current = device.announcements.current
        assert current is not None
        assert current.phase is Phase.SETTLED
        assert device.pending() == {}


class Stuck:
    """Training that prepares, and then never ends."""

    def __init__(self, device: Device) -> None:
        self._inner = device.worker

    def prepare(self, order: Any) -> Any:
        return self._inner.prepare(order)

    def update(self) -> Any:
        from concurrent.futures import Future

        return Future()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_a_stranger_with_a_certificate_of_the_fleet_that_was_never_noted_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "members", SIGNER, tokens=BLOCKS)
    identity = certified(desk.authority)
    with open_device(tmp_path / "device", identity=identity) as device:
        device.tokens.watch.take_keys(desk.signed_keys)
        device.give()
        fleet = Served(device, desk, identity)
        device.take_plan(plan())
        fleet.pass_time(20 * PERIOD_S)
        with pytest.raises(MessageError, match="not a member"):
            fleet.answer(fleet.asks())
    desk.close()
