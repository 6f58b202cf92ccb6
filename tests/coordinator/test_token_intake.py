"""Fragments and their tokens at a coordinator: what counts, once, and what is refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clocks import MovableClock
from fleets import honest_update, write_fleet
from members import enrolled, new_authority

from agent.probes import probe_for
from coordinator.blind_signing import PrivateKey, _signer
from coordinator.daemon import Coordinator
from coordinator.own_receipts import HELD_S
from coordinator.queue import Queue
from coordinator.registry import Entry, Registry
from coordinator.round_end import Verdict as Close
from coordinator.running_job import RunningJob
from coordinator.settings import load_fleet_settings
from dpagent.errors import ConfigurationError
from dpagent.protocol.blind_signatures import PREFIX_BYTES, blind, finalize
from dpagent.protocol.codec import decode, encode
from dpagent.protocol.dummies import as_sent, dummies_for
from dpagent.protocol.fragments import cut
from dpagent.protocol.issuing import Statement, Verdict, Wish
from dpagent.protocol.messages import Fragment
from dpagent.protocol.sealing import seal, sealed_bytes
from dpagent.protocol.task import RoundTask
from dpagent.protocol.tokens import MAX_ROUNDS_AHEAD, RoundKey, token_id, with_token
from dpagent.protocol.topics import Topics
from dpagent.transport.events import Received


class Desk:
    """A coordinator whose round is open, and the key that it would sign tokens with.

    Args:
        directory: for its files.
        linkability: of the job.
        devices: that are expected.
    """

    def __init__(self, directory: Path, linkability: str, devices: int = 1) -> None:
        file = write_fleet(
            directory, None, linkability=linkability, rounds=3, cap={"kind": "none"}, devices=devices
        )
        self.settings = settings = load_fleet_settings(file)
        self.authority = new_authority(settings.members_dir, settings.fleet)
        self.clock = MovableClock()
        self.coordinator = Coordinator(settings, clock=self.clock)
        running = self.coordinator.running
        assert running is not None
        self.running: RunningJob = running
        self.running.cycle.open()
        task = self.running.cycle._task
        assert task is not None
        self.task: RoundTask = task
        self.plan = task.plan

    def key(self, number: int = 1) -> tuple[RoundKey, PrivateKey]:
        tokens = self.running._tokens
        assert tokens is not None
        while tokens._keys is None or number not in tokens._keys.rounds:
            tokens.tend()
        stored = tokens._registry.key(self.plan.job, number)
        assert stored is not None
        assert stored.secret is not None
        return tokens.round_key(number), PrivateKey.from_bytes(stored.secret)

    def token(self, place: int, number: int = 1, **changes: object) -> bytes:
        """A token as a member gets it, of another fleet or job if that is said."""
        key, private = self.key(number)
        key = replace(key, **changes)  # type: ignore[arg-type]
        nonce = os.urandom(PREFIX_BYTES)
        blinded = blind(key.public(place), key.message(place, nonce))
        signature = private.blind_sign(place, blinded.message)
        return nonce + finalize(key.public(place), key.message(place, nonce), signature, blinded.inverse)

    def fragments(self) -> list[Fragment]:
        """An honest update, without tokens."""
        return list(cut(honest_update(self.task), self.plan))

    def take(self, *fragments: Fragment) -> dict[str, int]:
        """Let fragments come in a batch; the counters after it."""
        payloads = [seal(encode(fragment), self.plan) for fragment in fragments]
        assert {len(payload) for payload in payloads} == {sealed_bytes(self.plan)}
        self.running.cycle.take_fragments(payloads)
        rows = self.running.store.database.execute("SELECT name, value FROM counters")
        return {row["name"]: row["value"] for row in rows}

    @property
    def counted(self) -> int:
        return sum(self.running.store.counts(1).values())


@pytest.fixture(params=["fragment", "round"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path, request.param)
    yield desk
    desk.coordinator.close()


def test_a_fragment_with_a_token_counts_and_comes_again_for_its_receipt(desk: Desk) -> None:
    is_round = desk.plan.linkability == "round"
    whole = desk.token(0)
    sent = [with_token(each, whole if is_round else desk.token(each.position)) for each in desk.fragments()]
    assert desk.take(*sent) == {}
    assert desk.counted == len(sent) == 5
    assert desk.take(*sent) == {"duplicates": 5}
    assert desk.counted == 5


def test_a_token_counts_once_in_a_block(desk: Desk) -> None:
    first, second = desk.fragments(), desk.fragments()
    token = desk.token(0)
    assert desk.take(with_token(first[0], token), with_token(second[0], token)) == {"rejected: spent": 1}
    assert desk.take(with_token(second[0], token)) == {"rejected: spent": 2}
    assert desk.counted == 1
    moved = with_token(replace(second[0], position=1), token)
    expected = {"rejected: spent": 2} | (
        {} if desk.plan.linkability == "round" else {"rejected: bad token": 1}
    )
    assert desk.take(moved) == expected


@pytest.mark.parametrize(
    "what",
    [
        "none",
        "forged",
        "of another round",
        "of another job",
        "of another fleet",
        "with another id",
        "of another modulus",
    ],
)
def test_a_fragment_without_a_valid_token_does_not_count(desk: Desk, what: str) -> None:
    fragment = desk.fragments()[0]
    match what:
        case "none":
            sent = with_token(fragment, bytes(288))
        case "forged":
            token = desk.token(0)
            sent = with_token(fragment, token[:-1] + bytes([token[-1] ^ 1]))
        case "of another round":
            sent = with_token(fragment, desk.token(0, 2))
        case "of another job":
            sent = with_token(fragment, desk.token(0, job=b"k" * 16))
        case "of another fleet":
            sent = with_token(fragment, desk.token(0, fleet="others"))
        case "with another id":
            sent = replace(with_token(fragment, desk.token(0)), id=os.urandom(16))
        case "of another modulus":
            key, _ = desk.key()
            private, nonce = PrivateKey.generate(1), os.urandom(32)
            blinded = blind(private.public(0), key.message(0, nonce))
            own = finalize(
                private.public(0),
                key.message(0, nonce),
                private.blind_sign(0, blinded.message),
                blinded.inverse,
            )
            sent = with_token(fragment, nonce + own)
    assert desk.take(sent) == {"rejected: bad token": 1}
    assert desk.counted == 0


def test_a_dummy_needs_no_token_and_counts_for_nothing(desk: Desk) -> None:
    dummies = [encode(dummy) for dummy in dummies_for(desk.plan)]
    payloads = [seal(as_sent(dummy, desk.plan), desk.plan) for dummy in dummies]
    assert {len(payload) for payload in payloads} == {sealed_bytes(desk.plan)}
    desk.running.cycle.take_fragments(payloads)
    assert desk.counted == 0
    rows = desk.running.store.database.execute("SELECT name, value FROM counters")
    assert {row["name"]: row["value"] for row in rows} == {"dummies": 5}
    elsewhere = replace(decode(as_sent(dummies[0], desk.plan), Fragment), position=5)
    assert desk.take(elsewhere) == {"dummies": 5, "rejected: bad position": 1}, "as a fragment there"


def test_a_probe_has_a_receipt_whenever_it_comes_and_counts_for_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a full block, and once its round is closed: a board goes on by it."""
    receipts: list[bytes] = []
    monkeypatch.setattr(desk.running.cycle._intake, "_acknowledge", lambda ids, *_: receipts.extend(ids))
    early, late, later = (
        decode(as_sent(probe_for(desk.plan).message, desk.plan), Fragment) for _ in range(3)
    )
    assert desk.take(early) == {"probes": 1}
    assert desk.counted == 0
    is_round = desk.plan.linkability == "round"
    whole = desk.token(0)
    sent = [with_token(each, whole if is_round else desk.token(each.position)) for each in desk.fragments()]
    desk.take(*sent, late)
    assert desk.counted == len(sent), "one device is expected: every block is full"
    assert receipts.index(late.id) == sorted(receipts[1:]).index(late.id) + 1, "its place tells nothing"
    desk.running.cycle._close(desk.running.cycle.progress())
    desk.running.cycle.open()
    assert desk.take(later, sent[0]) == {"probes": 3, "late": 1}
    assert receipts[-1:] == [later.id]
    assert set(receipts) == {early.id, late.id, later.id, *(each.id for each in sent)}


def test_a_receipt_leaves_by_when_its_fragment_was_taken_however_long_it_took(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dummy is opened and counted sooner, and the broker sees when its receipt comes."""

    def slow(work: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*what: Any, **how: Any) -> Any:
            desk.clock.advance(0.1)
            return work(*what, **how)

        return slowly

    intake, store = desk.running.cycle._intake, desk.running.store
    monkeypatch.setattr(intake, "read", slow(intake.read))
    monkeypatch.setattr(store, "count", slow(store.count))
    desk.take(with_token(desk.fragments()[0], desk.token(0)))
    assert desk.running.announcer.own_receipts.due_in_s() == pytest.approx(HELD_S - 0.2)


@pytest.mark.parametrize("is_sent_again", [False, True])
def test_a_round_does_not_wait_for_members_that_declined_or_were_refused(
    tmp_path: Path, is_sent_again: bool
) -> None:
    desk = Desk(tmp_path, "fragment", devices=3)
    cycle, office, plan = desk.running.cycle, desk.running._tokens, desk.plan
    assert office is not None
    boards = [enrolled(desk.authority, office._devices)[0].device_id for _ in range(3)]

    def answered(board: str, wish: Wish, verdict: Verdict) -> None:
        statement = Statement(
            bytes.fromhex(board), plan.job, 1, wish, bytes(32), 1, bytes(32), bytes(32), bytes(32)
        )
        with office._registry.transaction():
            office._registry.put(Entry(board, plan.job, 1, wish, verdict, 0.0, statement, bytes(64)))

    cycle._end.announced_at = desk.clock.unix()
    sent = [with_token(each, desk.token(each.position)) for each in desk.fragments()]
    desk.take(*sent)
    answered(boards[0], Wish.TAKES_PART, Verdict.GRANTED)
    answered(boards[1], Wish.BUDGET, Verdict.NOTED)
    desk.clock.advance(desk.settings.round.honest_s + 0.01)
    assert cycle.progress().verdict is Close.COLLECT, "one has not been seen: it may come"
    answered(boards[2], Wish.TAKES_PART, Verdict.OVER_LIMIT)
    assert cycle.progress().verdict is Close.CLOSE
    desk.clock.advance(-0.02)
    assert cycle.progress().verdict is Close.COLLECT, "honest boards have had no time yet"
    desk.clock.advance(0.02)
    cycle.advance()
    assert desk.running.store.over_rounds() == 0, "the receipts of what came last leave first"
    desk.clock.advance(HELD_S)
    if is_sent_again:  # What is counted gets a receipt each time.
        desk.take(*sent)
    desk.running.announcer.own_receipts.publish_due()
    cycle.advance()
    assert desk.running.store.over_rounds() == (not is_sent_again)
    desk.clock.advance(HELD_S)
    cycle.advance()
    assert desk.running.store.over_rounds() == 1, "nobody keeps a round open by sending on"
    desk.coordinator.close()


def test_receipts_that_workers_hold_have_their_time_before_a_round_closes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the next plan, boards would give up what counts."""
    end, store = desk.running.cycle._end, desk.settings.store
    assert end.receipts_have_left(desk.plan), "this program holds none"
    shared = store.with_values({"url": "postgresql://fleet@nowhere/fleet"})
    monkeypatch.setattr(end, "_settings", desk.settings.with_values({"store": shared}))
    end.begin()
    assert not end.receipts_have_left(desk.plan)
    desk.clock.advance(2 * HELD_S)
    assert end.receipts_have_left(desk.plan)


def test_a_token_that_begins_like_a_dummy_is_none(desk: Desk) -> None:
    """A nonce may begin with the byte that marks a dummy: it is not the payload."""
    token = b"\xff" + desk.token(0)[1:]
    sent = with_token(desk.fragments()[0], token)
    assert desk.take(sent) == {"rejected: bad token": 1}


def test_the_id_of_a_fragment_is_its_tokens_and_its_places(desk: Desk) -> None:
    token, other = desk.token(0), desk.token(0)
    ids = {token_id(each, position) for each in (token, other) for position in range(5)}
    assert len(ids) == 10


def test_keys_are_made_ahead_and_their_secrets_go_with_their_round(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "fragment")
    tokens, job = desk.running._tokens, desk.plan.job
    assert tokens is not None
    _, third = desk.key(3)
    assert [*tokens._keys.rounds] == [1, 2, 3]  # type: ignore[union-attr]
    _, first = desk.key(1)
    first.blind_sign(0, bytes(256))
    desk.running.cycle._close(desk.running.cycle.progress())
    desk.running.cycle.open()
    assert [*tokens._keys.rounds] == [2, 3]  # type: ignore[union-attr]
    stored = tokens._registry.key(job, 1)
    assert stored is not None
    assert stored.secret is None
    assert _signer.cache_info().currsize == 0, "nor in memory"
    desk.coordinator.close()
    again = Coordinator(load_fleet_settings(tmp_path / "fleet.yaml"))
    assert again.running is not None
    again.running.cycle.open()
    kept = again.running._tokens._registry.key(job, 3)  # type: ignore[union-attr]
    assert kept is not None
    assert kept.secret == third.to_bytes()
    again.close()
    files = [file.read_bytes() for file in (tmp_path / "members").glob("registry.db*")]
    assert not any(first.to_bytes()[:128] in data for data in files)
    assert any(third.to_bytes()[:128] in data for data in files)


def test_a_member_that_floods_the_coordinator_with_requests_keeps_no_other_waiting(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "fragment")
    tokens, topics = desk.running._tokens, Topics("testers")
    assert tokens is not None
    hers, other = topics.ask("a" * 32), topics.ask("b" * 32)
    tokens.take([Received(hers, b"")] * 2_000)
    tokens.take([Received(hers, b"")] * 2_000 + [Received(other, b"")])
    assert {topic: [each.topic for each in tokens._waiting].count(topic) for topic in (hers, other)} == {
        hers: MAX_ROUNDS_AHEAD, other: 1,
    }  # fmt: skip
    tokens.take([Received(topics.ask(f"{number:032x}"), b"") for number in range(2_000)])
    assert len(tokens._waiting) == 1_024, "of all together"
    desk.coordinator.close()


def test_no_key_of_a_job_that_is_over_makes_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rounds ahead, which will not come."""
    desk = Desk(tmp_path, "fragment")
    tokens, job = desk.running._tokens, desk.plan.job
    assert tokens is not None
    desk.key(3)
    monkeypatch.setattr(desk.running.announcer, "say_goodbye", lambda plan, assets: False)
    assert not desk.running.cycle.cancel(sends_model=False), "the broker has not taken it yet"
    kept = [tokens._registry.key(job, number) for number in (1, 2, 3)]
    assert [None if each is None else each.secret for each in kept] == [None] * 3
    assert None not in kept
    desk.coordinator.close()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_crash_behind_a_close_leaves_no_secret_though_the_job_is_paused(
    tmp_path: Path, *, is_over: bool
) -> None:
    """It is not taken up at the next start, which would erase what is over. Nor is one that is over."""
    desk = Desk(tmp_path, "fragment")
    queue, cycle = Queue(desk.running.store.database), desk.running.cycle
    desk.key(3)
    queue.pause("first")
    cycle._close(cycle.progress())
    if is_over:
        desk.running.store.database.execute("UPDATE jobs SET state = 'cancelled'")
    desk.coordinator.close()
    again = Coordinator(load_fleet_settings(tmp_path / "fleet.yaml"), clock=desk.clock)
    assert again.running is None
    again.close()
    with contextlib.closing(Registry(desk.settings.members_place)) as registry:
        found = [registry.key(desk.plan.job, number) for number in (1, 2, 3)]
    assert [each is not None and each.secret is not None for each in found] == [False, *[not is_over] * 2]


def test_a_fleet_without_members_has_no_tokens(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None, linkability="fragment")
    with pytest.raises(ConfigurationError, match=r"`dpagent coordinator ca init`, or set linkability: none"):
        Coordinator(load_fleet_settings(file))


def test_more_fragments_than_a_request_has_tokens_for_are_refused(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None, linkability="fragment", fragments_per_update=225)
    with pytest.raises(ConfigurationError, match="expected at most 224 with linkability fragment"):
        load_fleet_settings(file)
