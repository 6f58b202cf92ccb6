"""The enrolment endpoint, as a process: invitations, renewals, and what strangers send."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from brokers import wait_until
from children import PATIENCE_S
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from enrolments import EnrolmentFleet
from members import certified, new_authority, written

from agent.enrolling import Enrolled, confirm, enrol, renew
from agent.identity import Identity, signing_request
from coordinator.authority import load_authorities
from coordinator.devices import DeviceState
from coordinator.endpoint import MOST_CONNECTIONS
from coordinator.enrolment import MOST_RENEWALS
from dpagent.errors import BrokerError, ConfigurationError, UsageError
from dpagent.protocol.enrolment import ENROL_PATH, RENEW_PATH, Invitation, base64_of, new_secret


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnrolmentFleet]:
    fleet = EnrolmentFleet(tmp_path_factory.mktemp("fleet"), "mqtts://127.0.0.1:1").start()
    yield fleet
    fleet.stop()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def entered(fleet: EnrolmentFleet, key: ec.EllipticCurvePrivateKey | None = None) -> Enrolled:
    (code,) = fleet.invite()
    return enrol(Invitation.read(code), key or new_key())


def files(enrolled: Enrolled, directory: Path) -> tuple[Path, Path]:
    return written(directory, "device", enrolled.identity.certificate, enrolled.identity.private_key)


def renewed(fleet: EnrolmentFleet, identity: Identity, directory: Path) -> x509.Certificate:
    files = written(directory, "device", identity.certificate, identity.private_key)
    return x509.load_pem_x509_certificate(renew(fleet.url, fleet.members / "ca.crt", *files)[0])


def test_an_invitation_makes_a_member(fleet: EnrolmentFleet) -> None:
    enrolled = entered(fleet)
    with fleet.devices() as devices:
        device = devices.find(enrolled.identity.device_id)
    assert device is not None
    assert device.is_member
    assert device.parsed == enrolled.identity.certificate
    assert enrolled.answer.fleet == "testers"
    assert enrolled.answer.broker.url == "mqtts://127.0.0.1:1"
    usage = device.parsed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    assert device.parsed.subject.rfc4514_string() == f"CN={device.id}"


def test_a_code_lets_one_key_in_however_often_it_asks(fleet: EnrolmentFleet) -> None:
    (code,) = fleet.invite()
    invitation, key = Invitation.read(code), new_key()
    first, again = enrol(invitation, key), enrol(invitation, key)  # whose first answer was lost
    assert first.identity.device_id == again.identity.device_id
    with pytest.raises(UsageError, match="has been used"):
        enrol(invitation, new_key())
    assert fleet.run("devices", "revoke", first.identity.device_id).returncode == 0
    with pytest.raises(UsageError, match="is no member any more"):
        enrol(invitation, key)


def test_boards_that_race_for_a_code_are_one_member(fleet: EnrolmentFleet) -> None:
    (code,) = fleet.invite()
    invitation = Invitation.read(code)

    def races(_: int) -> str | None:
        try:
            return enrol(invitation, new_key()).identity.device_id
        except UsageError:
            return None

    with ThreadPoolExecutor(8) as pool:
        assert sum(each is not None for each in pool.map(races, range(8))) == 1


def test_a_code_for_an_image_lets_as_many_in_as_it_says(fleet: EnrolmentFleet, tmp_path: Path) -> None:
    image = tmp_path / "code"
    assert fleet.run("invite", "--count", "3", "--image", str(image)).returncode == 0
    invitation = Invitation.read(image.read_text().splitlines()[-1])
    assert len({enrol(invitation, new_key()).identity.device_id for _ in range(3)}) == 3
    with pytest.raises(UsageError, match="has been used"):
        enrol(invitation, new_key())


def test_a_code_that_is_late_or_guessed_lets_nobody_in(fleet: EnrolmentFleet) -> None:
    (code,) = fleet.invite("--hours", "0.001")
    late = Invitation.read(code)
    time.sleep(3.7)
    with pytest.raises(UsageError, match="has expired"):
        enrol(late, new_key())
    with pytest.raises(UsageError, match="No invitation"):
        enrol(Invitation("127.0.0.1", fleet.port, late.authority, new_secret()), new_key())


def test_a_secret_is_nowhere_in_the_fleets_files(fleet: EnrolmentFleet) -> None:
    (code,) = fleet.invite()
    invitation = Invitation.read(code)
    enrol(invitation, new_key())
    stored = b"".join(file.read_bytes() for file in fleet.directory.rglob("*") if file.is_file())
    for form in (invitation.secret, invitation.secret.hex().encode(), base64_of(invitation.secret).encode()):
        assert form not in stored
    assert invitation.secret.hex() not in repr(invitation)


def test_a_code_of_another_fleet_shows_its_secret_to_nobody(fleet: EnrolmentFleet, tmp_path: Path) -> None:
    (code,) = fleet.invite()
    invitation = Invitation.read(code)
    stranger = Invitation("127.0.0.1", fleet.port, bytes(16), invitation.secret)
    with pytest.raises(ConfigurationError, match="Nothing was sent"):
        enrol(stranger, new_key())
    enrol(invitation, new_key())  # It is not used up.


def test_who_stands_between_with_the_right_authority_and_no_key_of_it_gets_no_secret(
    fleet: EnrolmentFleet, tmp_path: Path
) -> None:
    """The authority's certificate is public: showing it is not enough. A member's certificate does not make
    an endpoint either."""
    (code,) = fleet.invite()
    invitation, heard = Invitation.read(code), bytearray()
    cert_file, key_file = files(entered(fleet), tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert_file, key_file)
    pem = (fleet.members / "ca.crt").read_bytes()
    answer = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(pem) + pem
    with socket.create_server(("127.0.0.1", 0)) as server:

        def stands() -> None:
            for _ in range(2):
                plain, _ = server.accept()
                try:
                    with context.wrap_socket(plain, server_side=True) as between:
                        heard.extend(between.recv(65_536))
                        between.sendall(answer)
                except OSError:
                    plain.close()

        thread = threading.Thread(target=stands)
        thread.start()
        fooled = Invitation("127.0.0.1", server.getsockname()[1], invitation.authority, invitation.secret)
        with pytest.raises(ConfigurationError, match="did not issue"):
            enrol(fooled, new_key())
        thread.join(PATIENCE_S)
    assert base64_of(invitation.secret).encode() not in heard


def test_a_key_enrols_once(fleet: EnrolmentFleet) -> None:
    key = new_key()
    entered(fleet, key)
    with pytest.raises(UsageError, match="must not be copied"):
        entered(fleet, key)


def test_a_member_renews_for_its_key_and_not_without_end(fleet: EnrolmentFleet, tmp_path: Path) -> None:
    identity = entered(fleet).identity
    following = renewed(fleet, identity, tmp_path)
    assert following.public_key() == identity.certificate.public_key()
    assert following.serial_number != identity.certificate.serial_number
    with fleet.devices() as devices:
        known = devices.find(identity.device_id)
        assert known is not None
        assert known.parsed == following
    # Both hold: an answer that is lost locks nobody out.
    for _ in range(MOST_RENEWALS - 2):
        renewed(fleet, identity, tmp_path)
    with pytest.raises(UsageError, match="a day"):
        renewed(fleet, identity, tmp_path)


def test_a_certificate_is_renewed_for_no_other_key(fleet: EnrolmentFleet, tmp_path: Path) -> None:
    identity = entered(fleet).identity
    files = written(tmp_path, "device", identity.certificate, identity.private_key)
    context = ssl.create_default_context(cafile=str(fleet.members / "ca.crt"))
    context.load_cert_chain(*files)
    for key, status in ((new_key(), 403), (identity.private_key, 200)):
        body = json.dumps({"request": base64_of(signing_request(key))}).encode()
        connection = http.client.HTTPSConnection("127.0.0.1", fleet.port, context=context, timeout=20)
        with contextlib.closing(connection):
            connection.request("POST", RENEW_PATH, body)
            assert connection.getresponse().status == status


def test_nobody_else_renews(fleet: EnrolmentFleet, tmp_path: Path) -> None:
    """Revoked, expired, foreign, of a program of the operator's, unknown, and none at all."""
    authority = load_authorities(fleet.members, now=datetime.now(UTC)).issuing
    revoked = entered(fleet).identity
    assert fleet.run("devices", "revoke", revoked.device_id).returncode == 0
    with pytest.raises(UsageError, match="no member any more"):
        renewed(fleet, revoked, tmp_path)
    unknown = certified(authority)
    with pytest.raises(UsageError, match="no device's of this fleet"):
        renewed(fleet, unknown, tmp_path)
    member = entered(fleet).identity
    same_name = certified(authority, device_id=member.device_id)
    with pytest.raises(UsageError, match="no device's of this fleet"):
        renewed(fleet, same_name, tmp_path)
    foreign = certified(new_authority(tmp_path / "foreign"), device_id=member.device_id)
    expired = certified(authority, device_id=member.device_id, days=0.01, issued_ago=timedelta(minutes=30))
    for refused in (foreign, expired):
        with pytest.raises((BrokerError, ConfigurationError)):
            renewed(fleet, refused, tmp_path)
    assert status_of(fleet, "/v1/renew", {"request": base64_of(signing_request(new_key()))}) == 401
    assert status_of(fleet, "/v1/confirm", {}) == 401
    for nobody in (revoked, unknown, same_name):
        with pytest.raises(UsageError, match=r"no member any more|no device's of this fleet"):
            confirm(
                fleet.url,
                fleet.members / "ca.crt",
                *written(tmp_path, "device", nobody.certificate, nobody.private_key),
            )
    other_key = Identity(member.device_id, member.certificate, new_key())
    with pytest.raises(ConfigurationError, match="is not the key"):
        renewed(fleet, other_key, tmp_path)


def test_a_lost_board_is_replaced_once_and_its_place_is_one(fleet: EnrolmentFleet) -> None:
    lost = entered(fleet).identity
    results = [fleet.run("devices", "replace", lost.device_id[:8]) for _ in range(2)]
    assert [result.returncode for result in results] == [0, 0], "the first code may be lost, too"
    first, second = (Invitation.read(result.stdout.strip()) for result in results)
    heir = enrol(first, new_key()).identity
    with pytest.raises(UsageError, match="has been replaced by another already"):
        enrol(second, new_key())
    with fleet.devices() as devices:
        assert devices.lineage(heir.device_id) == (heir.device_id, lost.device_id)
        state = devices.find(lost.device_id)
        assert state is not None
        assert state.state is DeviceState.REPLACED
    again = fleet.run("devices", "replace", lost.device_id[:8])
    assert (again.returncode, "has been replaced already" in again.stderr) == (2, True)
    listed = x509.load_pem_x509_crl((fleet.members / "revoked.crl").read_bytes())
    assert listed.get_revoked_certificate_by_serial_number(lost.certificate.serial_number) is not None


def status_of(fleet: EnrolmentFleet, path: str, body: object) -> int:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    return int(said(fleet, head + data).split(b" ", 2)[1])


def said(fleet: EnrolmentFleet, data: bytes) -> bytes:
    """All that the endpoint answers until it closes the connection."""
    with fleet.connection() as connection:
        connection.sendall(data)
        answer = bytearray()
        while part := connection.recv(65_536):
            answer += part
        return bytes(answer)


def bad_requests() -> dict[str, bytes]:
    p384 = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([])
    other = x509.CertificateSigningRequestBuilder().subject_name(name).sign(p384, hashes.SHA256())
    der = serialization.Encoding.DER
    broken = bytearray(signing_request(new_key()))
    broken[-1] ^= 1
    return {
        "another curve": other.public_bytes(der), "a bad signature": bytes(broken), "rubbish": b"\x30\x82",
        "nothing": b"", "a certificate": new_key().public_key().public_bytes(
            der, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    }  # fmt: skip


@pytest.mark.parametrize("request_", bad_requests().values(), ids=bad_requests().keys())
def test_a_request_that_is_none_uses_no_code_up(fleet: EnrolmentFleet, request_: bytes) -> None:
    (code,) = fleet.invite()
    invitation = Invitation.read(code)
    body = {"secret": base64_of(invitation.secret), "request": base64_of(request_)}
    assert status_of(fleet, ENROL_PATH, body) == 400
    enrol(invitation, new_key())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"\xff\xfe", 400), (b"[]", 400), ({"secret": 1, "request": 2}, 400),
        ({"secret": "AA==", "request": "AA==", "more": 1}, 400), ({"secret": "=AA", "request": "AA=="}, 400),
        (b"[" * 4_000, 400), (b"x" * 5_000, 413),
    ],
)  # fmt: skip
def test_rubbish_gets_a_status(fleet: EnrolmentFleet, body: object, status: int) -> None:
    assert status_of(fleet, ENROL_PATH, body) == status


def test_lists_in_lists_get_a_status_whatever_their_depth(fleet: EnrolmentFleet) -> None:
    """Some are read, and are too deep for the sentence about them."""
    for depth in range(sys.getrecursionlimit() - 60, sys.getrecursionlimit()):
        nested = b'{"secret": ' + b"[" * depth + b"]" * depth + b"}"
        assert status_of(fleet, ENROL_PATH, nested) == 400, depth


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n", b"\0" * 1_000, b"GET / HTTP/9.9\r\n\r\n", b"GET /../members/ca.key HTTP/1.0\r\n\r\n",
        b"GET /" + b"a" * 70_000, b"POST /v1/enrol HTTP/1.1\r\n\r\n",
        b"POST /v1/enrol HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/enrol HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"GET /v1/authority HTTP/1.1\r\n" + b"A: b\r\n" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_request_gets_no_key_and_ends_nothing(fleet: EnrolmentFleet, data: bytes) -> None:
    try:
        answer = said(fleet, data)
    except OSError:  # It was closed while more was to come.
        answer = b""
    assert b"PRIVATE KEY" not in answer
    assert not answer.startswith(b"HTTP/1.0 200")
    entered(fleet)


@pytest.mark.parametrize(("headers", "status"), [(1, 401), (22, 411)])
def test_no_more_of_a_request_is_read_than_one_takes(
    fleet: EnrolmentFleet, headers: int, status: int
) -> None:
    """The library would keep a hundred lines of 64 KiB for each connection. What comes too late is not there,
    as here the length."""
    body = json.dumps({"request": base64_of(signing_request(new_key()))}).encode()
    lines = [b"POST /v1/renew HTTP/1.1", *[b"X: " + b"x" * 600] * headers, b"Content-Length: %d" % len(body)]
    assert int(said(fleet, b"\r\n".join(lines) + b"\r\n\r\n" + body).split(b" ", 2)[1]) == status


def test_who_is_slow_or_silent_is_cut_and_keeps_nobody_out(fleet: EnrolmentFleet) -> None:
    """As many connections as one address may have, some without a handshake, some byte by byte."""
    silent = [socket.create_connection(("127.0.0.1", fleet.port), 20) for _ in range(MOST_CONNECTIONS // 4)]
    slow = [fleet.connection() for _ in range(MOST_CONNECTIONS // 8)]
    entered(fleet)  # beside them
    began = time.monotonic()
    ended: set[int] = set()
    while len(ended) < len(slow) and time.monotonic() < began + 40:
        for number, connection in enumerate(slow):
            try:
                connection.sendall(b"G")
            except OSError:
                ended.add(number)
        time.sleep(0.2)
    assert len(ended) == len(slow)
    for each in silent:
        each.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            assert each.recv(1) == b""
    for each in (*silent, *slow):
        each.close()
    entered(fleet)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_flood_of_connections_is_bounded(fleet: EnrolmentFleet) -> None:
    held = []
    try:
        assert fleet.endpoint is not None
        status = Path(f"/proc/{fleet.endpoint.process.pid}/status")
        for addresses in (1, 4):
            for number in range(MOST_CONNECTIONS * 2):
                source = f"127.0.0.{1 + number % addresses}", 0
                held.append(socket.create_connection(("127.0.0.1", fleet.port), 20, source))
            # So many are closed when all have been taken, with whatever bound.
            wait_until(lambda: sum(map(is_closed, held)) >= len(held) // 2, "the endpoint to take all")
            count = int(status.read_text().split("Threads:")[1].split()[0])
            assert count <= (MOST_CONNECTIONS // 2 if addresses == 1 else MOST_CONNECTIONS) + 4
    finally:
        for each in held:
            each.close()


def test_a_change_that_cannot_be_taken_up_leaves_an_endpoint_that_answers(tmp_path: Path) -> None:
    fleet = EnrolmentFleet(tmp_path, "mqtts://127.0.0.1:1").start()
    try:
        (fleet.members / "endpoint.pem").unlink()
        (fleet.members / "endpoint.pem" / "in the way").mkdir(parents=True)
        assert fleet.run("ca", "change").returncode == 0
        endpoint = fleet.endpoint
        assert endpoint is not None
        wait_until(lambda: "the authority has changed, and cannot be used" in endpoint.said(), "the endpoint")
        # What it issues is of the new one all the same.
        authorities = load_authorities(fleet.members, now=datetime.now(UTC))
        assert authorities.issuing.has_issued(entered(fleet).identity.certificate)
    finally:
        fleet.stop()
