"""``dpagent coordinator devices …``: who is a member, and who no longer."""

from __future__ import annotations

import json
import subprocess
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.commands import Commands
from cli.configurations import FleetConfig, coordinator_settings
from cli.members.ca import write_revocations
from cli.members.invite import HoursOption, made_invitations
from cli.tables import print_table
from dpagent.errors import BrokerError, UsageError
from dpagent.wording import counted

if TYPE_CHECKING:
    from coordinator.devices import Device, Devices
    from coordinator.settings import CoordinatorSettings

app = Commands(help="The devices of the fleet: who is a member.", no_args_is_help=True)

DeviceArgument = Annotated[str, typer.Argument(help="The device's id, or its first characters.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PROGRAM_S: Final = 60


@app.command("list")
def list_devices(config: FleetConfig = None, as_json: JsonOption = False) -> None:
    """List all devices that ever enrolled, and the invitations that are open."""
    from coordinator.invitations import Invitations

    settings = coordinator_settings(config)
    with _opened(settings) as devices, devices.database.errors():
        found, waiting = devices.all(), Invitations(devices.database).open(at=time.time())
    if as_json:
        invitations = [
            {"invitation": each.name, "expires_at": each.expires_at, "uses": each.uses, "used": each.used,
             "replaces": each.replaces, "note": each.note}
            for each in waiting
        ]  # fmt: skip
        values = {"devices": [_values(device) for device in found], "invitations": invitations}
        typer.echo(json.dumps(values, indent=2))
        return
    if found:
        print_table(
            ["device", "state", "enrolled", "certificate ends", "in the place of", "note"],
            [
                [
                    device.id, device.state, _day(device.enrolled_at), _day(device.expires_at),
                    (device.replaces or "")[:8], device.note,
                ]
                for device in found
            ],
        )  # fmt: skip
    members = sum(device.is_member for device in found)
    seats = sum(each.uses - each.used for each in waiting)
    typer.echo(f"{counted(members, 'member')}; open invitations for {counted(seats, 'board')}.")


@app.command()
def show(device: DeviceArgument, config: FleetConfig = None, as_json: JsonOption = False) -> None:
    """Show a device, and those whose place it took."""
    with _opened(coordinator_settings(config)) as devices:
        found = devices.named(device)
        before, after = devices.lineage(found.id)[1:], devices.successor(found.id)
    if as_json:
        typer.echo(json.dumps(_values(found) | {"lineage": before, "replaced_by": after}, indent=2))
        return
    typer.echo(f"Device {found.id}: {found.state}{f', {found.note}' if found.note else ''}")
    typer.echo(f"Enrolled {_day(found.enrolled_at)}; its certificate ends {_day(found.expires_at)}.")
    typer.echo(f"Serial number of the certificate: {found.serial:x}")
    if found.revoked_at is not None:
        typer.echo(f"Not a member since {_day(found.revoked_at)}.")
    for other in before:
        typer.echo(f"Took the place of {other}: their budgets are one.")
    if after is not None:
        typer.echo(f"Replaced by {after}.")


@app.command()
def revoke(device: DeviceArgument, config: FleetConfig = None) -> None:
    """Let a device be no member any more, for good: no certificate, and none at the broker.

    The broker obeys when it has read the revocation list again: enrolment.on_revocation in fleet.yaml does
    that. What the device has spent stays on record.
    """
    settings = coordinator_settings(config)
    with _opened(settings) as devices:
        found = devices.named(device)
        _revoke(settings, devices, found)
    typer.echo(f"Device {found.id} is no member any more.")
    _tell_broker(settings)


@app.command()
def replace(
    device: DeviceArgument,
    config: FleetConfig = None,
    hours: HoursOption = 24,
    note: Annotated[str, typer.Option(help="For `devices list`.")] = "",
) -> None:
    """Revoke a device that was lost, and print a code for the board that takes its place.

    To every budget the two are one: what the lost device was granted stays spent. For a board whose
    certificate has expired or whose key may be known, its own replacement: run `dpagent enrol` with the code
    there, and its ledger stays.
    """
    settings = coordinator_settings(config)
    with _opened(settings) as devices:
        found = devices.named(device)
        if (other := devices.successor(found.id)) is not None:
            raise UsageError(f"Device {found.id} has been replaced already, by {other}. Replace that one.")
        (invitation,) = made_invitations(settings, 1, hours=hours, replaces=found.id, note=note or found.note)
        _revoke(settings, devices, found)
    typer.echo(invitation.code())
    typer.echo(f"Device {found.id} is no member any more; the code above is for its successor.", err=True)
    _tell_broker(settings)


@app.command()
def withdraw(config: FleetConfig = None) -> None:
    """Let no code that is open be used any more, for when one has been lost or read by others.

    Devices that have enrolled stay members: `devices revoke` ends one that was not meant. Who still needs a
    code needs another, also of those from `devices replace`.
    """
    from coordinator.invitations import Invitations

    with _opened(coordinator_settings(config)) as devices, devices.transaction():
        number = Invitations(devices.database).withdraw(at=time.time())
    typer.echo(f"{counted(number, 'code')} can be used no more.")


def _opened(settings: CoordinatorSettings) -> Devices:
    """The table, where there is an authority."""
    from coordinator.authority import load_authority
    from coordinator.devices import Devices

    load_authority(settings.members_dir, now=datetime.now(UTC))
    return Devices(settings.members_place)


def _revoke(settings: CoordinatorSettings, devices: Devices, device: Device) -> None:
    from coordinator.authority import load_authority

    now = datetime.now(UTC)
    authority = load_authority(settings.members_dir, now=now)
    # The list is written under the table's lock: of two commands, the later one's list is the later one.
    with devices.transaction():
        devices.revoke(device.id, at=now.timestamp())
        write_revocations(settings, authority, devices, now)


def _tell_broker(settings: CoordinatorSettings) -> None:
    """Have the broker read the list.

    Raises:
        BrokerError: The operator's program for that failed.
    """
    command, file = settings.enrolment.on_revocation, settings.revocation_file
    if not command:
        typer.echo(f"Have the broker read {file} again (enrolment.on_revocation does that).", err=True)
        return
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PROGRAM_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise BrokerError(
            f"enrolment.on_revocation, `{' '.join(command)}`, failed: {said}. The device is revoked, and "
            f"{file} is written; have the broker read it."
        ) from error


def _values(device: Device) -> dict[str, Any]:
    return {
        "device": device.id, "state": device.state, "serial": f"{device.serial:x}", "note": device.note,
        "enrolled_at": device.enrolled_at, "certificate_ends": device.expires_at,
        "replaces": device.replaces, "revoked_at": device.revoked_at,
    }  # fmt: skip


def _day(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"
