"""Fleets' authorities and members for the tests: real keys, real certificates, real tables."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from agent.identity import Identity
from coordinator.authority import Authority, create_authority, pem_of
from coordinator.devices import Device, Devices
from dpagent.protocol import device_signing


def new_authority(members_dir: Path, fleet: str = "meadow") -> Authority:
    return create_authority(members_dir, fleet, now=datetime.now(UTC))


def certified(
    authority: Authority,
    *,
    device_id: str | None = None,
    days: float = 30,
    issued_ago: timedelta = timedelta(),
) -> Identity:
    """A key and a certificate for it, of a device that is in no table yet."""
    key = ec.generate_private_key(ec.SECP256R1())
    device_id = device_id or device_signing.new_device_id()
    now = datetime.now(UTC) - issued_ago
    certificate = authority.issue_device(key.public_key(), device_id, days=days, now=now)
    return Identity(device_id, certificate, key)


def enrolled(
    authority: Authority, devices: Devices, *, replaces: str | None = None
) -> tuple[Identity, Device]:
    """A member."""
    identity = certified(authority)
    with devices.transaction():
        device = devices.add(identity.certificate, at=time.time(), replaces=replaces)
    return identity, device


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def written(
    directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    """A certificate and its key as files."""
    cert_file, key_file = directory / f"{name}.crt", directory / f"{name}.key"
    cert_file.write_bytes(pem_of([certificate]))
    key_file.touch(mode=0o600)
    key_file.write_bytes(key_pem(key))
    return cert_file, key_file
