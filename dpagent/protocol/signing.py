"""Signed messages from the coordinator (Ed25519, RFC 8032), bound to fleet and kind."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dpagent.protocol.codec import MessageError, MessageT, decode, encode
from dpagent.protocol.messages import Layout, Signed
from dpagent.protocol.terms import Message
from dpagent.schema.limits import After

SignedKind = Literal["plan", "model", "receipts", "token-keys", "answer", "budgets"]
"""The kinds of signed messages; a signature is valid for only one kind."""


def _bound(fleet: str, kind: str, body: bytes) -> bytes:
    return f"dpagent v1 {kind} {fleet}\0".encode() + body


class Signer:
    """Signs for one fleet.

    Args:
        secret: 32 bytes of an Ed25519 private key.
        fleet: The fleet's name.
    """

    def __init__(self, secret: bytes, fleet: str) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self._fleet = fleet

    @property
    def public_key(self) -> str:
        """The public key as the agents' configuration carries it (base64)."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode("ascii")

    def sign(self, message: Message | Layout, kind: SignedKind) -> bytes:
        """Encode, sign and envelop ``message``."""
        body = encode(message)
        signature = self._key.sign(_bound(self._fleet, kind, body))
        return encode(Signed(signature, body))


class Verifier:
    """Opens messages signed by the coordinator of one fleet.

    Args:
        public_key: 32 bytes, base64.
        fleet: The fleet's name.

    Raises:
        ValueError: ``public_key`` is not that.
    """

    def __init__(self, public_key: str, fleet: str) -> None:
        self._key = Ed25519PublicKey.from_public_bytes(decode_public_key(public_key))
        self._fleet = fleet

    def open(self, data: bytes, schema: type[MessageT], kind: SignedKind) -> MessageT:
        """Return the message inside a signed envelope.

        Raises:
            MessageError: Malformed, or not signed by this fleet's coordinator as ``kind``.
        """
        envelope = decode(data, Signed)
        try:
            self._key.verify(envelope.signature, _bound(self._fleet, kind, envelope.body))
        except InvalidSignature:
            raise MessageError(
                "bad signature",
                f"not signed as {kind} by the key that coordinator_key names. If the fleet has another "
                "coordinator now, set coordinator_key to what `dpagent coordinator key` prints there",
            ) from None
        return decode(envelope.body, schema)


def _checked(text: str) -> str:
    decode_public_key(text)
    return text


CoordinatorKey = Annotated[str, After(_checked)]
"""A coordinator's public key in a settings file: base64, as ``dpagent coordinator key`` prints it."""


def new_signing_secret() -> bytes:
    """32 random bytes: an Ed25519 private key."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def decode_public_key(text: str) -> bytes:
    """The 32 bytes of a base64 public key.

    Raises:
        ValueError: It is not base64 of 32 bytes.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected base64, as `dpagent coordinator key` prints it ({error})") from error
    if len(raw) != 32:
        raise ValueError(
            f"expected 32 bytes in base64, as `dpagent coordinator key` prints it, got {len(raw)}"
        )
    return raw
