"""``dpagent coordinator devices …``: who is a member, and who no longer."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands import Commands
from cli.configurations import coordinator_settings
from cli.members.invite import HoursOption, made_invitations
from cli.options.daemons import FleetConfig
from cli.tables import print_table
from dpagent.errors import UsageError
from dpagent.wording import counted

if TYPE_CHECKING:
    from coordinator.devices import Device, Devices
    from coordinator.settings import CoordinatorSettings

app = Commands(help="The devices of the fleet: who is a member.", no_args_is_help=True)

DeviceArgument = Annotated[str, typer.Argument(help="The device's id, or its first characters.")]
DevicesArgument = Annotated[list[str], typer.Argument(help="Ids, or their first characters.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
                    device.id, _standing(device), _day(device.enrolled_at), _day(device.expires_at),
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
    if found.excluded_at is not None:
        typer.echo(f"Left out of rounds since {_day(found.excluded_at)}.")
    if found.revoked_at is not None:
        typer.echo(f"Not a member since {_day(found.revoked_at)}.")
    for other in before:
        typer.echo(f"Took the place of {other}: their budgets are one.")
    if after is not None:
        typer.echo(f"Replaced by {after}.")


@app.command()
def revoke(device: DeviceArgument, config: FleetConfig = None) -> None:
    """Let a device be no member any more, for good: no certificate, and none at the broker.

    A broker that `broker-config --run` started obeys at once; for another, enrolment.on_members_change in
    fleet.yaml has it read its files. What the device has spent stays on record.
    """
    settings = coordinator_settings(config)
    with _opened(settings) as devices:
        found = devices.named(device)
        _revoke(settings, devices, found)
    typer.echo(f"Device {found.id} is no member any more.")
    _tell_broker(settings)


@app.command()
def exclude(device: DevicesArgument, config: FleetConfig = None) -> None:
    """Leave members out of rounds for now: they get no tokens, and stay members.

    By that the boards are found whose fragments harm: leave a group out, and see whether the harm ends
    (docs/decisions/2026-11-26-no-classes-of-tokens.md). At least half of the members stay in; what revokes
    or replaces others later says so where fewer are left.
    """
    settings = coordinator_settings(config)
    with _opened(settings) as devices, devices.transaction():
        found = [devices.named(each) for each in device]
        devices.exclude([each.id for each in found], at=time.time())
    typer.echo(
        f"{counted(len({each.id for each in found}), 'member')} left out. Tokens that they have stay "
        f"valid: those of "
        f"the open round, and of up to {settings.tokens.rounds_ahead} after it. In jobs without tokens "
        f"nobody is left out."
    )


@app.command()
def include(
    device: Annotated[
        list[str] | None, typer.Argument(help="Ids, or their first characters.", show_default="all of them")
    ] = None,
    config: FleetConfig = None,
) -> None:
    """Let members that were left out have tokens again."""
    with _opened(coordinator_settings(config)) as devices, devices.transaction():
        found = devices.all() if device is None else [devices.named(each) for each in device]
        left_out = [each.id for each in found if each.excluded_at is not None]
        devices.include(left_out)
    typer.echo(f"{counted(len(left_out), 'member')} let in again.")


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
    from coordinator.authority import load_authorities
    from coordinator.devices import Devices

    load_authorities(settings.members_dir, now=datetime.now(UTC))
    return Devices(settings.members_place)


def _revoke(settings: CoordinatorSettings, devices: Devices, device: Device) -> None:
    from coordinator.authority import load_authorities
    from coordinator.membership import write_ended

    now = datetime.now(UTC)
    authorities = load_authorities(settings.members_dir, now=now)
    with devices.transaction():
        devices.revoke(device.id, at=now.timestamp())
        write_ended(settings, authorities, devices, now)
        left, members = devices.hiding()
    if 2 * left < members:
        typer.echo(
            f"Of {counted(members, 'member')} {left} can have tokens now, among whom a fragment hides: fewer "
            "than half. Let others in: dpagent coordinator devices include",
            err=True,
        )


def _tell_broker(settings: CoordinatorSettings) -> None:
    """Have the broker read who is a member.

    Raises:
        BrokerError: It could not be told.
    """
    from coordinator.membership import tell_broker

    if (left := tell_broker(settings)) is not None:
        typer.echo(left, err=True)


def _values(device: Device) -> dict[str, Any]:
    return {
        "device": device.id, "state": device.state, "serial": f"{device.serial:x}", "note": device.note,
        "enrolled_at": device.enrolled_at, "certificate_ends": device.expires_at,
        "replaces": device.replaces, "revoked_at": device.revoked_at, "excluded_at": device.excluded_at,
    }  # fmt: skip


def _standing(device: Device) -> str:
    return "left out" if device.is_member and device.excluded_at is not None else device.state


def _day(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"
