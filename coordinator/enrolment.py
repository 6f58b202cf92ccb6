"""What the enrolment endpoint does with a request, apart from HTTP: enrol a board, renew its certificate, and
note that it has the new one.

Each request is one transaction of the members' database, and each is answered alike when it comes again: a
board whose answer was lost asks once more.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.authority import Authorities, load_authorities, pem_of
from coordinator.devices import Device, Devices, digest_of_key
from coordinator.invitations import Invitations
from coordinator.membership import tell_broker, write_begun
from coordinator.settings import CoordinatorSettings
from dpagent.errors import DpagentError
from dpagent.protocol.device_signing import new_device_id
from dpagent.protocol.enrolment import (
    BrokerAnswer,
    ConfirmAnswer,
    EnrolAnswer,
    EnrolRequest,
    RenewAnswer,
    RenewRequest,
    bytes_of,
)
from dpagent.storage import disk_errors
from dpagent.structured_log import Event, about

log = logging.getLogger(__name__)

DAY_S: Final = 86_400.0
MOST_RENEWALS: Final = 12
"""Certificates that one device is given a day: each is a row for as long as the device is known."""


class RefusedError(Exception):
    """A request that is refused; the text says why, to whoever asked.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, reason: str, status: HTTPStatus = HTTPStatus.FORBIDDEN) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Enrolment:
    """Answers requests. Used by several threads: each request has a connection to the database of its own.

    Attributes:
        settings: ``fleet.yaml``.
        authorities: the fleet's, as TLS has them. Whatever is issued or written is of those that are in the
            files by then, read in the transaction: a change is one, too.
        coordinator_key: what boards know the coordinator by.
        broker: what they are told of the broker.
    """

    settings: CoordinatorSettings
    authorities: Authorities
    coordinator_key: str
    broker: BrokerAnswer

    def enrol(self, asked: EnrolRequest) -> EnrolAnswer:
        """Let a board in that has an invitation.

        Raises:
            RefusedError: It may not.
        """
        secret, key = _bytes(asked.secret), _requested_key(asked.request)
        digest, at = digest_of_key(key), time.time()
        with Devices(self.settings.members_place) as devices, devices.transaction():
            invitations = Invitations(devices.database)
            invitation = invitations.find(secret)
            if invitation is None:
                raise RefusedError("No invitation has this code.")
            if (known := invitations.redeemed(invitation, digest)) is not None:
                device = devices.find(known)
                if device is None or not device.is_member:
                    raise RefusedError(f"Device {known} enrolled with this code, and is no member any more.")
                return self.anew()._answer(device)
            if at >= invitation.expires_at:
                raise RefusedError("The invitation has expired.")
            if invitation.used >= invitation.uses:
                raise RefusedError("The invitation has been used, by another board or another key.")
            if (holder := devices.with_key(digest)) is not None:
                raise RefusedError(
                    f"This key is that of device {holder.id} already. A board has a key of its own: the "
                    "identity directory of one board must not be copied to another."
                )
            if invitation.replaces is not None and devices.successor(invitation.replaces) is not None:
                raise RefusedError(f"Device {invitation.replaces} has been replaced by another already.")
            desk = self.anew()  # `ca change` may have come since the endpoint looked.
            certificate = desk._issued(key, new_device_id())
            device = devices.add(certificate, at=at, replaces=invitation.replaces, note=invitation.note)
            invitations.redeem(invitation, digest, device.id)
            lists_members = write_begun(self.settings, desk.authorities, devices, datetime.now(UTC))
        if lists_members:
            self._tell_broker()
        log.info(
            "device %s enrolled%s", device.id, f", in the place of {device.replaces}" * bool(device.replaces),
            extra=about(event=Event.DEVICE_ENROLLED, device=device.id),
        )  # fmt: skip
        return desk._answer(device)

    def renew(self, asked: RenewRequest, certificate: x509.Certificate | None) -> RenewAnswer:
        """Issue the next certificate of a member, for the key that it has.

        Args:
            asked: the request.
            certificate: by which TLS knows who asks, verified against this fleet's authority.

        Raises:
            RefusedError: It is no member's, or asked too often.
        """
        key, at = _requested_key(asked.request), time.time()
        with Devices(self.settings.members_place) as devices, devices.transaction():
            shown, device = _member(devices, certificate)
            if key != shown.public_key():
                raise RefusedError("A renewal is for the key of the certificate. A new key enrols anew.")
            if devices.issued_since(device.id, at - DAY_S) >= MOST_RENEWALS:
                raise RefusedError(
                    f"A device is given at most {MOST_RENEWALS} certificates a day.",
                    HTTPStatus.TOO_MANY_REQUESTS,
                )
            desk = self.anew()
            renewed = desk._issued(key, device.id)
            devices.renew(renewed, at=at)
        log.info(
            "device %s renewed its certificate", device.id,
            extra=about(event=Event.CERTIFICATE_RENEWED, device=device.id),
        )  # fmt: skip
        return RenewAnswer(
            certificate=pem_of(desk.authorities.chain_of(renewed)).decode(), authorities=desk._trusted
        )

    def confirm(self, certificate: x509.Certificate | None) -> ConfirmAnswer:
        """Note that a member has a certificate which was issued to it, since it shows that.

        Args:
            certificate: by which TLS knows who asks, verified against this fleet's authority.

        Raises:
            RefusedError: It is no member's.
        """
        with Devices(self.settings.members_place) as devices, devices.transaction():
            shown, _ = _member(devices, certificate)
            devices.confirm(shown, at=time.time())
        return ConfirmAnswer()

    def catch_up(self) -> None:
        """Have the broker know all members: a kill may have come between an enrolment and that.

        Raises:
            ConfigurationError, StorageError: What it reads cannot be written.
        """
        with Devices(self.settings.members_place) as devices, devices.transaction():
            lists_members = write_begun(self.settings, self.anew().authorities, devices, datetime.now(UTC))
        if lists_members:
            self._tell_broker()

    def anew(self) -> Enrolment:
        """The same, with the authorities as they are by now.

        Raises:
            ConfigurationError, StorageError: They cannot be read.
        """
        return replace(self, authorities=load_authorities(self.settings.members_dir, now=datetime.now(UTC)))

    @property
    def _trusted(self) -> str:
        return pem_of(self.authorities.trusted).decode()

    def _tell_broker(self) -> None:
        """Have the broker let in who has enrolled. That it could not be told ends no enrolment."""
        try:
            left = tell_broker(self.settings)
        except DpagentError as error:
            left = str(error)
        if left is not None:
            log.error("a device has enrolled, and the broker does not know it yet. %s", left)

    def _issued(self, key: ec.EllipticCurvePublicKey, device_id: str) -> x509.Certificate:
        days = self.settings.enrolment.certificate_days
        return self.authorities.issuing.issue_device(key, device_id, days=days, now=datetime.now(UTC))

    def _answer(self, device: Device) -> EnrolAnswer:
        return EnrolAnswer(
            device=device.id,
            certificate=pem_of(self.authorities.chain_of(device.parsed)).decode(),
            authorities=self._trusted,
            fleet=self.settings.fleet,
            coordinator_key=self.coordinator_key,
            broker=self.broker,
        )


def _member(devices: Devices, certificate: x509.Certificate | None) -> tuple[x509.Certificate, Device]:
    """The certificate that TLS has verified, and the member that it was issued to.

    Raises:
        RefusedError: There is none, or it is no member's.
    """
    if certificate is None:
        raise RefusedError("Only a board with a certificate can ask that.", HTTPStatus.UNAUTHORIZED)
    device = devices.holder(certificate)
    if device is None:
        raise RefusedError("This certificate is no device's of this fleet.")
    if not device.is_member:
        raise RefusedError(f"Device {device.id} is {device.state} and no member any more.")
    return certificate, device


def told_of_broker(settings: CoordinatorSettings) -> BrokerAnswer:
    """What boards are told of the broker.

    Raises:
        StorageError: The file of its authority cannot be read.
    """
    given, own = settings.enrolment.broker_authority, settings.mqtt
    authority = str(given)
    if isinstance(given, Path):
        with disk_errors(given):
            authority = given.read_bytes().decode("ascii", "replace")
    return BrokerAnswer(
        url=settings.enrolment.broker_url or own.url,
        authority=authority,
        protocol=own.protocol,
        keepalive_s=own.keepalive_s,
        topic_prefix=own.topic_prefix,
        client_id=settings.enrolment.client_id,
    )


def _bytes(text: str) -> bytes:
    try:
        return bytes_of(text)
    except ValueError as error:
        raise RefusedError("The request is malformed.", HTTPStatus.BAD_REQUEST) from error


def _requested_key(text: str) -> ec.EllipticCurvePublicKey:
    """The key of a request for a certificate, whose holder has signed it.

    Raises:
        RefusedError: It is none, or of another kind.
    """
    try:
        request = x509.load_der_x509_csr(_bytes(text))
        key, is_signed = request.public_key(), request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise RefusedError("The request for a certificate is malformed.", HTTPStatus.BAD_REQUEST) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError("The key is of another kind; expected P-256.", HTTPStatus.BAD_REQUEST)
    if not is_signed:
        raise RefusedError("The request is not signed by the key that it names.", HTTPStatus.BAD_REQUEST)
    return key
