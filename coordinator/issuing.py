"""Issuing: members' requests for tokens are checked, entered into the registry, and answered.

The same request has the same answer as often as it comes, until its round closes; another one of the same
device for the same round is refused. So a device has tokens once, and a crash on either side costs neither.
A device seals a request anew each time: the very same message again is somebody else's, and is dropped
unopened. What was signed is kept for a while, so that a request that comes again costs no signatures.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coordinator.blind_signing import FaultError, PrivateKey
from coordinator.devices import Device, Devices
from coordinator.participation import totals
from coordinator.registry import Entry, Registry, Spent, StoredKey
from dpagent import faults
from dpagent.faults import FaultPoint
from dpagent.privacy.statement import implies
from dpagent.protocol.blind_signatures import BlindSignatureError
from dpagent.protocol.codec import MessageError
from dpagent.protocol.issuing import Answer, Ask, AskOpener, Statement, Verdict, Wish, padding, seal_answer
from dpagent.protocol.messages import Sealed
from dpagent.protocol.tokens import TokenKeys, key_digest
from dpagent.wording import counted

log = logging.getLogger(__name__)

_REVISED: Final = frozenset({Verdict.OVER_LIMIT, Verdict.EXCLUDED})
"""Verdicts that the operator may have changed meanwhile."""
_ROUNDING: Final = 1e-9
_SEEN: Final = 65_536
"""Digests of messages that are kept, to drop those that come again: 8 MB."""
_SIGNED_BYTES: Final = 1 << 24
"""Of the signatures that are kept; those of 4,096 devices with 16 tokens."""


@dataclass(frozen=True, slots=True)
class Issued:
    """An answer to publish."""

    device: str
    answer: Sealed


class Issuer:
    """Answers requests for tokens of one job.

    Args:
        fleet: its name.
        opener: opens requests.
        devices: the fleet's.
        registry: what was granted.
        device_epsilon: the most that a device is granted over all jobs, if there is a limit.
        now: Unix time.
    """

    def __init__(
        self,
        fleet: str,
        *,
        opener: AskOpener,
        devices: Devices,
        registry: Registry,
        device_epsilon: float | None,
        now: Callable[[], float],
    ) -> None:
        self._fleet, self._opener, self._now = fleet, opener, now
        self._devices, self._registry = devices, registry
        self._device_epsilon = device_epsilon
        self._seen: dict[bytes, None] = {}
        self._signed: dict[tuple[bytes, bytes, int], tuple[bytes, ...]] = {}
        """Signatures by blinded messages' digest, job and round."""
        self._signed_bytes = 0

    def forget_signed(self) -> None:
        """Let go of the signatures that are kept: a round is closed."""
        self._signed.clear()
        self._signed_bytes = 0

    def answer(self, topic_device: str, payload: bytes, keys: TokenKeys) -> Issued:
        """The answer to a request, which is in the registry by then.

        Args:
            topic_device: the id in the topic that it came on.
            payload: the message.
            keys: that are announced.

        Raises:
            MessageError: It is none that is answered; nothing is noted.
            StorageError: The registry cannot be written; nothing was signed that leaves.
        """
        self._require_new(payload)
        ask = self._opener.open(payload)
        statement = ask.statement
        device = self._member(topic_device, ask)
        if statement.job != keys.job or statement.round >= keys.rounds.stop:
            raise MessageError(
                "another round's request", f"round {statement.round} of {statement.job.hex()[:8]}"
            )
        if len(ask.blinded) != keys.tokens:
            raise MessageError(
                "wrong size", f"{counted(len(ask.blinded), 'message')}; expected {keys.tokens}"
            )
        if statement.round in keys.rounds and statement.keys != key_digest(
            keys, statement.round, self._fleet
        ):
            # Signed by our key, or the device would not have asked: somebody else has it.
            raise MessageError("other keys", f"device {device.id} was shown other keys than those announced")
        with self._registry.transaction():
            answer = self._decided(device, ask, keys)
            faults.reached(FaultPoint.TOKENS_WRITTEN)
        faults.reached(FaultPoint.TOKENS_GRANTED)
        try:
            return Issued(device.id, seal_answer(answer, statement, self._fleet))
        except ValueError as error:
            raise MessageError("malformed", f"the key to answer to is no key: {error}") from error

    def _require_new(self, payload: bytes) -> None:
        """Drop a message that came before.

        Raises:
            MessageError: It did.
        """
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        if digest in self._seen:
            raise MessageError("replayed", "a request that was answered before, in the very same seal")
        self._seen[digest] = None
        if len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]

    def _member(self, topic_device: str, ask: Ask) -> Device:
        device_id = ask.statement.device.hex()
        device = self._devices.find(device_id)
        if device is None or device_id != topic_device:
            raise MessageError("not a member", f"device {device_id} on the topic of {topic_device}")
        if not device.has_signed(ask.signature, ask.statement.signed):
            raise MessageError("bad signature", f"not signed by the key of device {device_id}")
        if not device.is_member:
            raise MessageError("not a member", f"device {device_id} is {device.state}")
        return device

    def _decided(self, device: Device, ask: Ask, keys: TokenKeys) -> Answer:
        statement, registry = ask.statement, self._registry
        key = registry.key(statement.job, statement.round)
        before = registry.entry(device.id, statement.job, statement.round)
        if before is not None and before.statement.blinded != statement.blinded:
            return _refusal(Verdict.ASKED_OTHERWISE, keys)
        if before is None or before.verdict in _REVISED:
            if key is None or key.secret is None:
                return _refusal(Verdict.CLOSED, keys)
            if (later := self._later_ledger(device, statement)) is not None:
                return _refusal(Verdict.WENT_BACK, keys, later)
            verdict = self._verdict(device, statement)
            at = self._now()
            before = Entry(
                device.id,
                statement.job,
                statement.round,
                statement.wish,
                verdict,
                at,
                statement,
                ask.signature,
            )
            registry.put(before)
            registry.put_ledger(device.id, statement, ask.signature)
        if not before.is_granted:
            return _refusal(before.verdict, keys)
        if key is None or key.secret is None:
            return _refusal(Verdict.CLOSED, keys)
        return Answer(Verdict.GRANTED, Answer.NOTHING, self._signatures(key, ask))

    def _signatures(self, key: StoredKey, ask: Ask) -> tuple[bytes, ...]:
        """Those of a request, made or kept."""
        place = ask.statement.blinded, ask.statement.job, ask.statement.round
        if (kept := self._signed.get(place)) is not None:
            return kept
        signed = self._signed[place] = _signed(key, ask)
        self._signed_bytes += sum(map(len, signed))
        while self._signed_bytes > _SIGNED_BYTES:
            self._signed_bytes -= sum(map(len, self._signed.pop(next(iter(self._signed)))))
        return signed

    def _later_ledger(self, device: Device, statement: Statement) -> bytes | None:
        """A statement that the device signed when its ledger had come further, with its signature."""
        latest = self._registry.ledger(device.id)
        if latest is None or statement.entries >= latest.entries:
            return None
        if not latest.went_back:  # Once: it asks again and again.
            self._registry.note_went_back(device.id)
            log.warning(
                "device %s: its ledger has %s, and had %s by its own statement. It is told; until it is past "
                "them again it gets no tokens",
                device.id, counted(statement.entries, "entry"), counted(latest.entries, "entry"),
            )  # fmt: skip
        return latest.statement + latest.signature

    def _verdict(self, device: Device, statement: Statement) -> Verdict:
        if statement.wish is not Wish.TAKES_PART:
            return Verdict.NOTED
        if device.excluded_at is not None:
            return Verdict.EXCLUDED
        lineage = self._devices.lineage(device.id)
        for earlier in lineage[1:]:
            entry = self._registry.entry(earlier, statement.job, statement.round)
            if entry is not None and entry.is_granted:
                return Verdict.ASKED_OTHERWISE  # The tokens of the board that it replaces count still.
        return Verdict.OVER_LIMIT if self._is_over(lineage, statement) else Verdict.GRANTED

    def _is_over(self, lineage: tuple[str, ...], statement: Statement) -> bool:
        """Whether a round would bring a device beyond what the fleet grants it."""
        if self._device_epsilon is None:
            return False
        job = statement.job.hex()
        others = [each for each in self._registry.spent(lineage) if each.job != job]
        price = self._registry.price(statement.job, statement.round)
        columns = [Spent(job, 1, column) for column in price]
        return any(
            total.epsilon > self._device_epsilon * (1 + _ROUNDING)
            for total in totals([*others, *columns])
            if any(implies(column.scope, total.scope) for column in columns)
        )


def _refusal(verdict: Verdict, keys: TokenKeys, later: bytes = Answer.NOTHING) -> Answer:
    return Answer(verdict, later, tuple(padding(keys.tokens)))


def _signed(key: StoredKey, ask: Ask) -> tuple[bytes, ...]:
    assert key.secret is not None
    private = PrivateKey.from_bytes(key.secret)
    try:
        return tuple(private.blind_sign(number, blinded) for number, blinded in enumerate(ask.blinded))
    except BlindSignatureError as error:
        raise MessageError("malformed", str(error)) from error
    except FaultError as error:
        log.error("device %s: %s. Is this machine's memory sound?", ask.statement.device.hex(), error)
        raise MessageError("fault in signing", str(error)) from error
