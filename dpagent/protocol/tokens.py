"""One-time tokens: a member of the fleet proves with each fragment that it is one, and not which one.

A token is a blind signature (:mod:`dpagent.protocol.blind_signatures`) by the key of its round. Each round of
a job has a modulus of its own. The *class* of a token is its block: its exponent is the block's, so that
nobody can spend all tokens of a round on one block. On the wire a token is nonce ‖ signature. The nonce and
the fragment's place give the fragment its id: of one token in one block, one fragment counts.

The coordinator announces the moduli some rounds ahead, in a signed list. All devices compare digests of what
they saw (:func:`key_digest`): a modulus that one device alone was shown would tell its tokens from others'.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

from dpagent.protocol.blind_signatures import (
    MODULUS_BITS,
    PREFIX_BYTES,
    SIGNATURE_BYTES,
    PublicKey,
    exponent,
)
from dpagent.protocol.messages import Fragment, JobId, Linkability, Plan, RoundNumber
from dpagent.protocol.terms import Message
from dpagent.schema.base import rule
from dpagent.schema.limits import Limits

TOKEN_BYTES: Final = PREFIX_BYTES + SIGNATURE_BYTES
MAX_TOKENS: Final = 224
"""Of a device in a round: a request and its answer are one message each."""
MAX_ROUNDS_AHEAD: Final = 16
LINKABILITY_MEANINGS: Final[dict[str, str]] = {
    "fragment": "each fragment carries a one-time token of an enrolled board: only members' count, each "
    "board's once; whose a fragment is, and which belong together, their tokens do not tell",
    "round": "the fragments of a board in a round carry one token: only members' count, each board's once; "
    "the coordinator sees which belong together, and their token does not tell whose they are",
    "none": "fragments carry no tokens: those of anybody count who may write to the topic",
}
"""In words, for operators and auditors."""
_WHOLE_ROUND: Final = 0xFFFF_FFFF
"""The block that a round's only token is for."""

_Modulus = Annotated[bytes, Limits(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class TokenKeys(Message):
    """The moduli of coming rounds. Signed, retained."""

    job: JobId
    linkability: Literal["fragment", "round"]
    tokens: Annotated[int, Limits(ge=1, le=MAX_TOKENS)]
    """Of a device in a round: one, or one for each block."""
    sealing_key: Annotated[bytes, Limits(min_length=32, max_length=32)]
    """X25519 public key; requests are sealed to it."""
    first_round: RoundNumber
    moduli: Annotated[list[_Modulus], Limits(min_length=1, max_length=MAX_ROUNDS_AHEAD)]
    """One for each round from the first one on, big-endian."""

    @rule
    def _moduli_are_of_full_length(self) -> None:
        for modulus in self.moduli:
            if not (modulus[0] >> 7 and modulus[-1] & 1):
                raise ValueError(f"a modulus is even, or has fewer than {MODULUS_BITS} bits")
        if self.linkability == "round" and self.tokens != 1:
            raise ValueError(f"a device has {self.tokens} tokens for a round; expected one")

    @property
    def rounds(self) -> range:
        """The rounds that have a modulus here."""
        return range(self.first_round, self.first_round + len(self.moduli))

    def modulus(self, number: int) -> bytes | None:
        """The modulus of a round, if it is here."""
        return self.moduli[number - self.first_round] if number in self.rounds else None


def key_digest(keys: TokenKeys, number: int, fleet: str) -> bytes:
    """SHA-256 of all that the list says of one round, which is in it: what devices compare, 32 bytes."""
    said = keys.with_values({"first_round": number, "moduli": [keys.moduli[number - keys.first_round]]})
    fields = (
        said.job, number.to_bytes(4, "big"), said.linkability.encode() + b"\0",
        said.tokens.to_bytes(4, "big"), said.sealing_key, said.moduli[0],
    )  # fmt: skip
    return hashlib.sha256(f"dpagent v1 token-key {fleet}\0".encode() + b"".join(fields)).digest()


@dataclass(frozen=True, slots=True)
class RoundKey:
    """The public keys of one round.

    Attributes:
        fleet: the fleet's name.
        job: its id, 16 bytes.
        number: the round.
        linkability: of the job.
        tokens: of a device.
        modulus: big-endian, 256 bytes.
    """

    fleet: str
    job: bytes
    number: int
    linkability: Linkability
    tokens: int
    modulus: bytes

    @classmethod
    def of(cls, keys: TokenKeys, number: int, fleet: str) -> RoundKey:
        """That of a round in a list."""
        modulus = keys.moduli[number - keys.first_round]
        return cls(fleet, keys.job, number, keys.linkability, keys.tokens, modulus)

    def public(self, place: int) -> PublicKey:
        """The key of a device's token number ``place`` of the round, from 0."""
        return PublicKey(int.from_bytes(self.modulus, "big"), exponent(place))

    def message(self, place: int, nonce: bytes) -> bytes:
        """What is signed: the nonce, and all that the token is for."""
        block = place if self.linkability == "fragment" else _WHOLE_ROUND
        numbers = self.number.to_bytes(4, "big") + block.to_bytes(4, "big")
        return nonce + f"dpagent v1 token {self.fleet}\0".encode() + self.job + numbers

    def is_valid(self, token: bytes, position: int) -> bool:
        """Whether a token is good for a block."""
        place = position if self.linkability == "fragment" else 0
        if len(token) != TOKEN_BYTES or place >= self.tokens:
            return False
        nonce, signature = token[:PREFIX_BYTES], token[PREFIX_BYTES:]
        return self.public(place).has_signed(self.message(place, nonce), signature)


def token_bytes(plan: Plan) -> int:
    """What a token adds to each fragment of a plan."""
    return 0 if plan.linkability == "none" else TOKEN_BYTES


def fragment_bytes(plan: Plan) -> int:
    """The length of every fragment of a plan, a dummy's too, inside the seal."""
    return Fragment.HEADER_BYTES + token_bytes(plan) + plan.wire.bytes


def token_id(token: bytes, position: int) -> bytes:
    """The id of the fragment in a block that carries a token, 16 bytes."""
    said = b"dpagent v1 fragment-id\0" + token[:PREFIX_BYTES] + position.to_bytes(4, "big")
    return hashlib.sha256(said).digest()[:16]


def with_token(fragment: Fragment, token: bytes) -> Fragment:
    """A fragment that carries a token."""
    return replace(fragment, id=token_id(token, fragment.position), payload=token + fragment.payload)


def without_token(fragment: Fragment) -> tuple[bytes, Fragment]:
    """The token of a fragment that was opened, and the fragment without it. A dummy has zeros for a token."""
    token, payload = fragment.payload[:TOKEN_BYTES], fragment.payload[TOKEN_BYTES:]
    return token, Fragment(fragment.round, fragment.position, fragment.id, payload)
