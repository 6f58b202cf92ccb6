"""Who is a member: enrolment, renewal, revocation and replacement, in a table that several programs share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from members import certified, enrolled, new_authority

from coordinator.authority import Authority
from coordinator.database.settings import StorePlace
from coordinator.devices import Devices, DeviceState
from dpagent.errors import StorageError, UsageError


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return new_authority(tmp_path)


@pytest.fixture
def devices(place: StorePlace) -> Iterator[Devices]:
    with Devices(place) as devices:
        yield devices


def test_a_device_is_found_by_id_and_by_each_of_its_certificates(
    authority: Authority, devices: Devices, place: StorePlace
) -> None:
    identity, device = enrolled(authority, devices)
    assert device.is_member
    assert device.serial == identity.certificate.serial_number
    following = certified(authority, device_id=identity.device_id, days=60)
    with devices.transaction():
        devices.renew(following.certificate, at=time.time())
    with Devices(place) as again:  # as another program reads it
        known = again.find(identity.device_id)
        assert known is not None
        assert known.serial == following.certificate.serial_number
        assert known.expires_at == following.certificate.not_valid_after_utc.timestamp()
        for certificate in (identity.certificate, following.certificate):
            assert again.holder(certificate) == known
        assert again.issued_since(identity.device_id, 0) == 2


def test_a_renewal_counts_when_the_device_has_shown_the_new_certificate(
    authority: Authority, devices: Devices
) -> None:
    now = time.time()
    identity, _ = enrolled(authority, devices)
    assert devices.unconfirmed(now) == set(), "the first one: whoever lacks it has none"
    second, third = (certified(authority, device_id=identity.device_id, days=60) for _ in range(2))
    with devices.transaction():
        devices.renew(second.certificate, at=now)
    assert devices.unconfirmed(now) == {identity.device_id}
    with devices.transaction():
        devices.confirm(identity.certificate, at=now)
    assert devices.unconfirmed(now) == {identity.device_id}, "it has shown the one before"
    with devices.transaction():
        devices.confirm(second.certificate, at=now)
    assert devices.unconfirmed(now) == set()
    with devices.transaction():
        devices.renew(third.certificate, at=now)
    assert devices.unconfirmed(now) == {identity.device_id}
    assert devices.unconfirmed(identity.certificate.not_valid_after_utc.timestamp() + 1) == {
        identity.device_id
    }, "the second one holds still"
    assert devices.unconfirmed(third.certificate.not_valid_after_utc.timestamp() + 1) == set()
    with devices.transaction():
        devices.revoke(identity.device_id, at=now)
    assert devices.unconfirmed(now) == set(), "it is no member"


def test_a_certificate_that_was_not_issued_here_is_nobodys(
    authority: Authority, devices: Devices, tmp_path: Path
) -> None:
    identity, _ = enrolled(authority, devices)
    same_name = certified(new_authority(tmp_path / "other"), device_id=identity.device_id)
    unknown = certified(authority, device_id=identity.device_id)
    assert devices.holder(same_name.certificate) is None
    assert devices.holder(unknown.certificate) is None  # this authority's, and in no table


def test_who_has_ended_is_denied_past_the_end_of_its_certificate(
    authority: Authority, devices: Devices
) -> None:
    """A connection may have been open since before: brokers look at a certificate when it is shown."""
    expired = certified(authority, days=0.02, issued_ago=timedelta(minutes=40))
    with devices.transaction():
        devices.add(expired.certificate, at=time.time())
        devices.revoke(expired.device_id, at=time.time())
    assert devices.revoked_certificates(time.time()) == []
    assert devices.ended() == (expired.device_id,)


def test_a_signature_is_a_devices_own(authority: Authority, devices: Devices) -> None:
    (identity, device), (_, other) = enrolled(authority, devices), enrolled(authority, devices)
    signature = identity.sign(b"ask")
    assert len(signature) == 64
    assert device.has_signed(signature, b"ask")
    assert not device.has_signed(signature, b"asked")
    assert not other.has_signed(signature, b"ask")
    for bad in (b"", bytes(64), b"\xff" * 64, signature[:-1], signature + b"\0"):
        assert not device.has_signed(bad, b"ask")


def test_a_revoked_device_stays_out_and_all_its_certificates_are_listed(
    authority: Authority, devices: Devices
) -> None:
    identity, device = enrolled(authority, devices)
    other, _ = enrolled(authority, devices)
    following = certified(authority, device_id=device.id)
    with devices.transaction():
        devices.renew(following.certificate, at=time.time())
        devices.revoke(device.id, at=1_000.0)
        devices.revoke(device.id, at=2_000.0)
    revoked = devices.find(device.id)
    assert revoked is not None
    assert (revoked.state, revoked.revoked_at) == (DeviceState.REVOKED, 1_000.0)
    serials = {identity.certificate.serial_number, following.certificate.serial_number}
    assert {serial for serial, _ in devices.revoked_certificates(time.time())} == serials
    # Those that have expired need no list.
    assert devices.revoked_certificates(time.time() + 31 * 86_400) == []
    with pytest.raises(ValueError, match="no member's"), devices.transaction():
        devices.renew(certified(authority, device_id=device.id).certificate, at=time.time())
    still = devices.find(other.device_id)
    assert still is not None
    assert still.is_member


def test_a_replacement_takes_the_place_and_the_budget_once(authority: Authority, devices: Devices) -> None:
    _, first = enrolled(authority, devices)
    _, second = enrolled(authority, devices, replaces=first.id)
    _, third = enrolled(authority, devices, replaces=second.id)
    _, alone = enrolled(authority, devices)
    states = {device.id: device.state for device in devices.all()}
    assert states[first.id] == states[second.id] == DeviceState.REPLACED
    assert devices.lineage(third.id) == (third.id, second.id, first.id)
    assert devices.lineage(alone.id) == (alone.id,)
    assert devices.lineage("0" * 32) == ()
    assert devices.successor(first.id) == second.id
    # A second heir would share what one board may spend.
    with pytest.raises(ValueError, match="replaced already"):
        enrolled(authority, devices, replaces=first.id)
    assert len(devices.all()) == 4
    # The list keeps what was replaced, though it was never revoked by name.
    assert {serial for serial, _ in devices.revoked_certificates(time.time())} == {
        first.serial,
        second.serial,
    }


def test_what_replaces_nobody_is_not_enrolled(authority: Authority, devices: Devices) -> None:
    with pytest.raises(StorageError):
        enrolled(authority, devices, replaces="0" * 32)
    assert devices.all() == []


def test_a_command_names_a_device_by_the_beginning_of_its_id(authority: Authority, devices: Devices) -> None:
    _, device = enrolled(authority, devices)
    assert devices.named(device.id[:8].upper()) == device
    for text in (device.id[:3], "g" * 32, ""):
        with pytest.raises(UsageError, match="devices list"):
            devices.named(text)


def test_a_program_that_ends_in_the_middle_enrols_nobody(
    authority: Authority, devices: Devices, place: StorePlace
) -> None:
    identity = certified(authority)

    def is_ended() -> None:
        with devices.transaction():
            devices.add(identity.certificate, at=time.time())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        is_ended()
    with Devices(place) as again:
        assert again.all() == []
        assert again.holder(identity.certificate) is None
