"""What a device is known by: a key that never leaves it, and the certificate that its fleet issued for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agent.hardware_key import URI_BEGINS, HardwareKey, naming_file
from dpagent.errors import ConfigurationError, UsageError
from dpagent.protocol import device_signing
from dpagent.storage import disk_errors, write_atomically

_ENROL: Final = "`dpagent enrol` with a code from the operator makes another."
_NOBODY: Final = "device"
_LONGEST_KEY: Final = 1 << 16
"""Of the file of a key, in bytes: what comes after them is of none."""
_RENEW_AFTER: Final = 2 / 3
"""Of a certificate's life: so long it takes a board that was off for a third of it to be too late."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A device as its fleet knows it.

    Attributes:
        device_id: 32 hexadecimal characters, the common name of the certificate.
        certificate: the latest one.
        private_key: P-256; its public part is the certificate's. It may be in hardware.
    """

    device_id: str
    certificate: x509.Certificate
    private_key: device_signing.SigningKey

    @classmethod
    def load(cls, cert_file: Path, key_file: Path) -> Identity:
        """Read both files.

        Raises:
            ConfigurationError: One is no such file, they do not belong together, or other users may read
                the key.
            StorageError: One cannot be read.
        """
        certificate, key = read_certificate(cert_file), read_private_key(key_file)
        device_id = device_signing.device_id_of(certificate)
        if device_id is None:
            raise ConfigurationError(
                f"{cert_file} is issued to {device_signing.common_name(certificate)!r}; expected a device's "
                f"id, 32 hexadecimal characters. {_ENROL}"
            )
        if key.public_key() != certificate.public_key():
            raise ConfigurationError(
                f"{key_file} is not the key that {cert_file} is issued for; expected the two files that one "
                f"`dpagent enrol` wrote. Restore them, or enrol again: {_ENROL}"
            )
        return cls(device_id, certificate, key)

    def sign(self, message: bytes) -> bytes:
        """The device's signature, 64 bytes (:mod:`dpagent.protocol.device_signing`)."""
        return device_signing.sign(self.private_key, message)

    @property
    def renews_at(self) -> datetime:
        """When two thirds of the certificate's life are over."""
        begins, ends = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        return begins + (ends - begins) * _RENEW_AFTER

    def has_expired(self, now: datetime | None = None) -> bool:
        """Whether nobody accepts the certificate any more."""
        return (now or datetime.now(UTC)) >= self.certificate.not_valid_after_utc


def read_certificate(file: Path) -> x509.Certificate:
    """The first certificate in a file (PEM).

    Raises:
        ConfigurationError: There is none.
        StorageError: The file cannot be read.
    """
    with disk_errors(file):
        data = file.read_bytes()
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError as error:
        raise ConfigurationError(f"{file} holds no certificate; expected one in PEM. {_ENROL}") from error


def read_private_key(file: Path) -> device_signing.SigningKey:
    """The private key in a file (PKCS #8 in PEM, without a passphrase), or the one in hardware that it names.

    Raises:
        ConfigurationError: It is no P-256 key, or other users may read it.
        StorageError: It cannot be read.
    """
    with disk_errors(file), file.open("rb") as stream:
        mode, data = os.fstat(stream.fileno()).st_mode, stream.read(_LONGEST_KEY)
    if mode & 0o077:
        raise ConfigurationError(f"{file} is a secret that other users may read. Run: chmod 600 {file}")
    if (in_hardware := HardwareKey.in_file(file, data)) is not None:
        return in_hardware
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{file} holds no private key; expected one in PEM, without a passphrase. {_ENROL}"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigurationError(f"{file} is of another kind; expected a private key on P-256. {_ENROL}")
    return key


def durable_key(file: Path, given: Path | str | None = None) -> device_signing.SigningKey:
    """The key in a file, made there (mode 0600) if there is none yet.

    It is on disk before anything is asked for with it: an answer that was lost can be asked for again, with
    the same key.

    Args:
        file: where it is, or will be.
        given: the file of a key that is there already, to be copied in place of one that is made; or the
            ``pkcs11:`` URI of one in hardware, of which a file is made that names it.

    Raises:
        UsageError: There is one already, and it is not the given one.
        ConfigurationError, StorageError: It cannot be read or written.
    """
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if given is not None:
        data = _given(given)
        if not file.exists():
            write_atomically(file, data, mode=0o600)
            _require_usable(file)
        with disk_errors(file):
            if file.read_bytes() != data:
                raise UsageError(
                    f"{file} holds another key than {given}: that of an earlier attempt with this code. "
                    "Leave --key out to go on with that one. Or remove it; if the fleet has issued a "
                    "certificate for it, that takes another code, too."
                )
    elif not file.exists():
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_atomically(file, pem, mode=0o600)
    return read_private_key(file)


def _given(key: Path | str) -> bytes:
    """What the file of a key that is there already holds."""
    if (uri := str(key)).lower().startswith(URI_BEGINS):
        return naming_file(uri)
    read_private_key(Path(key))
    with disk_errors(Path(key)):
        return Path(key).read_bytes()


def _require_usable(file: Path) -> None:
    """Remove a file that was made just now if no key can be had by it: another may be given the next time."""
    try:
        read_private_key(file)
    except ConfigurationError:
        file.unlink()
        raise


def signing_request(key: device_signing.SigningKey) -> bytes:
    """A request for a certificate (PKCS #10 in DER). It names nobody: the fleet gives the id."""
    if isinstance(key, HardwareKey):
        return key.signing_request(_NOBODY)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NOBODY)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)
