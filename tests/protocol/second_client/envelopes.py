"""Envelopes: signed ones, sealed ones (HPKE, RFC 9180, over its primitives), and the mixer's around those."""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from .cbor import Rejected


def opened(data: bytes, header: int) -> bytes:
    """An envelope without its version."""
    if len(data) > 60_000:
        raise Rejected("oversized")
    if data and data[0] != 1:
        raise Rejected("unsupported version")
    if len(data) < 1 + header:
        raise Rejected("malformed")
    return data[1:]


def sign(body: bytes, kind: str, fleet: str, secret: bytes) -> bytes:
    """A signed envelope."""
    return b"\1" + Ed25519PrivateKey.from_private_bytes(secret).sign(signed_bytes(body, kind, fleet)) + body


def signed_bytes(body: bytes, kind: str, fleet: str) -> bytes:
    return b"dpagent v1 " + kind.encode() + b" " + fleet.encode() + b"\0" + body


def open_signed(data: bytes, kind: str, fleet: str, public_key: bytes) -> bytes:
    envelope = opened(data, 64)
    signature, body = envelope[:64], envelope[64:]
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed_bytes(body, kind, fleet))
    except InvalidSignature:
        raise Rejected("bad signature") from None
    return body


def seal(plaintext: bytes, info: bytes, sealing_key: bytes, ephemeral: bytes) -> bytes:
    """A sealed envelope. ``ephemeral``: 32 bytes, fresh for every seal except in test vectors."""
    return b"\1" + _encrypt(plaintext, info, sealing_key, ephemeral)


def open_sealed(data: bytes, info: bytes, secret: bytes) -> bytes:
    return _decrypt(opened(data, 0), info, secret)


def info_of(fleet: str, job: bytes) -> bytes:
    return b"dpagent v1 fragment " + fleet.encode() + b"\0" + job


def mixer_info(fleet: str, digest: bytes) -> bytes:
    return b"dpagent v1 mixer " + fleet.encode() + b"\0" + digest


def seal_to_mixer(sealed: bytes, digest: bytes, fleet: str, mixer: bytes, ephemeral: bytes) -> bytes:
    """The outer envelope around a sealed one."""
    return b"\1" + digest + _encrypt(sealed, mixer_info(fleet, digest), mixer, ephemeral)


def open_mixed(data: bytes, fleet: str, secret: bytes) -> tuple[bytes, bytes]:
    """The plan's digest, and the sealed envelope inside."""
    envelope = opened(data, 0)
    digest, ciphertext = envelope[:32], envelope[32:]
    return digest, _decrypt(ciphertext, mixer_info(fleet, digest), secret)


def _encrypt(plaintext: bytes, info: bytes, public_key: bytes, ephemeral: bytes) -> bytes:
    sender = X25519PrivateKey.from_private_bytes(ephemeral)
    shared = sender.exchange(X25519PublicKey.from_public_bytes(public_key))
    encapsulated = sender.public_key().public_bytes_raw()
    key, nonce = _schedule(shared, encapsulated + public_key, info)
    return encapsulated + ChaCha20Poly1305(key).encrypt(nonce, plaintext, b"")


def _decrypt(ciphertext: bytes, info: bytes, secret: bytes) -> bytes:
    recipient = X25519PrivateKey.from_private_bytes(secret)
    encapsulated = ciphertext[:32]
    try:
        shared = recipient.exchange(X25519PublicKey.from_public_bytes(encapsulated))
        key, nonce = _schedule(shared, encapsulated + recipient.public_key().public_bytes_raw(), info)
        return ChaCha20Poly1305(key).decrypt(nonce, ciphertext[32:], b"")
    except (ValueError, InvalidTag):  # no such point, too short, altered
        raise Rejected("cannot open") from None


_KEM = b"KEM" + bytes.fromhex("0020")
_HPKE = b"HPKE" + bytes.fromhex("0020 0001 0003")


def _schedule(shared: bytes, kem_context: bytes, info: bytes) -> tuple[bytes, bytes]:
    """Key and nonce of the one message (RFC 9180, sections 4.1 and 5.1, base mode)."""
    shared = _expand(_KEM, _extract(_KEM, b"", b"eae_prk", shared), b"shared_secret", kem_context, 32)
    context = b"\0" + _extract(_HPKE, b"", b"psk_id_hash", b"") + _extract(_HPKE, b"", b"info_hash", info)
    secret = _extract(_HPKE, shared, b"secret", b"")
    return _expand(_HPKE, secret, b"key", context, 32), _expand(_HPKE, secret, b"base_nonce", context, 12)


def _extract(suite: bytes, salt: bytes, label: bytes, material: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + material, "sha256")


def _expand(suite: bytes, key: bytes, label: bytes, info: bytes, length: int) -> bytes:
    labelled = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return hmac.digest(key, labelled + b"\1", "sha256")[:length]  # one block of HKDF is enough
