"""Issuing tokens: who gets them, once, and what the registry knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from requests_for_tokens import asked
from token_desks import FLEET, JOB, Desk, private_key

from agent.identity import Identity
from coordinator import issuing
from coordinator.blind_signing import PrivateKey
from coordinator.database.settings import StorePlace
from coordinator.participation import totals
from dpagent import faults
from dpagent.errors import UsageError
from dpagent.faults import FaultPoint
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from dpagent.protocol.codec import MessageError, decode
from dpagent.protocol.issuing import (
    Ask,
    Statement,
    Verdict,
    Wish,
    padding,
    seal_ask,
)
from dpagent.protocol.signing import Signer, Verifier, new_signing_secret

SIGNER = Signer(new_signing_secret(), FLEET)
VERIFIER = Verifier(SIGNER.public_key, FLEET)


@pytest.fixture
def new_desk(tmp_path: Path, place: StorePlace) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(**changes: Any) -> Desk:
        shared = None if isinstance(place, Path) else place
        desk = Desk(tmp_path / "members", SIGNER, place=shared, **changes)
        if made:
            desk.authority = made[0].authority
        made.append(desk)
        return desk

    yield make
    for desk in made:
        desk.close()


def test_a_member_gets_tokens_that_hold_for_their_round_and_block_alone(new_desk: Any) -> None:
    desk = new_desk()
    board = desk.member()
    request = asked(desk, board)
    answer = request.read(desk.answer(board.device_id, request.payload))
    assert answer.verdict is Verdict.GRANTED
    tokens = request.tokens(desk, answer)
    for place, token in enumerate(tokens):
        good = [position for position in range(6) if desk.round_key(1).is_valid(token, position)]
        assert good == [place]
        assert not desk.round_key(2).is_valid(token, place)
        other_job = replace(desk.round_key(1), job=b"k" * 16)
        other_fleet = replace(desk.round_key(1), fleet="others")
        assert not other_job.is_valid(token, place)
        assert not other_fleet.is_valid(token, place)
        forged = token[:-1] + bytes([token[-1] ^ 1])
        assert not desk.round_key(1).is_valid(forged, place)
        assert not desk.round_key(1).is_valid(token[:-1], place)
    (entry,) = desk.entries()
    assert (entry.device, entry.round, entry.verdict) == (board.device_id, 1, Verdict.GRANTED)
    assert entry.statement == request.ask.statement
    assert desk.devices.find(board.device_id).has_signed(entry.signature, entry.statement.signed)


def test_the_same_request_has_the_same_answer_and_another_one_none(new_desk: Any) -> None:
    desk = new_desk()
    board = desk.member()
    request = asked(desk, board)
    first = request.read(desk.answer(board.device_id, request.payload))
    assert request.read(desk.answer(board.device_id, request.payload)) == first
    # Sent again later, when the board's ledger has come further.
    later = replace(request.ask.statement, entries=9, head=b"i" * 32)
    again = Ask(later, board.sign(later.signed), request.ask.blinded)
    payload = seal_ask(again, desk.opener.public_key, FLEET)
    assert request.read(desk.answer(board.device_id, payload)) == first
    other = asked(desk, board)
    refused = other.read(desk.answer(board.device_id, other.payload))
    assert refused.verdict is Verdict.ASKED_OTHERWISE
    assert len(desk.entries()) == 1
    assert not set(refused.signatures) & set(first.signatures)


def test_the_very_same_message_again_is_somebody_elses(
    new_desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker, or who listens at one, cannot have requests signed again and again."""
    desk = new_desk()
    board = desk.member()
    request = asked(desk, board)
    payload = request.payload
    first = request.read(desk.answer(board.device_id, payload))
    with pytest.raises(MessageError, match="replayed"):
        desk.answer(board.device_id, payload)
    monkeypatch.setattr(PrivateKey, "blind_sign", None)
    assert request.read(desk.answer(board.device_id, request.payload)) == first, (
        "the board's own costs no root"
    )


def test_what_is_kept_of_answers_is_bounded(new_desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuing, "_SEEN", 5)
    monkeypatch.setattr(issuing, "_SIGNED_BYTES", 3 * 4 * 256)
    desk = new_desk()
    for _ in range(8):
        board = desk.member()
        request = asked(desk, board)
        answers = [request.read(desk.answer(board.device_id, request.payload)) for _ in range(2)]
        assert answers[0] == answers[1]
    assert len(desk.issuer._seen) == 5
    assert len(desk.issuer._signed) == 3
    desk.issuer.forget_signed()
    assert (desk.issuer._signed, desk.issuer._signed_bytes) == ({}, 0)


def test_requests_and_answers_have_one_length(new_desk: Any) -> None:
    desk = new_desk(device_epsilon=1.5)
    board = desk.member()
    requests = [
        asked(desk, board),
        asked(desk, board, 2),  # Over the limit.
        asked(desk, board, 3, wish=Wish.BUDGET, messages=padding(desk.keys.tokens)),
        asked(desk, board, 3),  # Otherwise.
    ]
    answers = [desk.answer(board.device_id, request.payload) for request in requests]
    verdicts = [request.read(answer).verdict for request, answer in zip(requests, answers, strict=True)]
    assert verdicts == [Verdict.GRANTED, Verdict.OVER_LIMIT, Verdict.NOTED, Verdict.ASKED_OTHERWISE]
    assert len({len(request.payload) for request in requests}) == 1
    assert len({len(answer) for answer in answers}) == 1


def test_what_leaves_is_in_the_registry_also_after_a_crash(
    new_desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = new_desk()
    board = desk.member()
    request = asked(desk, board)

    class Killed(BaseException):
        pass

    def killed_at(point: FaultPoint) -> None:
        def reached(here: FaultPoint) -> None:
            if here is point:
                raise Killed

        monkeypatch.setattr(faults, "reached", reached)

    killed_at(FaultPoint.TOKENS_WRITTEN)
    with pytest.raises(Killed):
        desk.answer(board.device_id, request.payload)
    assert desk.entries() == []
    killed_at(FaultPoint.TOKENS_GRANTED)
    with pytest.raises(Killed):
        desk.answer(board.device_id, request.payload)
    assert [entry.verdict for entry in desk.entries()] == [Verdict.GRANTED]
    monkeypatch.undo()
    again = new_desk(sealing_secret=desk.sealing_secret)
    answer = request.read(again.answer(board.device_id, request.payload))
    assert len(request.tokens(again, answer)) == 4


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("a stranger", "not a member"),
        ("another's topic", "not a member"),
        ("another's name", "bad signature"),
        ("revoked", "not a member"),
        ("another job", "another round's request"),
        ("a round that is not announced", "another round's request"),
        ("other keys", "other keys"),
        ("one message more", "wrong size"),
        ("one message less", "wrong size"),
        ("other messages than signed", "malformed"),
        ("beyond the modulus", "malformed"),
        ("no key to answer to", "malformed"),
        ("sealed to another", "cannot open"),
        ("no wish", "malformed"),
        ("more entries than a registry keeps", "malformed"),
    ],
)
def test_what_is_not_answered(new_desk: Any, what: str, reason: str) -> None:
    desk = new_desk()
    board, other = desk.member(), desk.member()
    request, topic = asked(desk, board), board.device_id
    match what:
        case "a stranger":
            from members import certified

            stranger = certified(desk.authority)
            request, topic = asked(desk, stranger), stranger.device_id
        case "another's topic":
            topic = other.device_id
        case "another's name":
            request = asked(desk, board, signer=other)
        case "revoked":
            with desk.devices.transaction():
                desk.devices.revoke(board.device_id, at=1.0)
        case "another job":
            request = asked(desk, board, job=b"k" * 16)
        case "a round that is not announced":
            request = asked(desk, board, round=4)
        case "other keys":
            request = asked(desk, board, keys=bytes(32))
        case "one message more":
            request = asked(desk, board, messages=padding(5))
        case "one message less":
            request = asked(desk, board, messages=padding(3))
        case "other messages than signed":
            wrong = Ask(request.ask.statement, request.ask.signature, tuple(padding(4)))
            request.forged = seal_ask(wrong, desk.opener.public_key, FLEET)
        case "beyond the modulus":
            request = asked(desk, board, messages=[b"\xff" * 256] * 4)
        case "no key to answer to":
            request = asked(desk, board, reply_key=bytes(32))
        case "sealed to another":
            request.forged = seal_ask(request.ask, desk.opener.public_key, "others")
        case "more entries than a registry keeps":
            request = asked(desk, board, entries=1 << 63)
        case "no wish":
            raw = bytearray(request.ask.to_bytes())
            raw[36] = 99
            with pytest.raises(MessageError, match="malformed"):
                decode(bytes(raw), Ask)
            return
    with pytest.raises(MessageError) as caught:
        desk.answer(topic, request.payload)
    assert caught.value.reason == reason
    granted = [entry for entry in desk.entries() if entry.is_granted]
    # Signed before the answer could not be sealed: it costs the board its round.
    assert len(granted) == (what == "no key to answer to")


def test_a_round_that_is_closed_has_no_key_and_no_tokens(
    new_desk: Any, tmp_path: Path, place: StorePlace
) -> None:
    desk = new_desk()
    board = desk.member()
    early = asked(desk, board)
    secret = private_key(1, 4).to_bytes()
    desk.answer(board.device_id, early.payload)
    desk.registry.forget_secrets(JOB, 1)
    for request in (early, asked(desk, desk.member())):
        device = request.ask.statement.device.hex()
        assert request.read(desk.answer(device, request.payload)).verdict is Verdict.CLOSED
    kept = desk.registry.key(JOB, 1)
    assert kept is not None
    assert kept.secret is None
    if not isinstance(place, Path):
        return  # Of PostgreSQL's files, the threat model says otherwise.
    files = [file.read_bytes() for file in (tmp_path / "members").glob("registry.db*")]
    assert not any(secret[:128] in data or secret[128:] in data for data in files)
    assert any(private_key(2, 4).to_bytes() in data for data in files)
    # Fragments that are under way are still told from forgeries.
    assert desk.registry.key(JOB, 1).modulus == desk.keys.moduli[0]


def test_a_device_over_its_limit_gets_no_tokens_until_the_limit_is_raised(new_desk: Any) -> None:
    desk = new_desk(device_epsilon=2.0)
    board = desk.member()
    verdicts = []
    for number in (1, 2, 3):
        request = asked(desk, board, number)
        verdicts.append(request.read(desk.answer(board.device_id, request.payload)).verdict)
    assert verdicts == [Verdict.GRANTED, Verdict.GRANTED, Verdict.OVER_LIMIT]
    desk.issuer._device_epsilon = 3.0
    assert request.read(desk.answer(board.device_id, request.payload)).verdict is Verdict.GRANTED
    spent = desk.registry.spent([board.device_id])
    assert [(each.job, each.rounds, each.statement["epsilon"]) for each in spent] == [(JOB.hex(), 3, 3.0)]


def test_a_member_that_is_left_out_gets_no_tokens_until_it_is_let_in_again(new_desk: Any) -> None:
    desk = new_desk()
    boards = [desk.member() for _ in range(4)]

    def verdict(board: Identity, number: int) -> Verdict:
        request = asked(desk, board, number)
        return request.read(desk.answer(board.device_id, request.payload)).verdict

    assert verdict(boards[0], 1) is Verdict.GRANTED
    with desk.devices.transaction():
        desk.devices.exclude([board.device_id for board in boards[:2]], at=desk.now)
    assert verdict(boards[2], 2) is Verdict.GRANTED
    late = asked(desk, boards[1], 2)
    assert late.read(desk.answer(boards[1].device_id, late.payload)).verdict is Verdict.EXCLUDED
    # A board does not come back by being replaced.
    successor = desk.member(replaces=boards[0].device_id)
    assert verdict(successor, 3) is Verdict.EXCLUDED
    with desk.devices.transaction():
        desk.devices.include([boards[1].device_id])
    # The very request that was refused: the round is open still.
    assert late.read(desk.answer(boards[1].device_id, late.payload)).verdict is Verdict.GRANTED


def test_no_more_than_half_of_the_members_are_left_out(new_desk: Any) -> None:
    """Who is left has to be many: a fragment hides among them."""
    desk = new_desk()
    ids = [desk.member().device_id for _ in range(5)]
    with desk.devices.transaction():
        desk.devices.exclude(ids[:2], at=desk.now)
        desk.devices.exclude(ids[:1], at=desk.now)  # Again, which changes nothing.
    for more in (ids[2:3], ids[1:3]):
        with pytest.raises(UsageError, match="2 would be left; expected at least half"):
            desk.devices.exclude(more, at=desk.now)
    with desk.devices.transaction():
        desk.devices.revoke(ids[4], at=desk.now)
    with pytest.raises(UsageError, match=f"{ids[4]} is no member"):
        desk.devices.exclude([ids[4]], at=desk.now)


def test_jobs_add_up_and_a_replacement_has_what_its_predecessor_left(new_desk: Any) -> None:
    desk = new_desk(device_epsilon=4.0)
    board = desk.member()
    first = asked(desk, board, 3)
    assert first.read(desk.answer(board.device_id, first.payload)).verdict is Verdict.GRANTED
    successor = desk.member(replaces=board.device_id)
    same = asked(desk, successor, 3)
    answer = same.read(desk.answer(successor.device_id, same.payload))
    assert answer.verdict is Verdict.ASKED_OTHERWISE, "a place has one board's tokens"
    heir = desk.member(replaces=successor.device_id)
    same = asked(desk, heir, 3)
    answer = same.read(desk.answer(heir.device_id, same.payload))
    assert answer.verdict is Verdict.ASKED_OTHERWISE, "also once that one is replaced"
    successor = heir
    other = new_desk(device_epsilon=4.0, job=b"k" * 16)
    for number, verdict in ((1, Verdict.GRANTED), (2, Verdict.OVER_LIMIT)):
        request = asked(other, successor, number, job=b"k" * 16)
        assert request.read(other.answer(successor.device_id, request.payload)).verdict is verdict


def test_what_hides_a_device_counts_for_each_of_its_records_too(new_desk: Any) -> None:
    """As in the board's own ledger, whose account of records has both jobs."""
    sums = new_desk(device_epsilon=4.0)
    board = sums.member()
    request = asked(sums, board, 2)
    assert request.read(sums.answer(board.device_id, request.payload)).verdict is Verdict.GRANTED
    bits = new_desk(device_epsilon=4.0, job=b"k" * 16, noise=TwoPointRounds((0.5,) * 6, coordinates=40))
    verdicts = []
    for number in (1, 3):
        request = asked(bits, board, number, job=b"k" * 16)
        verdicts.append(request.read(bits.answer(board.device_id, request.payload)).verdict)
    assert verdicts == [Verdict.GRANTED, Verdict.OVER_LIMIT], "3 for the device, and 2 + 3 for a record"
    found = {total.scope: total for total in totals(bits.registry.spent([board.device_id]))}
    record, device = found["record", "add-or-remove-one", "none"], found["device", "replace-one", "none"]
    assert (record.epsilon, record.delta, record.left_out) == (3.0, 2e-5, 0)
    assert (device.epsilon, device.delta, device.left_out) == (1.0, 1e-5, 1)
    assert record.sentence().endswith("trusted party: none)")
    assert device.sentence().endswith("trusted party: none), without 1 job that nothing bounds there")
    assert found["device", "replace-one", "shuffler"].left_out == 1
    (of_a_bit,) = [total for scope, total in found.items() if scope[0] == "coordinate"]
    assert of_a_bit.left_out == 0, "a figure for single numbers is for no device anyhow"


def test_a_column_that_is_full_keeps_out_only_jobs_that_add_to_it(new_desk: Any) -> None:
    """The limit may have been lowered, or be counted otherwise since: a fleet was upgraded."""
    noise = JobNoise.announced("central-gaussian", [1.0] * 6, {"resolution": 1 << 14})
    central = new_desk(noise=noise)
    board = central.member()
    request = asked(central, board, 3)
    assert request.read(central.answer(board.device_id, request.payload)).verdict is Verdict.GRANTED
    sums = new_desk(device_epsilon=1.5, job=b"k" * 16)
    request = asked(sums, board, 1, job=b"k" * 16)
    verdict = request.read(sums.answer(board.device_id, request.payload)).verdict
    assert verdict is Verdict.GRANTED, "1 for a record; 3 of 1.5 for the device, by trust in the coordinator"
    again = new_desk(device_epsilon=1.5, noise=noise)
    request = asked(again, board, 2)
    verdict = request.read(again.answer(board.device_id, request.payload)).verdict
    assert verdict is Verdict.OVER_LIMIT, "also of a job that goes on"


def test_a_ledger_that_went_back_is_told_by_the_boards_own_statement(
    new_desk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    desk = new_desk()
    board = desk.member()
    first = asked(desk, board, 1, entries=9, head=b"i" * 32)
    desk.answer(board.device_id, first.payload)
    older = asked(desk, board, 2, entries=8)
    answer = older.read(desk.answer(board.device_id, older.payload))
    assert answer.verdict is Verdict.WENT_BACK
    assert older.read(desk.answer(board.device_id, older.payload)).verdict is Verdict.WENT_BACK
    assert len([line for line in caplog.messages if "its ledger has" in line]) == 1, "however often it asks"
    statement = Statement.from_bytes(answer.later[: Statement.LENGTH])
    assert statement == first.ask.statement
    assert desk.devices.find(board.device_id).has_signed(answer.later[Statement.LENGTH :], statement.signed)
    assert [entry.round for entry in desk.entries()] == [1]
    # The same request, once the ledger is as far again.
    now = replace(older.ask.statement, entries=9, head=b"i" * 32)
    again = Ask(now, board.sign(now.signed), older.ask.blinded)
    payload = seal_ask(again, desk.opener.public_key, FLEET)
    assert older.read(desk.answer(board.device_id, payload)).verdict is Verdict.GRANTED


def test_a_device_that_declines_says_why_and_gets_nothing(new_desk: Any) -> None:
    desk = new_desk()
    board = desk.member()
    request = asked(desk, board, wish=Wish.BUDGET)
    answer = request.read(desk.answer(board.device_id, request.payload))
    assert answer.verdict is Verdict.NOTED
    with pytest.raises(ValueError, match="no signature"):
        request.tokens(desk, answer)
    assert desk.registry.spent([board.device_id]) == []
