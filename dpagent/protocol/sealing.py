"""Sealed messages from devices to the coordinator: HPKE base mode (RFC 9180).

Suite: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305. Every seal uses a fresh
ephemeral key, so two fragments of one device share nothing. The broker sees
ciphertexts of one length; position, round and values are inside.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.messages import Fragment, Sealed

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


def _info(fleet: str) -> bytes:
    return f"dpagent v1 fragment {fleet}".encode()


def seal(fragment: Fragment, fleet: str, sealing_key: bytes) -> bytes:
    """The message that carries ``fragment`` to the holder of ``sealing_key`` (32 bytes, X25519).

    Raises:
        ValueError: no point of the curve is encoded so, or one of small order.
    """
    return seal_encoded(encode(fragment), fleet, sealing_key)


def seal_encoded(fragment: bytes, fleet: str, sealing_key: bytes) -> bytes:
    """As :func:`seal`, of an encoded fragment. Two seals of one fragment share nothing but their length."""
    ciphertext = _SUITE.encrypt(fragment, X25519PublicKey.from_public_bytes(sealing_key), _info(fleet))
    return encode(Sealed(version=1, kind="sealed", ciphertext=ciphertext))


class Opener:
    """Opens sealed fragments.

    Args:
        secret: 32 bytes of an X25519 private key.
        fleet: The fleet's name.
    """

    def __init__(self, secret: bytes, fleet: str) -> None:
        self._key = X25519PrivateKey.from_private_bytes(secret)
        self._info = _info(fleet)

    @property
    def public_key(self) -> bytes:
        """The sealing key to announce, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def open(self, data: bytes) -> Fragment:
        """Return the fragment inside ``data``.

        Raises:
            MessageError: Malformed, or not sealed to this key.
        """
        envelope = decode(data, Sealed)
        try:
            plaintext = _SUITE.decrypt(envelope.ciphertext, self._key, self._info)
        except (InvalidTag, ValueError):
            raise MessageError("cannot open", "not sealed to this coordinator's key, or altered") from None
        return decode(plaintext, Fragment)


def new_sealing_secret() -> bytes:
    """32 random bytes: an X25519 private key."""
    return X25519PrivateKey.generate().private_bytes_raw()
