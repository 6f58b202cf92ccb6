"""A board's key and certificate, as files and as signatures."""

from __future__ import annotations

import base64
import stat
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from members import certified, key_pem, new_authority, written

from agent.hardware_key import HardwareKey, naming_file
from agent.identity import Identity, durable_key, read_private_key, signing_request
from coordinator.authority import pem_of
from dpagent.errors import ConfigurationError, StorageError, UsageError


def test_an_identity_is_read_back_and_signs(tmp_path: Path) -> None:
    made = certified(new_authority(tmp_path / "ca"))
    identity = Identity.load(*written(tmp_path, "device", made.certificate, made.private_key))
    assert identity.device_id == made.device_id
    assert identity.certificate == made.certificate
    assert len({len(identity.sign(bytes([number]))) for number in range(64)}) == 1


def test_a_signature_is_none_of_a_handshake(tmp_path: Path) -> None:
    """By OpenSSL: it holds for the message with its context, and not for the message itself."""
    identity = certified(new_authority(tmp_path / "ca"))
    signature, (cert_file, _) = (
        identity.sign(b"message"),
        written(tmp_path, "device", identity.certificate, identity.private_key),
    )
    public = tmp_path / "public.pem"
    subprocess.run(
        ["openssl", "x509", "-in", cert_file, "-pubkey", "-noout", "-out", public], check=True, timeout=30
    )
    half = len(signature) // 2
    r, s = int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big")
    (tmp_path / "config").write_text(f"asn1 = SEQUENCE:ecdsa\n[ecdsa]\nr = INTEGER:{r}\ns = INTEGER:{s}\n")
    subprocess.run(
        ["openssl", "asn1parse", "-genconf", tmp_path / "config", "-noout", "-out", tmp_path / "signature"],
        check=True, timeout=30,
    )  # fmt: skip

    def verified(message: bytes) -> bool:
        (tmp_path / "message").write_bytes(message)
        command = ["openssl", "dgst", "-sha256", "-verify", public, "-signature", tmp_path / "signature"]
        done = subprocess.run([*command, tmp_path / "message"], capture_output=True, check=False, timeout=30)
        return done.returncode == 0

    assert verified(b"dpagent v1 device\0message")
    assert not verified(b"message")


def test_files_that_make_no_identity_are_refused(tmp_path: Path) -> None:
    authority = new_authority(tmp_path / "ca")
    one, other = certified(authority), certified(authority)
    cert_file, key_file = written(tmp_path, "one", one.certificate, one.private_key)
    foreign, _ = written(tmp_path, "other", other.certificate, other.private_key)
    with pytest.raises(ConfigurationError, match="is not the key"):
        Identity.load(foreign, key_file)
    ca, _ = written(tmp_path, "ca", authority.certificate, one.private_key)
    with pytest.raises(ConfigurationError, match="expected a device's id"):
        Identity.load(ca, key_file)
    empty = tmp_path / "empty"
    empty.touch(mode=0o600)
    for certificate, key in ((empty, key_file), (cert_file, empty)):
        with pytest.raises(ConfigurationError, match="PEM"):
            Identity.load(certificate, key)
    with pytest.raises(StorageError):
        Identity.load(tmp_path / "missing", key_file)
    other_curve = tmp_path / "p384.key"
    other_curve.touch(mode=0o600)
    other_curve.write_bytes(key_pem(ec.generate_private_key(ec.SECP384R1())))
    with pytest.raises(ConfigurationError, match="P-256"):
        read_private_key(other_curve)
    key_file.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        Identity.load(cert_file, key_file)


def test_a_key_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    file = tmp_path / "identity" / "device.key"
    first, again = durable_key(file), durable_key(file)
    assert first.private_numbers() == again.private_numbers()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_key_that_is_given_is_never_passed_over_for_one_that_was_made(tmp_path: Path) -> None:
    """As when an attempt without the key in hardware was interrupted."""
    file, given = tmp_path / "device.new", tmp_path / "given.pem"
    made = durable_key(file)
    given.touch(mode=0o600)
    given.write_bytes(key_pem(ec.generate_private_key(ec.SECP256R1())))
    with pytest.raises(UsageError, match=r"another key than .*given\.pem"):
        durable_key(file, given)
    assert durable_key(file).public_key() == made.public_key()
    file.unlink()
    for _ in range(2):
        assert durable_key(file, given).public_key() == read_private_key(given).public_key()


def test_a_request_is_signed_by_the_key_and_names_nobody() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.load_der_x509_csr(signing_request(key))
    assert request.is_signature_valid
    assert request.public_key() == key.public_key()
    assert request.subject.rfc4514_string() == "CN=device"
    assert len(request.extensions) == 0


def test_a_certificate_is_renewed_after_two_thirds_of_its_life(tmp_path: Path) -> None:
    identity = certified(new_authority(tmp_path), days=30)
    begins, ends = identity.certificate.not_valid_before_utc, identity.certificate.not_valid_after_utc
    assert abs((identity.renews_at - begins) / (ends - begins) - 2 / 3) < 1e-6
    assert not identity.has_expired(ends - timedelta(seconds=1))
    assert identity.has_expired(ends)
    assert pem_of([identity.certificate]).count(b"BEGIN CERTIFICATE") == 1


def test_a_token_s_key_is_named_by_its_uri_alone() -> None:
    uri = "pkcs11:token=board;object=device;type=private"
    lines = naming_file(uri).decode().splitlines()
    assert (lines[0], lines[-1]) == (
        "-----BEGIN PKCS#11 PROVIDER URI-----", "-----END PKCS#11 PROVIDER URI-----",
    )  # fmt: skip
    der = base64.b64decode("".join(lines[1:-1]))
    # A sequence of a VisibleString and a UTF8String (X.690), with lengths in one byte here.
    assert der[:2] == bytes([0x30, len(der) - 2])
    assert der[2:4] == bytes([0x1A, 25])
    assert der[4:29] == b"PKCS#11 Provider URI v1.0"
    assert der[29:31] == bytes([0x0C, len(uri)])
    assert der[31:].decode() == uri
    long = base64.b64decode("".join(naming_file(f"{uri};serial={'x' * 300}").decode().splitlines()[1:-1]))
    assert long[:2] == bytes([0x30, 0x82])
    assert int.from_bytes(long[2:4], "big") == len(long) - 4


@pytest.mark.parametrize(
    "uri",
    [
        "pkcs11:", "pkcs11:token=board;type=private", "pkcs11:object=device",
        "pkcs11:object=device;type=public", "pkcs11:object=a b;type=private", "pkcs11:object=\n;type=private",
        f"pkcs11:object={'x' * 2_000};type=private",
    ],
)  # fmt: skip
def test_a_uri_that_names_no_key_is_refused(uri: str) -> None:
    with pytest.raises(UsageError, match="names no key; expected pkcs11:token"):
        naming_file(uri)


@pytest.mark.parametrize("pin", ["?pin-value=4321", ";pin-value=4321", "?module-name=a&pin-value=4321"])
def test_a_pin_in_a_uri_is_refused_and_not_repeated(pin: str) -> None:
    uri = f"pkcs11:object=device;type=private{pin}"
    with pytest.raises(UsageError, match="a PIN does not belong") as caught:
        naming_file(uri)
    assert "4321" not in str(caught.value)


def test_a_file_without_an_end_is_no_key() -> None:
    with pytest.raises(ConfigurationError, match="/dev/zero"):
        read_private_key(Path("/dev/zero"))


def test_a_uri_is_one_in_capitals_too_and_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no key; expected pkcs11:token"):
        durable_key(tmp_path / "device.key", "PKCS11:object=device;type=private")


def test_nothing_that_is_to_be_signed_is_taken_for_a_pin(tmp_path: Path) -> None:
    """OpenSSL asks for another where the hardware did not take the one it has; here, for that of a file."""
    key = ec.generate_private_key(ec.SECP256R1())
    file = tmp_path / "device.key"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigurationError, match="with the PIN of a token"):
        HardwareKey(file, key.public_key()).sign(b"secret\n", ec.ECDSA(hashes.SHA256()))
