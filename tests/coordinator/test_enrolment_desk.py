"""The enrolment desk beside commands that change the authority: what it gives out is of the latest."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from enrolments import EnrolmentFleet
from members import written

from agent.identity import signing_request
from benchmarks.certificates import broker_certificate
from coordinator.authority import load_authorities
from coordinator.enrolment import Enrolment, told_of_broker
from coordinator.keys import load_signer
from dpagent.protocol.enrolment import EnrolAnswer, EnrolRequest, Invitation, RenewRequest, base64_of


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[EnrolmentFleet]:
    """With the files of a broker that lists the members, which the desk writes."""
    fleet = EnrolmentFleet(tmp_path, "mqtts://127.0.0.1:1")
    tls = broker_certificate(tmp_path / "tls")
    result = fleet.run(
        "broker-config", "nats", "--members", "--certificate", str(tls.certificate), "--key", str(tls.key)
    )
    assert result.returncode == 0, result.stderr
    yield fleet
    fleet.stop()


def names(pem: bytes) -> list[str]:
    return [each.subject.rfc4514_string() for each in x509.load_pem_x509_certificates(pem)]


def test_a_desk_that_does_not_know_of_a_change_yet_issues_and_writes_by_it(
    fleet: EnrolmentFleet, tmp_path: Path
) -> None:
    settings = fleet.settings
    first = load_authorities(settings.members_dir, now=datetime.now(UTC))
    # The endpoint looks several times a second; between two looks it has what it read before.
    desk = Enrolment(
        settings, first, load_signer(settings.keys_dir, settings.fleet).public_key, told_of_broker(settings)
    )
    at_broker = settings.broker_dir / "authorities.pem"

    def enrolled() -> EnrolAnswer:
        (code,) = fleet.invite()
        key = ec.generate_private_key(ec.SECP256R1())
        keys.append(key)
        secret = base64_of(Invitation.read(code).secret)
        return desk.enrol(EnrolRequest(secret=secret, request=base64_of(signing_request(key))))

    keys: list[ec.EllipticCurvePrivateKey] = []
    enrolled()
    assert fleet.run("ca", "change").returncode == 0
    both = names(fleet.members.joinpath("ca.crt").read_bytes())
    answer = enrolled()
    assert names(at_broker.read_bytes()) == names(answer.authorities.encode()) == both
    assert len(both) == 2
    certificate = x509.load_pem_x509_certificate(answer.certificate.encode())
    assert certificate.issuer.rfc4514_string() == both[0]

    for name in ("broker", "coordinator"):
        written(fleet.members, name, certificate, keys[-1])  # of the new one, so that nothing is in the way
    retired = fleet.run("ca", "retire", "--lock-out")
    assert retired.returncode == 0, retired.stderr
    request = RenewRequest(request=base64_of(signing_request(keys[-1])))
    renewed = desk.renew(request, certificate)
    answer = enrolled()
    for trusted in (at_broker.read_bytes(), answer.authorities.encode(), renewed.authorities.encode()):
        assert names(trusted) == both[:1]
