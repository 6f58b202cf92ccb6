"""A device's key in hardware: its file only names it, and OpenSSL's providers use it where it is.

``tpm2-openssl`` writes such files for a key in a TPM (``-----BEGIN TSS2 PRIVATE KEY-----``),
``pkcs11-provider`` for one in a PKCS #11 token (``-----BEGIN PKCS#11 PROVIDER URI-----``). TLS takes them as
any other key file. The library that signs and makes requests elsewhere knows no providers, so here the
program ``openssl`` does, under the same ``openssl.cnf``.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dpagent.errors import ConfigurationError

_NAMES_A_KEY: Final = re.compile(rb"-----BEGIN (TSS2 PRIVATE KEY|PKCS#11 PROVIDER URI)-----")
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

        Raises:
            ConfigurationError: OpenSSL could not make it.
        """
        return _openssl(
            self.file, "req", "-new", "-key", str(self.file), "-subj", f"/CN={name}", "-sha256", "-outform",
            "DER"
        )  # fmt: skip


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
            f"Its provider "
            "has to be in openssl.cnf, and this program's user has to be let at the hardware."
        ) from error
    return done.stdout
