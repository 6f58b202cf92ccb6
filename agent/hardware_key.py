"""A device's key in hardware: its file only names it, and OpenSSL's providers use it where it is.

``tpm2-openssl`` writes such files for a key in a TPM (``-----BEGIN TSS2 PRIVATE KEY-----``),
``pkcs11-provider`` for one in a PKCS #11 token (``-----BEGIN PKCS#11 PROVIDER URI-----``). TLS takes them as
any other key file. The library that signs elsewhere knows no providers, so here the program
``openssl`` does, under the same ``openssl.cnf``.
"""

from __future__ import annotations

import base64
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpagent.errors import ConfigurationError, UsageError

URI_BEGINS: Final = "pkcs11:"
_URI_LABEL: Final = b"PKCS#11 Provider URI v1.0"
_LONGEST_URI: Final = 1_024
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


def naming_file(uri: str) -> bytes:
    """A file that names a key in a PKCS #11 token: in PEM, a label and the URI, as ``pkcs11-provider`` reads
    it (its ``docs/provider-pkcs11.7.md``, "URIs in PEM files").

    Args:
        uri: of the private key (RFC 7512).

    Raises:
        UsageError: It is none, or has a PIN in it.
    """
    shown = uri.partition("?")[0].partition("pin-value")[0]
    attributes = dict(part.partition("=")[::2] for part in shown.removeprefix(URI_BEGINS).split(";"))
    if "pin-value" in uri:
        raise UsageError(
            f"{shown}: a PIN does not belong in the URI, which others can read in the list of processes. "
            "Give it to the provider, by pkcs11-module-token-pin in openssl.cnf (docs/deploy.md)."
        )
    names_one = any(attributes.get(name) for name in ("object", "id"))
    is_text = uri.isascii() and uri.isprintable() and " " not in uri and len(uri) <= _LONGEST_URI
    if not (uri.startswith(URI_BEGINS) and names_one and is_text) or attributes.get("type") != "private":
        raise UsageError(
            f"{shown[:100]!r} names no key; expected pkcs11:token=…;object=…;type=private, as `pkcs11-tool "
            "--list-objects` shows it."
        )
    body = _field(0x1A, _URI_LABEL) + _field(0x0C, uri.encode())
    text = base64.encodebytes(_field(0x30, body)).replace(b"\n", b"")
    lines = b"\n".join(text[at : at + 64] for at in range(0, len(text), 64))
    name = b"PKCS#11 PROVIDER URI"
    return b"-----BEGIN " + name + b"-----\n" + lines + b"\n-----END " + name + b"-----\n"


def _public(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _field(tag: int, content: bytes) -> bytes:
    """Type, length and value (DER)."""
    size = len(content)
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, size] if size < 0x80 else [tag, 0x80 | len(length), *length]) + content


def _openssl(file: Path, command: str, *words: str, given: bytes = b"") -> bytes:
    # Without -passin it would ask for another PIN where the token did not take one, and read it from what is
    # to be signed; a token counts wrong ones.
    called = ["openssl", command, "-passin", "pass:", *words]
    try:
        done = subprocess.run(called, input=given, capture_output=True, timeout=_PATIENCE_S, check=True)
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
            "Its provider has to be in openssl.cnf, with the PIN of a token; the hardware has to be there "
            "and to hold this key; and this program's user has to be let at it."
        ) from error
    return done.stdout
