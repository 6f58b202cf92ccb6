"""Certificates of a broker: of an authority of its own, for a name, for a time. For benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class BrokerCertificate:
    """Files of a broker's certificate.

    Attributes:
        authority: the certificate of who signed it.
        certificate: the broker's.
        key: the broker's secret.
        clients: certificate and secret of each client, by its name.
    """

    authority: Path
    certificate: Path
    key: Path
    clients: dict[str, tuple[Path, Path]]

    @property
    def options(self) -> list[str]:
        """Of Mosquitto's listener."""
        return [f"certfile {self.certificate}", f"keyfile {self.key}"]


def broker_certificate(
    directory: Path,
    *,
    name: str = "127.0.0.1",
    begins_in_days: float = -1,
    ends_in_days: float = 30,
    clients: Sequence[str] = (),
) -> BrokerCertificate:
    """A new authority, and certificates of it: for a name or an address, and for clients."""
    directory.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    ca_key, key = generate_private_key(SECP256R1()), generate_private_key(SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Authority of {directory.name}")])
    own_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    authority = (
        _begun(ca_name, ca_name, ca_key, now - timedelta(days=99), now + timedelta(days=99))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    try:
        alternative: x509.GeneralName = x509.IPAddress(ip_address(name))
    except ValueError:
        alternative = x509.DNSName(name)
    begins, ends = now + timedelta(days=begins_in_days), now + timedelta(days=ends_in_days)
    certificate = (
        _begun(own_name, ca_name, key, begins, ends)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    files = BrokerCertificate(directory / "ca.pem", directory / "broker.pem", directory / "broker.key", {})
    files.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    files.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    files.key.write_bytes(_secret(key))
    for client in clients:
        key = generate_private_key(SECP256R1())
        own_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, client)])
        certificate = _begun(own_name, ca_name, key, begins, ends).sign(ca_key, hashes.SHA256())
        files.clients[client] = directory / f"{client}.pem", directory / f"{client}.key"
        files.clients[client][0].write_bytes(certificate.public_bytes(Encoding.PEM))
        files.clients[client][1].write_bytes(_secret(key))
    return files


def _secret(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _begun(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number(), begins, ends
    )
