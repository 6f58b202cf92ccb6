"""The fleet's certificate authority: certificates of boards, the broker and the operator's programs.

X.509 (RFC 5280), ECDSA on P-256. It also signs the list of what is revoked.

A board's certificate is good for a client of TLS and for nothing else, so that no board can pass for the
broker or for the enrolment endpoint. The revocation list has no end of its own: brokers refuse *every* client
once a list is past it.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dpagent.errors import ConfigurationError, UsageError
from dpagent.protocol import device_signing
from dpagent.protocol.enrolment import fingerprint, is_address, is_host
from dpagent.storage import disk_errors, write_atomically

AuthorityKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
ClientKey = ec.EllipticCurvePublicKey

AUTHORITY_DAYS: Final = 20 * 365
PROGRAM_DAYS: Final = 825
"""Of certificates that commands issue: the longest that some TLS libraries accept of a server."""
_EARLIER: Final = timedelta(hours=1)
"""Certificates begin so long before they are issued: clocks differ."""
_MOST_NAME: Final = 64


@dataclass(frozen=True, slots=True)
class AuthorityFiles:
    """Where an authority is, in the fleet's members directory."""

    members_dir: Path

    @property
    def certificate(self) -> Path:
        """The authority's certificate, and those above it up to the root: what brokers and boards trust."""
        return self.members_dir / "ca.crt"

    @property
    def key(self) -> Path:
        """Its private key, mode 0600."""
        return self.members_dir / "ca.key"


class Authority:
    """An authority that can issue.

    Args:
        chain: its own certificate first, then those above it.
        key: of the first one.
    """

    def __init__(self, chain: Sequence[x509.Certificate], key: AuthorityKey) -> None:
        self.chain, self._key = tuple(chain), key

    @property
    def certificate(self) -> x509.Certificate:
        """Its own certificate."""
        return self.chain[0]

    @property
    def fingerprint(self) -> bytes:
        """Of the whole chain, as invitations carry it."""
        return fingerprint(self.chain)

    def issue_device(self, key: ClientKey, device_id: str, *, days: float, now: datetime) -> x509.Certificate:
        """A board's certificate, which says nothing of the board but its id."""
        usage = ExtendedKeyUsageOID.CLIENT_AUTH
        return self._issued(key, device_id, usage, lifetime=timedelta(days=days), now=now)

    def issue_client(self, key: ClientKey, name: str, *, days: float, now: datetime) -> x509.Certificate:
        """The certificate of a program of the operator's, such as the coordinator.

        Raises:
            UsageError: The name is a board's, empty or too long.
        """
        if re.fullmatch(device_signing.DEVICE_PATTERN, name) or not 0 < len(name) <= _MOST_NAME:
            raise UsageError(f"the name {name!r} cannot be a program's; expected 1 to {_MOST_NAME} "
                             "characters that are no board's id, such as coordinator")  # fmt: skip
        usage = ExtendedKeyUsageOID.CLIENT_AUTH
        return self._issued(key, name, usage, lifetime=timedelta(days=days), now=now)

    def issue_server(
        self, key: ClientKey, names: Sequence[str], *, days: float, now: datetime
    ) -> x509.Certificate:
        """The certificate of a broker or an endpoint.

        Args:
            names: host names and addresses that clients call it by, at least one.

        Raises:
            UsageError: One is neither.
        """
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in names])
        usage = ExtendedKeyUsageOID.SERVER_AUTH
        first = names[0][:_MOST_NAME]
        return self._issued(key, first, usage, alternatives, lifetime=timedelta(days=days), now=now)

    def revocation_list(self, revoked: Iterable[tuple[int, float]], *, now: datetime) -> bytes:
        """The list of revoked certificates, in PEM.

        Args:
            revoked: serial numbers, and times of revocation (Unix).
            now: its date.
        """
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - _EARLIER)
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(int(now.timestamp() * 1000)), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        for serial, at in revoked:
            entry = (
                x509.RevokedCertificateBuilder()
                .serial_number(serial)
                .revocation_date(datetime.fromtimestamp(at, UTC))
            )
            builder = builder.add_revoked_certificate(entry.build())
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def _issued(
        self,
        key: ClientKey,
        name: str,
        usage: x509.ObjectIdentifier,
        *extensions: x509.ExtensionType,
        lifetime: timedelta,
        now: datetime,
    ) -> x509.Certificate:
        ends = min(now + lifetime, self.certificate.not_valid_after_utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_subject(name))
            .issuer_name(self.certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(now - _EARLIER, self.certificate.not_valid_before_utc))
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def create_authority(members_dir: Path, fleet: str, *, now: datetime) -> Authority:
    """Make a fleet's own authority, with a key that is kept in the members directory.

    Raises:
        UsageError: There is an authority already.
        StorageError: It cannot be written.
    """
    _require_none(members_dir)
    key = ec.generate_private_key(ec.SECP256R1())
    # Two authorities of one name would be one to a library that looks issuers up by name.
    subject = _subject(f"dpagent fleet {fleet[:32]} {secrets.token_hex(4)}")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _kept(members_dir, [certificate], key, now)


def adopt_authority(members_dir: Path, certificate_file: Path, key_file: Path, *, now: datetime) -> Authority:
    """Use an authority of the operator's own.

    Args:
        members_dir: where copies of both go.
        certificate_file: its certificate, and those above it up to the root (PEM).
        key_file: its private key (PEM, without a passphrase).
        now: the time.

    Raises:
        UsageError: There is an authority already.
        ConfigurationError: It is none that can issue.
        StorageError: A file cannot be read or written.
    """
    _require_none(members_dir)
    chain, key = _read_chain(certificate_file), _read_key(key_file)
    _require_able(chain, key, certificate_file, key_file, now)
    return _kept(members_dir, chain, key, now)


def load_authority(members_dir: Path, *, now: datetime) -> Authority:
    """The authority in a members directory.

    Raises:
        ConfigurationError: There is none, or it can issue nothing.
        StorageError: A file cannot be read.
    """
    files = AuthorityFiles(members_dir)
    if not files.certificate.exists():
        raise ConfigurationError(
            f"{members_dir} has no certificate authority. `dpagent coordinator ca init` makes one, or takes "
            "your own."
        )
    with disk_errors(files.key):
        if files.key.stat().st_mode & 0o077:
            raise ConfigurationError(
                f"{files.key} is a secret that other users may read. Run: chmod 600 {files.key}"
            )
    chain, key = _read_chain(files.certificate), _read_key(files.key)
    _require_able(chain, key, files.certificate, files.key, now)
    return Authority(chain, key)


def _require_none(members_dir: Path) -> None:
    files = AuthorityFiles(members_dir)
    for file in (files.certificate, files.key):
        if file.exists():
            raise UsageError(
                f"{file} exists: the fleet has its authority, by which all boards know it. To begin anew, "
                "give another members_dir in fleet.yaml; every board must then enrol again."
            )


def _kept(
    members_dir: Path, chain: Sequence[x509.Certificate], key: AuthorityKey, now: datetime
) -> Authority:
    files, authority = AuthorityFiles(members_dir), Authority(chain, key)
    with disk_errors(members_dir):
        members_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_atomically(files.key, pem, mode=0o600)
    write_atomically(files.certificate, pem_of(chain))  # Last: with it, the authority is there.
    return authority


def pem_of(certificates: Iterable[x509.Certificate]) -> bytes:
    """Certificates, one after the other, in PEM."""
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _read_chain(file: Path) -> list[x509.Certificate]:
    with disk_errors(file):
        data = file.read_bytes()
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigurationError(f"{file} holds no certificate; expected one or more in PEM.") from error


def _read_key(file: Path) -> AuthorityKey:
    with disk_errors(file):
        data = file.read_bytes()
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{file} holds no private key; expected one in PEM, without a passphrase."
        ) from error
    if not isinstance(key, (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey)):
        raise ConfigurationError(f"{file} is a key of another kind; expected an elliptic curve's or RSA.")
    return key


def _require_able(
    chain: Sequence[x509.Certificate],
    key: AuthorityKey,
    certificate_file: Path,
    key_file: Path,
    now: datetime,
) -> None:
    certificate = chain[0]
    if certificate.public_key() != key.public_key():
        raise ConfigurationError(f"{key_file} is not the key of the first certificate in {certificate_file}.")
    try:
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
        may = usage.key_cert_sign and usage.crl_sign
    except x509.ExtensionNotFound:
        is_authority = may = False
    if not (is_authority and may):
        raise ConfigurationError(
            f"The first certificate in {certificate_file} is no authority's that may sign certificates and "
            "revocation lists; expected basicConstraints CA:TRUE, and keyUsage keyCertSign and cRLSign."
        )
    for below, above in zip(chain, [*chain[1:], chain[-1]], strict=True):
        try:
            below.verify_directly_issued_by(above)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ConfigurationError(
                f"{certificate_file}: {below.subject.rfc4514_string()!r} is not issued by the certificate "
                "after it; expected the authority's first, then each one's issuer, and the root last."
            ) from error
    for each in chain:
        if not each.not_valid_before_utc <= now < each.not_valid_after_utc:
            raise ConfigurationError(
                f"{certificate_file}: the certificate of {each.subject.rfc4514_string()!r} is valid from "
                f"{each.not_valid_before_utc:%Y-%m-%d} to {each.not_valid_after_utc:%Y-%m-%d}; expected one "
                "that is valid now. Check the clock of this machine."
            )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=key_cert_sign, crl_sign=crl_sign,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    if is_address(name):
        return x509.IPAddress(ipaddress.ip_address(name))
    if is_host(name):
        return x509.DNSName(name)
    raise UsageError(f"{name!r} is no host name and no address; expected broker.example or 192.0.2.7.")
