"""A device's key in hardware: its file only names it, and OpenSSL's providers use it where it is.

``tpm2-openssl`` writes such files for a key in a TPM (``-----BEGIN TSS2 PRIVATE KEY-----``),
``pkcs11-provider`` for one in a PKCS #11 token (``-----BEGIN PKCS#11 PROVIDER URI-----``). TLS takes them as
any other key file. The library that signs elsewhere knows no providers, so here the program
``openssl`` does, under the same ``openssl.cnf``.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpagent.errors import ConfigurationError

_NAMES_A_KEY: Final = re.compile(rb"-----BEGIN (TSS2 PRIVATE KEY|PKCS#11 PROVIDER URI)-----")
_ECDSA_WITH_SHA256: Final = bytes.fromhex("300a06082a8648ce3d040302")
"""An AlgorithmIdentifier (RFC 5758, section 3.2)."""
_PATIENCE_S: Final = 60
"""A TPM takes some tenths of a second to sign; on a busy bus, seconds."""


@dataclass(frozen=True, slots=True)
class HardwareKey:
    """A key that a file names. It signs as the library's own keys do.

    Attributes:
        file: which names it.
        public: its public part.
    """

    file: Path
    public: ec.EllipticCurvePublicKey

    @classmethod
    def in_file(cls, file: Path, data: bytes) -> HardwareKey | None:
        """The key that a file with these bytes names; None if it is no such file.

        Raises:
            ConfigurationError: OpenSSL cannot use it, or it is no key on P-256.
        """
        if _NAMES_A_KEY.search(data) is None:
            return None
        public = serialization.load_der_public_key(
            _openssl(file, "pkey", "-in", str(file), "-pubout", "-outform", "DER")
        )
        if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
            raise ConfigurationError(f"{file} names a key of another kind; expected one on P-256.")
        return cls(file, public)

    def public_key(self) -> ec.EllipticCurvePublicKey:
        """Its public part."""
        return self.public

    def sign(self, data: bytes, signature_algorithm: ec.EllipticCurveSignatureAlgorithm) -> bytes:
        """A signature of ``data`` in DER: ECDSA with SHA-256, and no other algorithm.

        Raises:
            ConfigurationError: OpenSSL could not make it.
        """
        return _openssl(self.file, "dgst", "-sha256", "-sign", str(self.file), given=data)

    def signing_request(self, name: str) -> bytes:
        """A request for a certificate (PKCS #10 in DER) that gives a common name.

        That of `openssl req` has parameters with the signature's algorithm, with tpm2-openssl 1.1, which RFC
        5758 forbids. So it is a request of the library's, for a key that is thrown away, with the public key
        and the signature exchanged.

        Raises:
            ConfigurationError: OpenSSL could not sign it.
        """
        other = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(other, hashes.SHA256())
        # Keys on one curve have one length.
        body = made.tbs_certrequest_bytes.replace(_public(other.public_key()), _public(self.public))
        signature = self.sign(body, ec.ECDSA(hashes.SHA256()))
        return _field(0x30, body + _ECDSA_WITH_SHA256 + _field(0x03, b"\0" + signature))


def _public(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _field(tag: int, content: bytes) -> bytes:
    """Type, length and value (DER), of up to 255 bytes."""
    length = bytes([len(content)]) if len(content) < 0x80 else bytes([0x81, len(content)])
    return bytes([tag]) + length + content


def _openssl(file: Path, *words: str, given: bytes = b"") -> bytes:
    try:
        done = subprocess.run(
            ["openssl", *words], input=given, capture_output=True, timeout=_PATIENCE_S, check=True
        )
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{file} names a key in hardware, which the program openssl uses, and that is not installed: "
            "apt-get install openssl."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"The key that {file} names was not used within {_PATIENCE_S} s. Does the hardware answer?"
        ) from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigurationError(
            f"OpenSSL cannot use the key that {file} names ({said[-1] if said else 'no reason given'}). "
            "Its provider has to be in openssl.cnf, and this program's user has to be let at the hardware."
        ) from error
    return done.stdout
