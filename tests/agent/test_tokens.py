"""A device's tokens: asked for before the charge, durable, used once, and never of a key that others lack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from devices import PERIOD_S, SIGNER, Device, open_device
from fleets import make_plan
from members import certified
from token_desks import JOB, Desk, private_key

from agent.announcements import Phase
from agent.identity import Identity
from coordinator.blind_signing import PrivateKey
from dpagent import faults
from dpagent.faults import FaultPoint
from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.issuing import Verdict, Wish
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.tokens import TokenKeys, without_token
from dpagent.protocol.witnesses import Witness

BLOCKS = 4
WAITS = 12.0
"""Seconds after which a round goes on that was asked for on the spot."""
SITS_OUT: dict[str, Any] = {"maximum_job_epsilon": 1e-6}


def plan(**changes: Any) -> Plan:
    return make_plan(**{"linkability": "fragment", "wire": {"block": 2_500}} | changes)


class Served:
    """A device and a desk, which hear of each other by hand."""

    def __init__(self, device: Device, desk: Desk, identity: Identity) -> None:
        self.device, self.desk, self.identity = device, desk, identity
        self.handled = 0

    def asks(self) -> list[bytes]:
        """The requests that have left since the last look."""
        line, start = self.device.line, self.handled
        self.handled = len(line.sent)
        sent = zip(line.topics[start:], line.sent[start:], strict=True)
        return [payload for topic, payload in sent if topic.endswith(f"/{self.identity.device_id}/ask")]

    def pass_time(self, seconds: float) -> None:
        step_s = max(PERIOD_S, seconds / 60)
        for _ in range(round(seconds / step_s) + 1):
            self.device.clock.advance(step_s)
            self.device.tokens.tend()
            self.device.cycle.advance()

    def answer(self, asks: list[bytes]) -> None:
        for ask in asks:
            self.device.tokens.take_answer(self.desk.answer(self.identity.device_id, ask))

    def run(self, *plans: Plan) -> None:
        """Announce plans one after the other, and let all happen."""
        for each in plans:
            self.device.take_plan(each)
            for _ in range(6):
                self.pass_time(5 * PERIOD_S)
                self.answer(self.asks())
            self.pass_time(WAITS)
            self.device.advance()

    def spooled(self) -> list[Fragment]:
        rows = self.device.state.connection.execute("SELECT message FROM messages")
        return [decode(row["message"], Fragment) for row in rows]


@contextmanager
def served(directory: Path, **changes: Any) -> Iterator[Served]:
    """A member and its desk."""
    desk_changes = {
        key: changes.pop(key) for key in ("tokens", "linkability", "device_epsilon") if key in changes
    }
    desk = Desk(directory / "members", SIGNER, **{"tokens": BLOCKS} | desk_changes)
    identity = changes.pop("identity", None) or desk.member()
    try:
        with open_device(directory / "device", identity=identity, **changes) as device:
            device.tokens.watch.take_keys(desk.signed_keys)
            device.give()
            yield Served(device, desk, identity)
    finally:
        desk.close()


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
        asked = [at - began_at for topic, _, at in times if topic.endswith("/ask")]
        sent = [at - began_at for topic, _, at in times if topic.endswith("/fragments")]
        return asked, sent


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


def noted_by(fleet: Served) -> list[tuple[str, int, float]]:
    """Topic, length and time of what leaves from now on."""
    publish, times = fleet.device.line.publish, list[tuple[str, int, float]]()

    def noted(topic: str, payload: bytes) -> int | None:
        anybodys = topic.replace(fleet.identity.device_id, "DEVICE")
        times.append((anybodys, len(payload), fleet.device.clock.monotonic()))
        return publish(topic, payload)

    fleet.device.line.publish = noted  # type: ignore[method-assign]
    return times


def test_a_device_that_declines_asks_at_the_same_times_with_as_many_bytes(tmp_path: Path) -> None:
    """What a broker sees of both, from the plan to the window: topic, length and time of each message."""
    seen = []
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
            asks = [each for each in times if each[0].endswith("/ask")]
            fragments = [each[:2] for each in times if each[0].endswith("/fragments")]
            seen.append((asks, fragments))
            assert len(fleet.device.charged()) == (not limits)
            expected = Wish.LIMITS if limits else Wish.TAKES_PART
            assert {entry.wish for entry in fleet.desk.entries()} == {expected}
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 3
    assert len(seen[0][1]) == BLOCKS


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
    reached: list[FaultPoint] = []
    monkeypatch.setattr(faults, "reached", reached.append)
    with served(tmp_path) as fleet:
        identity, desk = fleet.identity, fleet.desk
        fleet.device.take_plan(plan())
        fleet.pass_time(20 * PERIOD_S)
        before = [desk.opener.open(ask) for ask in fleet.asks()]
        assert FaultPoint.TOKENS_ASKED in reached
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


def test_a_refused_device_sits_out_and_says_why(tmp_path: Path) -> None:
    with served(tmp_path, device_epsilon=1.5) as fleet:
        fleet.run(plan(), plan(round=2))
        assert fleet.device.charged() == [1]
        ((number, reason, _),) = fleet.device.declined()
        assert (number, "device_epsilon" in reason) == (2, True)


def test_answers_that_are_no_signatures_are_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that signs otherwise, to know the messages again, is shown none."""
    sign = PrivateKey.blind_sign
    monkeypatch.setattr(
        PrivateKey, "blind_sign", lambda key, place, blinded: sign(key, (place + 1) % BLOCKS, blinded)
    )
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
        keys = again.keys.model_copy(update={"moduli": again.keys.moduli})
        device.tokens.watch.take_keys(SIGNER.sign(keys, "token-keys"))
        device.give()
        again.registry.connection.execute("DELETE FROM grants WHERE round = 3")
        older.run(plan(round=3))
        assert device.charged() == []
        ((_, reason, _),) = device.declined()
        assert "older copy" in reason
    again.close()


def two_lists(desk: Desk) -> tuple[bytes, bytes]:
    """Signed lists that disagree on round 2."""
    moduli = [desk.keys.moduli[0], private_key(9, BLOCKS).modulus.to_bytes(256, "big")]
    return desk.signed_keys, SIGNER.sign(desk.keys.model_copy(update={"moduli": moduli}), "token-keys")


def test_two_signed_lists_that_disagree_end_the_job_for_the_device(tmp_path: Path) -> None:
    with served(tmp_path, limits={"dummy_traffic": True}) as fleet:
        one, other = two_lists(fleet.desk)
        fleet.device.tokens.watch.take_keys(other)
        assert fleet.device.state.tokens.conflicting_round(JOB) == 2
        row = fleet.device.state.connection.execute("SELECT one, other FROM token_conflicts").fetchone()
        assert {row["one"], row["other"]} == {one, other}
        fleet.run(plan())
        assert fleet.device.charged() == []
        assert fleet.desk.entries() == []
        assert len(fleet.spooled()) == BLOCKS, "dummies, as for any round that is sat out"
        # Both go to the others, once.
        fleet.pass_time(15.0)
        evidence = [
            payload
            for topic, payload in zip(fleet.device.line.topics, fleet.device.line.sent, strict=True)
            if topic.endswith("/witness/evidence")
        ]
        assert sorted(evidence) == sorted([one, other])
        identity = fleet.identity
    with open_device(tmp_path / "device", identity=identity) as device:
        assert device.state.tokens.conflicting_round(JOB) == 2, "for good"


def test_a_key_that_one_board_alone_was_shown_is_noticed_by_all(tmp_path: Path) -> None:
    """A coordinator swaps the retained list for one board. Each hears digests, and then signed lists."""
    desk = Desk(tmp_path / "members", SIGNER, tokens=BLOCKS)
    one, other = two_lists(desk)
    boards: list[Device] = []
    with (
        open_device(tmp_path / "a", identity=desk.member()) as first,
        open_device(tmp_path / "b", identity=desk.member()) as second,
        open_device(tmp_path / "c", identity=desk.member()) as victim,
    ):
        boards += [first, second, victim]
        for board, seen in zip(boards, (one, one, other), strict=True):
            board.tokens.watch.take_keys(seen)
        carried = 0
        for _ in range(1_000):
            for board in boards:
                board.clock.advance(0.05)
                before = len(board.line.sent)
                board.tokens.tend()
                news = zip(board.line.topics[before:], board.line.sent[before:], strict=True)
                for topic, payload in news:
                    carried += 1
                    for hearer in boards:
                        if topic.endswith("/witness"):
                            hearer.tokens.watch.take_witness(payload)
                        elif topic.endswith("/witness/evidence"):
                            hearer.tokens.watch.take_evidence(payload)
        assert [board.state.tokens.conflicting_round(JOB) for board in boards] == [2, 2, 2]
        assert carried <= 3 + 2, "a digest each, and two lists"
    desk.close()


def test_whoever_heard_enough_equal_digests_says_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        witness = encode(Witness.of(fleet.desk.keys, "testers"))
        for _ in range(3):
            fleet.device.tokens.watch.take_witness(witness)
        fleet.pass_time(35.0)
        assert fleet.device.line.sent == []


def test_false_digests_cost_one_list(tmp_path: Path) -> None:
    """Anybody may write digests."""
    with served(tmp_path) as fleet:
        for number in range(50):
            false = Witness(JOB, 1, (bytes([number]) * 32,) * 3)
            fleet.device.tokens.watch.take_witness(encode(false))
            fleet.pass_time(1.0)
        assert [topic.rsplit("/", 1)[-1] for topic in fleet.device.line.topics] in (
            ["evidence", "witness"], ["witness", "evidence"],
        )  # fmt: skip
        assert fleet.device.state.tokens.conflicting_round(JOB) is None
        for rubbish in (b"", bytes(20), bytes(53), bytes(20 + 32 * 17)):
            with pytest.raises(MessageError):
                fleet.device.tokens.watch.take_witness(rubbish)


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


def test_a_list_that_the_coordinator_did_not_sign_says_nothing(tmp_path: Path) -> None:
    from dpagent.protocol.signing import Signer, new_signing_secret

    stranger = Signer(new_signing_secret(), "testers")
    with served(tmp_path) as fleet:
        for message in (
            stranger.sign(fleet.desk.keys, "token-keys"),
            SIGNER.sign(fleet.desk.keys, "plan"),
        ):
            with pytest.raises(MessageError, match="bad signature"):
                fleet.device.tokens.watch.take_keys(message)
        assert fleet.device.tokens.watch.keys(JOB) == fleet.desk.keys


@pytest.mark.parametrize(
    "changes",
    [
        {"moduli": []}, {"moduli": [bytes(256)]}, {"moduli": [b"\xff" * 255 + b"\xfe"]},
        {"moduli": [b"\x7f" + b"\xff" * 255]}, {"moduli": [b"\xff" * 255]}, {"moduli": [b"\xff" * 256] * 17},
        {"tokens": 0}, {"tokens": 225}, {"linkability": "none"}, {"linkability": "round"},
        {"first_round": 0}, {"job": bytes(15)}, {"sealing_key": bytes(31)},
    ],
)  # fmt: skip
def test_a_list_of_keys_has_its_ranges(changes: dict[str, Any]) -> None:
    import cbor2

    values = {
        "job": JOB, "linkability": "fragment", "tokens": 4, "sealing_key": bytes(32), "first_round": 1,
        "moduli": [b"\xff" * 256],
    }  # fmt: skip
    assert decode(cbor2.dumps(values), TokenKeys).rounds == range(1, 2)
    with pytest.raises(MessageError):
        decode(cbor2.dumps(values | changes), TokenKeys)


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
