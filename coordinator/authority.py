"""The fleet's certificate authority: certificates of boards, the broker and the operator's programs.

X.509 (RFC 5280), ECDSA on P-256. It also signs the list of what is revoked.

A board's certificate is good for a client of TLS and for nothing else, so that no board can pass for the
broker or for the enrolment endpoint. The revocation list has no end of its own: brokers refuse *every* client
once a list is past it.

A fleet changes its authority with two of them side by side (:class:`Authorities`): the new one issues from
then on, and boards that know the old one alone go on until they renew their certificates.
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
_PEM: Final = re.compile(rb"-----BEGIN [^-]+-----.+?-----END [^-]+-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AuthorityFiles:
    """Where an authority is, in the fleet's members directory."""

    members_dir: Path

    @property
    def certificate(self) -> Path:
        """What brokers and boards trust: the authority's certificate and those above it up to the root, and
        during a change the same of the one before it."""
        return self.members_dir / "ca.crt"

    @property
    def key(self) -> Path:
        """The private key of each, mode 0600."""
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

    def has_issued(self, certificate: x509.Certificate) -> bool:
        """Whether a certificate is one of its own."""
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

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

    def key_pem(self) -> bytes:
        """Its private key, for a file that nobody else reads."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

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


@dataclass(frozen=True, slots=True)
class Authorities:
    """The authorities of a fleet.

    Attributes:
        issuing: issues to boards and to the operator's programs.
        retiring: the one before it, during a change: what it has issued is still accepted, and it signs for
            servers, which boards have to trust that know it alone.
    """

    issuing: Authority
    retiring: Authority | None = None

    @property
    def all(self) -> tuple[Authority, ...]:
        """The issuing one first."""
        return (self.issuing,) if self.retiring is None else (self.issuing, self.retiring)

    @property
    def anchor(self) -> Authority:
        """The one that every board trusts: by it the endpoint and invitations are known."""
        return self.retiring or self.issuing

    @property
    def trusted(self) -> tuple[x509.Certificate, ...]:
        """All that brokers and boards trust."""
        return tuple(certificate for each in self.all for certificate in each.chain)

    def are_named_in(self, certificate: x509.Certificate) -> bool:
        """Whether a certificate, which the fleet has issued, is of one of them: by the name of its issuer,
        which no two of them share."""
        return any(certificate.issuer == each.certificate.subject for each in self.all)

    def chain_of(self, certificate: x509.Certificate) -> tuple[x509.Certificate, ...]:
        """What is shown with a certificate of one of them: itself, and those between it and the root."""
        issuer = next((each for each in self.all if each.has_issued(certificate)), self.issuing)
        return (certificate, *issuer.chain[:-1])

    def revocation_lists(self, revoked: Iterable[tuple[int, float]], *, now: datetime) -> tuple[bytes, ...]:
        """The list of each. All are of the same serial numbers, which are random."""
        numbers = list(revoked)
        return tuple(each.revocation_list(numbers, now=now) for each in self.all)


def create_authority(members_dir: Path, fleet: str, *, now: datetime) -> Authority:
    """Make a fleet's own authority, with a key that is kept in the members directory.

    Raises:
        UsageError: There is an authority already.
        StorageError: It cannot be written.
    """
    _require_none(members_dir)
    return _kept(members_dir, Authorities(_made(fleet, now))).issuing


def _made(fleet: str, now: datetime) -> Authority:
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
    return Authority([certificate], key)


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
    return _kept(members_dir, Authorities(_given(certificate_file, key_file, now))).issuing


def _given(certificate_file: Path, key_file: Path, now: datetime) -> Authority:
    chain = [each for part in _read_chains(certificate_file) for each in part]
    keys = _read_keys(key_file)
    return _able(chain, keys, certificate_file, key_file, now)


def begin_change(
    members_dir: Path, fleet: str, given: tuple[Path, Path] | None, *, now: datetime
) -> Authorities:
    """Let another authority issue from now on, beside the one so far, which retires.

    Args:
        members_dir: of the fleet.
        fleet: its name.
        given: certificate and key of the operator's own, as of :func:`adopt_authority`; None makes one.
        now: the time.

    Raises:
        UsageError: A change is under way, or it is the same authority.
        ConfigurationError: One of them can issue nothing.
        StorageError: A file cannot be read or written.
    """
    before = load_authorities(members_dir, now=now)
    if before.retiring is not None:
        raise UsageError(
            "A change of the authority is under way: `dpagent coordinator ca show` says who still has a "
            "certificate of the one before, and `dpagent coordinator ca retire` ends it."
        )
    authority = _made(fleet, now) if given is None else _given(*given, now)
    if authority.certificate.subject == before.issuing.certificate.subject:
        raise UsageError(
            f"{authority.certificate.subject.rfc4514_string()} is the name of the authority that the "
            f"fleet has; "
            "expected one of another name, since revocation lists are found by it."
        )
    return _kept(members_dir, Authorities(authority, before.issuing))


def end_change(members_dir: Path, *, now: datetime) -> Authorities:
    """Let the authority that retires be none any more; its key is deleted.

    Raises:
        UsageError: None retires.
        ConfigurationError, StorageError: As of :func:`load_authorities`, or a file cannot be written.
    """
    before = load_authorities(members_dir, now=now)
    files, after = AuthorityFiles(members_dir), Authorities(before.issuing)
    # Where a power cut came between the two files below, the key is left.
    if before.retiring is None and len(_read_keys(files.key)) == 1:
        raise UsageError("No authority retires: `dpagent coordinator ca change` begins a change.")
    # In this order: without its key, an authority that is still named would be one that can issue nothing.
    write_atomically(files.certificate, pem_of(after.trusted))
    write_atomically(files.key, after.issuing.key_pem(), mode=0o600)
    return after


def load_authorities(members_dir: Path, *, now: datetime) -> Authorities:
    """The authorities in a members directory.

    Raises:
        ConfigurationError: There is none, or one can issue nothing.
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
    chains, keys = _read_chains(files.certificate), _read_keys(files.key)
    if len(chains) > 2:
        raise ConfigurationError(
            f"{files.certificate} holds {len(chains)} authorities; expected the one that issues, and "
            f"during a "
            "change the one before it."
        )
    return Authorities(*(_able(each, keys, files.certificate, files.key, now) for each in chains))


def _require_none(members_dir: Path) -> None:
    files = AuthorityFiles(members_dir)
    for file in (files.certificate, files.key):
        if file.exists():
            raise UsageError(
                f"{file} exists: the fleet has its authority, by which all boards know it. To begin anew, "
                "give another members_dir in fleet.yaml; every board must then enrol again."
            )


def _kept(members_dir: Path, authorities: Authorities) -> Authorities:
    files = AuthorityFiles(members_dir)
    with disk_errors(members_dir):
        members_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(files.key, b"".join(each.key_pem() for each in authorities.all), mode=0o600)
    # Last: with it, the authority is there. Keys are found by what is in it, and one too many does no harm.
    write_atomically(files.certificate, pem_of(authorities.trusted))
    return authorities


def pem_of(certificates: Iterable[x509.Certificate]) -> bytes:
    """Certificates, one after the other, in PEM."""
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _read_chains(file: Path) -> list[list[x509.Certificate]]:
    """The chains in a file, each of which ends with a root."""
    with disk_errors(file):
        data = file.read_bytes()
    try:
        certificates = x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigurationError(f"{file} holds no certificate; expected one or more in PEM.") from error
    chains: list[list[x509.Certificate]] = [[]]
    for each in certificates:
        if chains[-1] and chains[-1][-1].issuer == chains[-1][-1].subject:
            chains.append([])
        chains[-1].append(each)
    return chains


def _read_keys(file: Path) -> list[AuthorityKey]:
    with disk_errors(file):
        data = file.read_bytes()
    keys: list[AuthorityKey] = []
    for pem in _PEM.findall(data) or [data]:
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{file} holds no private key; expected one in PEM, without a passphrase."
            ) from error
        if not isinstance(key, (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey)):
            raise ConfigurationError(f"{file} is a key of another kind; expected an elliptic curve's or RSA.")
        keys.append(key)
    return keys


def _able(
    chain: Sequence[x509.Certificate],
    keys: Sequence[AuthorityKey],
    certificate_file: Path,
    key_file: Path,
    now: datetime,
) -> Authority:
    """The authority of a chain and of that key which is its own, if it can issue."""
    certificate = chain[0]
    key = next((each for each in keys if each.public_key() == certificate.public_key()), None)
    if key is None:
        raise ConfigurationError(
            f"{key_file} is not the key of {certificate.subject.rfc4514_string()!r} in {certificate_file}; "
            "expected the key of the certificate that signs, which comes first."
        )
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
    return Authority(chain, key)


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
