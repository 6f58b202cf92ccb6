"""Sealed messages from devices to the coordinator: HPKE base mode (RFC 9180).

Suite: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305. Every seal uses a fresh
ephemeral key, so two fragments of one device share nothing. The broker sees
ciphertexts of one length; position, round and values are inside.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.messages import Fragment, Plan, Sealed
from dpagent.protocol.tokens import fragment_bytes

SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_KEY_AND_TAG_BYTES: Final = 32 + 16


def _info(fleet: str, job: bytes) -> bytes:
    return f"dpagent v1 fragment {fleet}\0".encode() + job


def seal(fragment: bytes, plan: Plan) -> bytes:
    """The message that carries an encoded fragment to the coordinator that made the plan, bound to fleet and
    job.

    Two seals of one fragment share nothing but their length.

    Raises:
        ValueError: no point of the curve is encoded so as the plan's sealing key, or one of small order.
    """
    key = X25519PublicKey.from_public_bytes(plan.sealing_key)
    return encode(Sealed(SUITE.encrypt(fragment, key, _info(plan.fleet, plan.job))))


def sealed_bytes(plan: Plan) -> int:
    """The length of every sealed fragment of a plan."""
    return len(encode(Sealed(bytes(_KEY_AND_TAG_BYTES + fragment_bytes(plan)))))


class OpeningKey:
    """The private key of one who opens what devices of a fleet seal.

    Args:
        secret: 32 bytes of an X25519 private key.
        fleet: The fleet's name.
    """

    def __init__(self, secret: bytes, fleet: str) -> None:
        self._key = X25519PrivateKey.from_private_bytes(secret)
        self._fleet = fleet

    @property
    def public_key(self) -> bytes:
        """The key to seal to, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def _decrypt(self, ciphertext: bytes, info: bytes, meant_for: str) -> bytes:
        try:
            return SUITE.decrypt(ciphertext, self._key, info)
        except (InvalidTag, ValueError):
            raise MessageError("cannot open", f"not sealed to {meant_for}, or altered") from None


class Opener(OpeningKey):
    """Opens sealed fragments."""

    def __init__(self, secret: bytes, fleet: str) -> None:
        super().__init__(secret, fleet)
        self._infos: dict[bytes, bytes] = {}
        """Of the job that was opened for last."""

    def open(self, data: bytes, job: bytes) -> Fragment:
        """Return the fragment inside ``data``.

        Raises:
            MessageError: Malformed, or not sealed to this key for this job.
        """
        envelope = decode(data, Sealed)
        if (info := self._infos.get(job)) is None:
            info = _info(self._fleet, job)
            self._infos = {job: info}
        plaintext = self._decrypt(envelope.ciphertext, info, "this coordinator's key for this job")
        return decode(plaintext, Fragment)


def new_sealing_secret() -> bytes:
    """32 random bytes: an X25519 private key."""
    return X25519PrivateKey.generate().private_bytes_raw()
