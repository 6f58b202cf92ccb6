"""The watch over the keys of tokens: all devices of a fleet have to see the same.

A key that one device alone is shown would tell its tokens from all others'. So each device publishes digests
of the list that it saw, some time after it came and unless it heard enough that say the same. Who hears of
another key publishes the signed list that it has, once. Two signed lists that disagree on a round are
evidence: whoever sees both takes no more tokens of that job, and keeps both.

None of that depends on whether the device takes part.

A coordinator can sign any number of lists. So what is kept has bounds; but of rounds that the device has
asked for, what it saw stays, and is told: with as many lists of made-up jobs, a key of its own would else be
forgotten before anybody compares it.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, Final, TypeVar

from agent.state import AgentState
from dpagent.clock import Clock
from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.signing import Verifier
from dpagent.protocol.tokens import TokenKeys, key_digest
from dpagent.protocol.topics import Topics
from dpagent.protocol.witnesses import Witness
from dpagent.transport.session import MqttSession

log = logging.getLogger(__name__)

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

_WITHIN_S: Final = 30.0
"""A digest is published at a random time within so long after the list came."""
_EVIDENCE_WITHIN_S: Final = 10.0
_ENOUGH: Final = 3
"""Devices that say the same; another one need not."""
_WATCHED: Final = 1_024
"""Rounds whose digests, and signed lists, are kept in memory. Here and below, the oldest go that were not
asked for."""
_JOBS: Final = 64
_TOLD: Final = 256
"""Lists of which it is known that they were published."""


class KeyWatch:
    """What one device has seen of the keys, and what it tells others.

    Args:
        fleet: its name.
        verifier: of the coordinator's signature.
        topics: of the fleet.
        state: keeps signed lists.
        session: to publish by.
        clock: the program's.
    """

    def __init__(
        self,
        fleet: str,
        *,
        verifier: Verifier,
        topics: Topics,
        state: AgentState,
        session: MqttSession,
        clock: Clock,
    ) -> None:
        self._fleet, self._verifier, self._topics = fleet, verifier, topics
        self._state, self._session, self._clock = state, session, clock
        self._random = random.SystemRandom()
        self._seen: dict[tuple[bytes, int], tuple[bytes, bytes]] = {}
        """By job and round: the digest of its key, and the signed list that has it."""
        self._current: dict[bytes, TokenKeys] = {}
        """The last list of each job."""
        self._heard: Counter[tuple[bytes, int, bytes]] = Counter()
        self._witness_at: dict[bytes, tuple[float, TokenKeys]] = {}
        """When to publish digests, by job."""
        self._witnessed: set[tuple[bytes, int]] = set()
        """Jobs and rounds whose digests were published since the start, here or by enough others."""
        self._evidence_at: dict[bytes, float] = {}
        """When to publish a signed list, by the list."""
        self._told: dict[bytes, None] = {}
        """Signed lists that were published, here or by others."""
        self._disputed: dict[bytes, None] = {}
        """Jobs of which two lists that disagree were found since the start: others change nothing."""
        for message in state.tokens.lists():
            try:
                keys = verifier.open(message, TokenKeys, "token-keys")
            except MessageError:
                continue  # Of the coordinator, or the fleet, that this board had before.
            self._note(keys, message)
            self._make_current(keys)
        self._drop_former_conflicts()

    def _drop_former_conflicts(self) -> None:
        """Make room for this coordinator's conflicts, of which the first ones are kept."""
        former = [each.job for each in self._state.tokens.conflicts() if not self._is_signed(each.one)]
        if former and self._state.tokens.is_full_of_conflicts:
            self._state.forget_token_conflicts(former)

    def _is_signed(self, message: bytes) -> bool:
        """Whether a list is of the coordinator that this board has now."""
        try:
            self._verifier.open(message, TokenKeys, "token-keys")
        except MessageError:
            return False
        return True

    def keys(self, job: bytes) -> TokenKeys | None:
        """The last list of a job that was seen, or None."""
        return self._current.get(job)

    def take_keys(self, message: bytes) -> None:
        """Take a signed list from the coordinator.

        Raises:
            MessageError: the coordinator did not sign it.
        """
        self._make_current(self._compared(message))

    def _compared(self, message: bytes) -> TokenKeys:
        """A signed list, compared with what was seen before."""
        keys = self._verifier.open(message, TokenKeys, "token-keys")
        if keys.job in self._disputed:
            return keys
        for number in keys.rounds:
            known = self._seen.get((keys.job, number))
            if known is not None and known[0] != key_digest(keys, number, self._fleet):
                self._found_conflict(keys, number, known[1], message)
                return keys
        if all((keys.job, number) in self._seen for number in keys.rounds):
            return keys
        asked = self._state.tokens.asked()
        spared = {self._seen[each][1] for each in asked if each in self._seen}
        self._state.keep_token_list(keys.job, message, spared)
        self._note(keys, message)
        self._witness(keys, self._clock.monotonic())
        return keys

    def _witness(self, keys: TokenKeys, earliest: float) -> None:
        """Have the digests of a list published, from a time on (monotonic)."""
        at = earliest + self._random.uniform(0.0, _WITHIN_S)
        self._witness_at[keys.job] = at, keys
        self._bound_jobs(self._witness_at)

    def note_asked(self, keys: TokenKeys, numbers: Iterable[int], decided_from: float) -> None:
        """The device has asked for tokens of a list: what it saw is told, if that is not done yet.

        Args:
            keys: the list.
            numbers: of the rounds that it asked for.
            decided_from: as of :meth:`Tokens.ask`. A digest of a key that one device alone is shown names it:
                when it is told must not tell the device's grid either.
        """
        asked = {(keys.job, each) for each in numbers}
        if keys.job not in self._witness_at and not asked <= self._witnessed:
            self._witness(keys, decided_from)

    def take_witness(self, payload: bytes) -> None:
        """Hear what another device has seen.

        Raises:
            MessageError: it is no witness.
        """
        try:
            witness = Witness.from_bytes(payload)
        except ValueError as error:
            raise MessageError("malformed", str(error)) from error
        for number, digest in witness.by_round.items():
            known = self._seen.get((witness.job, number))
            if known is None:
                continue
            if known[0] == digest:
                self._heard[witness.job, number, digest] += 1
            elif known[1] not in self._told and known[1] not in self._evidence_at:
                within_s = self._random.uniform(0.0, _EVIDENCE_WITHIN_S)
                self._evidence_at[known[1]] = self._clock.monotonic() + within_s

    def take_evidence(self, message: bytes) -> None:
        """Take a signed list that another device has seen, of whatever job: no keys to ask by.

        Raises:
            MessageError: the coordinator did not sign it.
        """
        self._compared(message)
        self._note_told(message)

    def due_in_s(self) -> float:
        """Seconds until something is to be published; infinite if there is nothing."""
        times = [*self._evidence_at.values(), *(at for at, _ in self._witness_at.values())]
        return max(0.0, min(times, default=math.inf) - self._clock.monotonic())

    def tend(self) -> None:
        """Publish what is due."""
        now = self._clock.monotonic()
        for job, (at, keys) in list(self._witness_at.items()):
            if at <= now:
                witness = Witness.of(keys, self._fleet)
                if self._is_said(witness) or self._published(self._topics.witness, encode(witness)):
                    del self._witness_at[job]
                    self._witnessed |= {(job, each) for each in keys.rounds if (job, each) in self._seen}
        for message, at in list(self._evidence_at.items()):
            if message in self._told or (at <= now and self._published(self._topics.evidence, message)):
                del self._evidence_at[message]
                self._note_told(message)

    def _published(self, topic: str, payload: bytes) -> bool:
        return self._session.has_room and self._session.publish(topic, payload) is not None

    def _is_said(self, witness: Witness) -> bool:
        """Whether enough others have said all of it."""
        return all(
            self._heard[witness.job, number, digest] >= _ENOUGH for number, digest in witness.by_round.items()
        )

    def _note_told(self, message: bytes) -> None:
        self._told[message] = None
        _bound(self._told, _TOLD)

    def _make_current(self, keys: TokenKeys) -> None:
        before = self._current.get(keys.job)
        if before is None or keys.rounds.stop > before.rounds.stop:
            self._current[keys.job] = keys
            self._bound_jobs(self._current)

    def _bound_jobs(self, kept: dict[bytes, Any]) -> None:
        if len(kept) > _JOBS:
            _bound(kept, _JOBS, {job for job, _ in self._state.tokens.asked()})

    def _note(self, keys: TokenKeys, message: bytes) -> None:
        for number in keys.rounds:
            self._seen.setdefault((keys.job, number), (key_digest(keys, number, self._fleet), message))
        if len(self._seen) > _WATCHED:
            for gone, (digest, _) in _bound(self._seen, _WATCHED, self._state.tokens.asked()):
                self._heard.pop((*gone, digest), None)
                self._witnessed.discard(gone)

    def _found_conflict(self, keys: TokenKeys, number: int, one: bytes, other: bytes) -> None:
        self._disputed[keys.job] = None
        _bound(self._disputed, _JOBS)
        is_first = self._state.tokens.conflicting_round(keys.job) is None
        if is_first:
            log.error(
                "the coordinator has signed two different keys for tokens of round %d of job %s: with one of "
                "them it could tell some boards' fragments from others'. This board takes no tokens of that "
                "job, and keeps both lists for your auditor (`dpagent budget evidence`)",
                number, keys.job.hex()[:8],
            )  # fmt: skip
            self._state.keep_token_conflict(keys.job, number, one, other, self._clock.unix())
        for message in (one, other):
            # As many conflicts are kept as there is room for beside what false digests have it tell.
            if message not in self._told and (is_first or len(self._evidence_at) < _TOLD):
                self._evidence_at.setdefault(
                    message, self._clock.monotonic() + self._random.uniform(0.0, _EVIDENCE_WITHIN_S)
                )


def _bound(kept: dict[KeyT, ValueT], most: int, spared: Collection[KeyT] = ()) -> list[tuple[KeyT, ValueT]]:
    """Drop the oldest of what is too much, and return it; what is spared only where nothing else is left."""
    gone: list[tuple[KeyT, ValueT]] = []
    while len(kept) > most:
        *older, _ = kept
        oldest = next((each for each in older if each not in spared), older[0])
        gone.append((oldest, kept.pop(oldest)))
    return gone
