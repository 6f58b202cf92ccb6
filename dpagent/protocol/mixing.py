"""The outer seal of fragments that pass through a mixer (Bittau et al., Prochlo, SOSP 2017).

A device seals its sealed fragment once more, to the key of the mixer that the plan names. The mixer takes the
outer seal off and publishes what was inside; it has no key for that.

Each message names the digest of the plan that it answers, in the clear and bound by the seal, and the mixer
mixes only messages of one plan among each other. A coordinator that announces another plan to each device, to
know the devices' answers apart, so finds that they are not mixed, and mostly that they do not leave.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Annotated, Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from dpagent.protocol.codec import decode, encode
from dpagent.protocol.messages import Plan, Sealed
from dpagent.protocol.sealing import SUITE, OpeningKey, seal
from dpagent.schema.limits import After

_PLAN_BYTES: Final = 32


def raw_key(text: str) -> bytes:
    """A mixer's public key, 32 bytes, from its text.

    Raises:
        ValueError: ``text`` is not the base64 of 32 bytes.
    """
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != 32:
        raise ValueError(f"{text!r} is no mixer's key; expected 44 characters, as `dpagent mixer key` prints")
    return key


def key_text(key: bytes) -> str:
    """A mixer's public key as text: base64."""
    return base64.b64encode(key).decode()


def _canonical(text: str) -> str:
    return key_text(raw_key(text))


MixerKey = Annotated[str, After(_canonical)]
"""A mixer's public key in a settings file, see :func:`key_text`."""


def plan_digest(plan: Plan) -> bytes:
    """SHA-256 of all that a plan says but for its deadline, which may be put off; 32 bytes."""
    return hashlib.sha256(encode(plan.with_values({"deadline": 0.0}))).digest()


def _info(fleet: str, digest: bytes) -> bytes:
    return f"dpagent v1 mixer {fleet}\0".encode() + digest


def seal_to_mixer(sealed: bytes, plan: Plan, key: bytes) -> bytes:
    """The message that carries a sealed fragment to the mixer of a plan, bound to fleet and plan.

    Args:
        sealed: of :func:`dpagent.protocol.sealing.seal`.
        plan: that it answers.
        key: the mixer's public key, 32 bytes.

    Raises:
        ValueError: no point of the curve is encoded so as ``key``, or one of small order.
    """
    digest = plan_digest(plan)
    ciphertext = SUITE.encrypt(sealed, X25519PublicKey.from_public_bytes(key), _info(plan.fleet, digest))
    return encode(Sealed(digest + ciphertext))


def seal_for(fragment: bytes, plan: Plan) -> bytes:
    """The message that carries an encoded fragment to the coordinator that made the plan, through the mixer
    that it names, if any. Two of one fragment share nothing but their length and the plan's digest.

    Raises:
        ValueError: no point of the curve is encoded so as a key of the plan, or one of small order.
    """
    sealed = seal(fragment, plan)
    return sealed if plan.mixer is None else seal_to_mixer(sealed, plan, plan.mixer)


@dataclass(frozen=True, slots=True)
class Inner:
    """A message without its outer seal.

    Attributes:
        plan: digest of the plan that it answers.
        sealed: to publish; sealed to the coordinator.
    """

    plan: bytes
    sealed: bytes


def plan_of(data: bytes) -> bytes:
    """The digest of the plan that a message to a mixer says it answers, before anything is opened.

    Raises:
        MessageError: Malformed.
    """
    return decode(data, Sealed).ciphertext[:_PLAN_BYTES]


class OuterOpener(OpeningKey):
    """Takes the outer seal off."""

    def open(self, data: bytes) -> Inner:
        """Return what is inside ``data``.

        Raises:
            MessageError: Malformed, or not sealed to this key for this fleet.
        """
        body = decode(data, Sealed).ciphertext
        digest = body[:_PLAN_BYTES]
        info = _info(self._fleet, digest)
        return Inner(digest, self._decrypt(body[_PLAN_BYTES:], info, "this mixer's key for this fleet"))
