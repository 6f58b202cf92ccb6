"""The devices of a fleet, their certificates, and who of them is a member.

Beside the certificate authority (:mod:`coordinator.authority`) in the fleet's members directory, in a
database of its own, or in the coordinator's in PostgreSQL: the enrolment endpoint and the operator's
commands write it while the coordinator reads.

A device that was lost is *replaced* by another, which takes its place in every budget: what one of them was
granted counts for both (:meth:`Devices.lineage`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coordinator.database.interface import Row
from coordinator.database.opening import open_members
from coordinator.database.schema import Part
from coordinator.database.settings import StorePlace
from dpagent.errors import UsageError
from dpagent.protocol import device_signing
from dpagent.wording import counted

LEAST_PREFIX: Final = 4
"""Characters of an id by which a command may name a device."""


class DeviceState(StrEnum):
    """What a device is to its fleet."""

    ENROLLED = "enrolled"
    REVOKED = "revoked"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Device:
    """A device. Times are Unix times."""

    id: str
    """32 hexadecimal characters."""
    certificate: bytes
    """The latest one, in DER."""
    enrolled_at: float
    state: DeviceState
    replaces: str | None
    """The id of the device whose place it took."""
    note: str
    """The operator's, from the invitation."""
    revoked_at: float | None
    excluded_at: float | None
    """Since when it gets no tokens, though it is a member."""

    @property
    def is_member(self) -> bool:
        """Whether it may take part."""
        return self.state is DeviceState.ENROLLED

    def has_left_since(self, time_s: float) -> bool:
        """Whether it was a member at a time (Unix), and is none any more."""
        return self.revoked_at is not None and self.revoked_at >= time_s

    @property
    def parsed(self) -> x509.Certificate:
        """The latest certificate."""
        return x509.load_der_x509_certificate(self.certificate)

    @property
    def serial(self) -> int:
        """Of the latest certificate."""
        return self.parsed.serial_number

    @property
    def expires_at(self) -> float:
        """When the latest certificate ends."""
        return self.parsed.not_valid_after_utc.timestamp()

    def has_signed(self, signature: bytes, message: bytes) -> bool:
        """Whether the signature is the device's, by the key of its latest certificate."""
        return device_signing.is_signed(self.parsed, signature, message)


_COLUMNS: Final = "id, certificate, enrolled_at, state, replaces, note, revoked_at, excluded_at"


class Devices:
    """The table of devices. Several programs may have it open.

    Args:
        place: The fleet's members directory, which exists, or PostgreSQL.

    Raises:
        StorageError: The database cannot be used.
    """

    def __init__(self, place: StorePlace) -> None:
        self.database = open_members(place, Part.MEMBERS)

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def __enter__(self) -> Devices:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """What is read and written inside takes effect together, or not at all."""
        return self.database.transaction()

    def all(self) -> list[Device]:
        """Every device that ever enrolled, in that order."""
        with self.database.errors():
            rows = self.database.execute(f"SELECT {_COLUMNS} FROM devices ORDER BY enrolled_at, id")
            return [_device(row) for row in rows]

    def members(self) -> int:
        """How many devices may take part."""
        with self.database.errors():
            row = self.database.execute(
                "SELECT count(*) FROM devices WHERE state = ?", (DeviceState.ENROLLED,)
            ).fetchone()
        return int(row[0])

    def find(self, device_id: str) -> Device | None:
        """A device by its whole id."""
        with self.database.errors():
            row = self.database.execute(
                f"SELECT {_COLUMNS} FROM devices WHERE id = ?", (device_id,)
            ).fetchone()
        return None if row is None else _device(row)

    def named(self, text: str) -> Device:
        """The one device whose id begins with a text, for commands.

        Raises:
            UsageError: There is none, or there are several.
        """
        found = [device for device in self.all() if device.id.startswith(text.lower())]
        if len(text) >= LEAST_PREFIX and len(found) == 1:
            return found[0]
        if len(text) < LEAST_PREFIX:
            problem = f"expected at least {LEAST_PREFIX} characters"
        elif found:
            problem = f"the ids of {counted(len(found), 'device')} begin so"
        else:
            problem = "no id begins so"
        raise UsageError(f"{text!r} names no device: {problem}. See `dpagent coordinator devices list`.")

    def holder(self, certificate: x509.Certificate) -> Device | None:
        """The device that this very certificate was issued to, as its latest or an earlier one."""
        with self.database.errors():
            row = self.database.execute(
                "SELECT device FROM certificates WHERE fingerprint = ?", (_fingerprint(certificate),)
            ).fetchone()
        return None if row is None else self.find(row["device"])

    def with_key(self, key: bytes) -> Device | None:
        """The device that has a key, by its :func:`digest_of_key`."""
        with self.database.errors():
            row = self.database.execute("SELECT device FROM certificates WHERE key = ?", (key,)).fetchone()
        return None if row is None else self.find(row["device"])

    def lineage(self, device_id: str) -> tuple[str, ...]:
        """The device and, before it, those whose places it took: their budgets are one."""
        with self.database.errors():
            rows = self.database.execute(
                """WITH RECURSIVE line (id, replaces, depth) AS (
                    SELECT id, replaces, 0 FROM devices WHERE id = ?
                    UNION SELECT before.id, before.replaces, depth + 1
                    FROM line JOIN devices AS before ON before.id = line.replaces
                ) SELECT id FROM line ORDER BY depth""",
                (device_id,),
            )
            return tuple(row["id"] for row in rows)

    def successor(self, device_id: str) -> str | None:
        """The device that took its place, if one has."""
        with self.database.errors():
            row = self.database.execute("SELECT id FROM devices WHERE replaces = ?", (device_id,)).fetchone()
        return None if row is None else str(row["id"])

    def issued_since(self, device_id: str, since: float) -> int:
        """Certificates that a device was issued since a time."""
        with self.database.errors():
            row = self.database.execute(
                "SELECT count(*) FROM certificates WHERE device = ? AND issued_at >= ?", (device_id, since)
            ).fetchone()
        return int(row[0])

    def revoked_certificates(self, now: float) -> list[tuple[int, float]]:
        """Serial number and time of revocation of every certificate that must not be accepted, though it has
        not expired by ``now``."""
        with self.database.errors():
            rows = self.database.execute(
                "SELECT serial, revoked_at FROM certificates JOIN devices ON devices.id = device "
                "WHERE state <> ? AND expires_at > ? ORDER BY revoked_at, serial",
                (DeviceState.ENROLLED, now),
            )
            return [(int(row["serial"], 16), float(row["revoked_at"])) for row in rows]

    def unconfirmed(self, now: float) -> set[str]:
        """Members that may not have their latest certificate: they have not shown it to the enrolment
        endpoint, and another one that they have holds still.

        Args:
            now: Unix time.
        """
        with self.database.errors():
            rows = self.database.execute(
                "SELECT device, fingerprint, confirmed_at FROM certificates WHERE expires_at > ?", (now,)
            )
            holding: dict[str, dict[bytes, float | None]] = {}
            for row in rows:
                holding.setdefault(row["device"], {})[bytes(row["fingerprint"])] = row["confirmed_at"]
        return {
            device.id
            for device in self.all()
            if device.is_member
            and len(known := holding.get(device.id, {})) > 1
            and known.get(_fingerprint(device.parsed)) is None
        }

    def ended(self) -> tuple[str, ...]:
        """All that are no members any more, also past the end of their certificates: a connection that was
        open before it may last longer."""
        with self.database.errors():
            rows = self.database.execute(
                "SELECT id FROM devices WHERE state <> ? ORDER BY revoked_at, id", (DeviceState.ENROLLED,)
            )
            return tuple(str(row["id"]) for row in rows)

    def left_since(self, time_s: float) -> list[str]:
        """Those that were members at a time (Unix), and are none any more."""
        with self.database.errors():
            rows = self.database.execute(
                "SELECT id FROM devices WHERE revoked_at >= ? ORDER BY id", (time_s,)
            )
            return [str(row["id"]) for row in rows]

    # What changes the table is called in a transaction.

    def add(
        self, certificate: x509.Certificate, *, at: float, replaces: str | None = None, note: str = ""
    ) -> Device:
        """Enrol the device that a certificate is issued to.

        One whose place it takes is replaced from now on; was that one excluded, so is this.

        Raises:
            ValueError: The certificate is no device's, or the place has been taken.
        """
        device_id = device_signing.device_id_of(certificate)
        if device_id is None:
            raise ValueError("the certificate names no device")
        if replaces is not None and self.successor(replaces) is not None:
            raise ValueError(f"device {replaces} has been replaced already")
        self.database.execute(
            "INSERT INTO devices VALUES (?, ?, ?, ?, ?, ?, NULL, "
            "(SELECT excluded_at FROM devices WHERE id = ?))",
            (
                device_id,
                certificate.public_bytes(Encoding.DER),
                at,
                DeviceState.ENROLLED,
                replaces,
                note,
                replaces,
            ),
        )
        if replaces is not None:
            self._end(replaces, DeviceState.REPLACED, at)
        self._note(device_id, certificate, at)
        added = self.find(device_id)
        assert added is not None
        return added

    def renew(self, certificate: x509.Certificate, *, at: float) -> None:
        """Note the next certificate of a member. The one before holds until it expires.

        Raises:
            ValueError: The certificate is no member's.
        """
        device = self.find(device_signing.device_id_of(certificate) or "")
        if device is None or not device.is_member:
            raise ValueError("the certificate is no member's")
        self.database.execute(
            "UPDATE devices SET certificate = ? WHERE id = ?",
            (certificate.public_bytes(Encoding.DER), device.id),
        )
        self._note(device.id, certificate, at)

    def confirm(self, certificate: x509.Certificate, *, at: float) -> None:
        """Note that a device has shown a certificate that was issued to it."""
        self.database.execute(
            "UPDATE certificates SET confirmed_at = ? WHERE fingerprint = ? AND confirmed_at IS NULL",
            (at, _fingerprint(certificate)),
        )

    def revoke(self, device_id: str, *, at: float) -> None:
        """Let a device be no member any more, for good. One that is none stays as it is."""
        self._end(device_id, DeviceState.REVOKED, at)

    def exclude(self, device_ids: Sequence[str], *, at: float) -> None:
        """Let members have no tokens until they are included again; they stay members.

        Raises:
            UsageError: One is no member, or fewer than half of the members would be left, among whom a
                fragment could hide.
        """
        chosen = set(device_ids)
        members = [device for device in self.all() if device.is_member]
        if missing := chosen - {device.id for device in members}:
            raise UsageError(f"Device {min(missing)} is no member: it gets no tokens as it is.")
        left = sum(device.excluded_at is None and device.id not in chosen for device in members)
        if 2 * left < len(members):
            raise UsageError(
                f"Of {counted(len(members), 'member')} {left} would be left; expected at least half: a "
                f"fragment "
                "hides among those that have tokens of its round. Include others first."
            )
        for device_id in sorted(chosen):
            self.database.execute(
                "UPDATE devices SET excluded_at = coalesce(excluded_at, ?) WHERE id = ?", (at, device_id)
            )

    def hiding(self) -> tuple[int, int]:
        """How many members are not left out, among whom a fragment hides; and how many members there are."""
        members = [device for device in self.all() if device.is_member]
        return sum(device.excluded_at is None for device in members), len(members)

    def include(self, device_ids: Sequence[str]) -> None:
        """Let devices have tokens again."""
        for device_id in device_ids:
            self.database.execute("UPDATE devices SET excluded_at = NULL WHERE id = ?", (device_id,))

    def _end(self, device_id: str, state: DeviceState, at: float) -> None:
        self.database.execute(
            "UPDATE devices SET state = ?, revoked_at = coalesce(revoked_at, ?) WHERE id = ? AND state <> ?",
            (state, at, device_id, DeviceState.REPLACED),
        )

    def _note(self, device_id: str, certificate: x509.Certificate, at: float) -> None:
        ends = certificate.not_valid_after_utc.timestamp()
        self.database.execute(
            "INSERT INTO certificates (fingerprint, serial, key, device, issued_at, expires_at) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                _fingerprint(certificate),
                f"{certificate.serial_number:x}",
                digest_of_key(certificate.public_key()),
                device_id,
                at,
                ends,
            ),
        )


def digest_of_key(key: CertificatePublicKeyTypes) -> bytes:
    """SHA-256 of a public key (SubjectPublicKeyInfo in DER)."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def _fingerprint(certificate: x509.Certificate) -> bytes:
    return certificate.fingerprint(hashes.SHA256())


def _device(row: Row) -> Device:
    return Device(**{**row, "state": DeviceState(row["state"])})
