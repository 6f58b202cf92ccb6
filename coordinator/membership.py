"""Who is a member, written where brokers read it.

In the broker's own directory (``broker_dir``), if ``broker-config --members`` set one up, and as a
revocation list (:attr:`~coordinator.settings.CoordinatorSettings.revocation_file`) for one that was set up
otherwise.
"""

from __future__ import annotations

import subprocess
from datetime import datetime
from typing import Final

from coordinator.authority import Authorities, pem_of
from coordinator.brokers.deployment import Membership
from coordinator.brokers.registry import BROKERS
from coordinator.brokers.running import send
from coordinator.brokers.writing import BrokerChoices, deployment_of, read_choices, write_members
from coordinator.devices import Devices
from coordinator.settings import CoordinatorSettings
from dpagent.errors import BrokerError
from dpagent.storage import write_atomically

_PROGRAM_S: Final = 60


def membership_of(authorities: Authorities, devices: Devices, now: datetime) -> Membership:
    """Who is a member at ``now``, as a broker is told.

    A member whose latest certificate is of an authority that the fleet has given up cannot connect any more.
    It has ended for a broker: a connection that it has open still would go on without that.
    """
    revoked = devices.revoked_certificates(now.timestamp())
    members = [device for device in devices.all() if device.is_member]
    locked_out = [device.id for device in members if not authorities.are_named_in(device.parsed)]
    return Membership(
        authorities=pem_of(authorities.trusted),
        revocations=authorities.revocation_lists(revoked, now=now),
        members=tuple(device.id for device in members if device.id not in locked_out),
        ended=(*devices.ended(), *locked_out),
    )


def write_ended(
    settings: CoordinatorSettings, authorities: Authorities, devices: Devices, now: datetime
) -> None:
    """Write all that brokers read, after a device or an authority has ended.

    Inside the transaction that ended it: of two commands, the later one's files are the later ones.

    Raises:
        ConfigurationError, StorageError: What is in ``broker_dir`` cannot be understood, read or written.
    """
    membership = membership_of(authorities, devices, now)
    write_atomically(settings.revocation_file, b"".join(membership.revocations))
    _write_for_broker(settings, membership)


def write_begun(
    settings: CoordinatorSettings, authorities: Authorities, devices: Devices, now: datetime
) -> bool:
    """Write what a broker reads that lists members, after a device has enrolled; return whether there is one.

    Inside the transaction that enrolled it. Another broker lets it in by its certificate.

    Raises:
        ConfigurationError, StorageError: As of :func:`write_ended`.
    """
    broker = _own_broker(settings)
    if broker is None or not BROKERS[broker.software].lists_members:
        return False
    _write_for_broker(settings, membership_of(authorities, devices, now))
    return True


def _own_broker(settings: CoordinatorSettings) -> BrokerChoices | None:
    """The broker that ``broker-config --members`` set up, if it did."""
    choices = read_choices(settings.broker_dir)
    return choices if choices is not None and choices.members else None


def _write_for_broker(settings: CoordinatorSettings, membership: Membership) -> None:
    if (broker := _own_broker(settings)) is not None:
        deployment = deployment_of(settings.fleet, settings.broker_dir.absolute(), broker, membership)
        write_members(broker, deployment)


def tell_broker(settings: CoordinatorSettings) -> str | None:
    """Have the broker read what was written: by the signal that it knows, if ``--run`` started it, and by
    ``enrolment.on_members_change``.

    Returns:
        What is left to the operator; None if nothing is.

    Raises:
        BrokerError: It could not be told, or the operator's program failed.
    """
    broker = _own_broker(settings)
    software = None if broker is None else BROKERS[broker.software]
    knows = software is not None and software.looks_itself
    if software is not None and software.reload_signal is not None:
        knows = send(settings.broker_dir, software.reload_signal)
    command = settings.enrolment.on_members_change
    if command:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PROGRAM_S)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            raise BrokerError(
                f"enrolment.on_members_change, `{' '.join(command)}`, failed: {said}. What the broker "
                "reads is written; have it read that."
            ) from error
        return None
    if knows:
        return None
    place = settings.revocation_file if broker is None else settings.broker_dir
    return f"Have the broker read {place} again (enrolment.on_members_change does that)."
