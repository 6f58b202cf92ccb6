"""How a device obtains its tokens for a round: a request, sealed and signed, and its answer.

Both have one length for all devices of a job, whether a device takes part, declines, or is refused: random
bytes stand where there are no blinded messages, or no signatures. Only the coordinator can open a request,
and only who asked its answer. What the device signs is its *statement*: who it is, which key it was shown,
how far its ledger has come, and what it wants. The coordinator keeps statements, for auditors.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from dpagent.protocol.blind_signatures import SIGNATURE_BYTES
from dpagent.protocol.codec import decode, encode
from dpagent.protocol.messages import Layout, Sealed
from dpagent.protocol.sealing import SUITE, OpeningKey

DEVICE_SIGNATURE_BYTES: Final = 64
"""See :mod:`dpagent.protocol.device_signing`, which loads X.509: a board without a certificate has no use for
it."""


class Wish(enum.IntEnum):
    """What a device wants of a round, or the public reason why it declines. None depends on a record."""

    TAKES_PART = 0
    BUDGET = 1
    """The budget of its owner does not pay for the job."""
    LIMITS = 2
    """The plan is beyond its owner's limits."""
    UNABLE = 3
    """It cannot run the job: its model, its records' declared form, or what it lacks."""

    @property
    def meaning(self) -> str:
        """In words, for the operator."""
        return {
            Wish.TAKES_PART: "take part",
            Wish.BUDGET: "declined (budget used up)",
            Wish.LIMITS: "declined (beyond the owner's limits)",
            Wish.UNABLE: "declined (model or declared records do not fit)",
        }[self]


class Verdict(enum.IntEnum):
    """What the coordinator answers."""

    GRANTED = 0
    NOTED = 1
    """It has declined."""
    OVER_LIMIT = 2
    """The fleet's own budget for a device is used up."""
    ASKED_OTHERWISE = 3
    """It has asked for this round before, with other blinded messages, and has that answer."""
    CLOSED = 4
    """The round is over."""
    WENT_BACK = 5
    """Its ledger is older than a statement that it has signed, which the answer holds."""
    EXCLUDED = 6
    """The fleet's operator leaves it out for now."""


@dataclass(frozen=True, slots=True)
class Statement(Layout):
    """What a device signs: fields in order, integers big-endian."""

    LENGTH: ClassVar[int] = 173

    device: bytes
    """16 bytes: its id."""
    job: bytes
    """16 bytes."""
    round: int
    """4 bytes."""
    wish: Wish
    """1 byte."""
    keys: bytes
    """32 bytes: :func:`dpagent.protocol.tokens.key_digest` of the key that it was shown."""
    entries: int
    """8 bytes, below 2^63: of its ledger."""
    head: bytes
    """32 bytes: of the last of them, SHA-256 over a secret of the device and its digest."""
    reply_key: bytes
    """32 bytes: X25519 public key; the answer is sealed to it."""
    blinded: bytes
    """32 bytes: SHA-256 of the blinded messages, one after the other."""

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return b"".join(
            (
                self.device, self.job, self.round.to_bytes(4, "big"), bytes([self.wish]), self.keys,
                self.entries.to_bytes(8, "big"), self.head, self.reply_key, self.blinded,
            )
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes) -> Statement:
        """See :class:`Layout`."""
        if len(data) != cls.LENGTH:
            raise ValueError(f"{len(data)} bytes are no statement; expected {cls.LENGTH}")
        if data[69] >> 7:
            raise ValueError("a ledger has fewer than 2^63 entries")  # More than a database keeps.
        return cls(
            data[:16], data[16:32], int.from_bytes(data[32:36], "big"), Wish(data[36]), data[37:69],
            int.from_bytes(data[69:77], "big"), data[77:109], data[109:141], data[141:],
        )  # fmt: skip

    @property
    def signed(self) -> bytes:
        """The bytes that the device signs (:mod:`dpagent.protocol.device_signing`)."""
        return b"token statement\0" + self.to_bytes()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the statement."""
        return hashlib.sha256(self.to_bytes()).digest()


def blinded_digest(blinded: Sequence[bytes]) -> bytes:
    """What a statement says of the blinded messages."""
    return hashlib.sha256(b"".join(blinded)).digest()


def padding(tokens: int) -> list[bytes]:
    """What stands in the place of blinded messages and of signatures: nobody without a key tells."""
    return [secrets.token_bytes(SIGNATURE_BYTES) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Ask(Layout):
    """A request, inside its seal: statement, signature, blinded messages of 256 bytes each."""

    statement: Statement
    signature: bytes
    """64 bytes."""
    blinded: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return self.statement.to_bytes() + self.signature + b"".join(self.blinded)

    @classmethod
    def from_bytes(cls, data: bytes) -> Ask:
        """See :class:`Layout`."""
        statement = Statement.from_bytes(data[: Statement.LENGTH])
        rest = data[Statement.LENGTH :]
        ask = cls(statement, rest[:DEVICE_SIGNATURE_BYTES], _cut(rest[DEVICE_SIGNATURE_BYTES:]))
        if blinded_digest(ask.blinded) != statement.blinded:
            raise ValueError("the statement is of other blinded messages")
        return ask


@dataclass(frozen=True, slots=True)
class Answer(Layout):
    """An answer, inside its seal: verdict, a statement that the device signed earlier and its signature
    (zeros without one), signatures of 256 bytes each."""

    verdict: Verdict
    """1 byte."""
    later: bytes
    """173 + 64 bytes: where its ledger went back."""
    signatures: tuple[bytes, ...]

    NOTHING: ClassVar[bytes] = bytes(Statement.LENGTH + DEVICE_SIGNATURE_BYTES)

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return bytes([self.verdict]) + self.later + b"".join(self.signatures)

    @classmethod
    def from_bytes(cls, data: bytes) -> Answer:
        """See :class:`Layout`."""
        start = 1 + len(cls.NOTHING)
        if len(data) < start:
            raise ValueError(f"{len(data)} bytes are no answer")
        return cls(Verdict(data[0]), data[1:start], _cut(data[start:]))


def _cut(data: bytes) -> tuple[bytes, ...]:
    if len(data) % SIGNATURE_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of messages of {SIGNATURE_BYTES}")
    return tuple(data[at : at + SIGNATURE_BYTES] for at in range(0, len(data), SIGNATURE_BYTES))


def seal_ask(ask: Ask, sealing_key: bytes, fleet: str) -> bytes:
    """The message that carries a request; anew each time.

    Raises:
        ValueError: no point of the curve is encoded so as the key, or one of small order.
    """
    key = X25519PublicKey.from_public_bytes(sealing_key)
    return encode(Sealed(SUITE.encrypt(encode(ask), key, _ask_info(fleet))))


def seal_answer(answer: Answer, to: Statement, fleet: str) -> Sealed:
    """The sealed answer to the request of a statement, for the coordinator to sign.

    Raises:
        ValueError: no point of the curve is encoded so as the key of the request, or one of small order.
    """
    key = X25519PublicKey.from_public_bytes(to.reply_key)
    return Sealed(SUITE.encrypt(encode(answer), key, _answer_info(fleet, to.job, to.round, to.blinded)))


class AskOpener(OpeningKey):
    """Opens requests, with the coordinator's sealing key."""

    def open(self, data: bytes) -> Ask:
        """The request inside.

        Raises:
            MessageError: Malformed, or not sealed to this key.
        """
        sealed = decode(data, Sealed)
        return decode(self._decrypt(sealed.ciphertext, _ask_info(self._fleet), "this coordinator's key"), Ask)


class AnswerOpener(OpeningKey):
    """Opens the answers to one request, with the key that was made for it."""

    def open(self, sealed: Sealed, job: bytes, number: int, blinded: bytes) -> Answer:
        """The answer inside.

        Args:
            sealed: the answer.
            job: of the request.
            number: its round.
            blinded: :func:`blinded_digest` of its messages.

        Raises:
            MessageError: Malformed, or not of this request.
        """
        info = _answer_info(self._fleet, job, number, blinded)
        return decode(self._decrypt(sealed.ciphertext, info, "this request"), Answer)


def _ask_info(fleet: str) -> bytes:
    return f"dpagent v1 ask {fleet}\0".encode()


def _answer_info(fleet: str, job: bytes, number: int, blinded: bytes) -> bytes:
    return f"dpagent v1 answer {fleet}\0".encode() + job + number.to_bytes(4, "big") + blinded
