"""``dpagent coordinator ca …``: the fleet's certificate authority."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands import Commands
from cli.configurations import coordinator_settings
from cli.options.daemons import FleetConfig
from dpagent.errors import ConfigurationError, UsageError
from dpagent.wording import counted

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    from coordinator.authority import Authorities, Authority
    from coordinator.devices import Device, Devices
    from coordinator.settings import CoordinatorSettings

app = Commands(help="The fleet's certificate authority.", no_args_is_help=True)

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Directory for certificate and key.", show_default="members_dir of fleet.yaml"
    ),
]
DaysOption = Annotated[float, typer.Option("--days", min=0.01, max=7300, help="Life of the certificate.")]


@app.command()
def init(
    config: FleetConfig = None,
    certificate: Annotated[
        Path | None,
        typer.Option(help="Your own authority's certificate, and those above it up to the root (PEM)."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Its private key (PEM, without a passphrase); it is copied.")
    ] = None,
) -> None:
    """Make the fleet's certificate authority, or take your own.

    Its key issues every board's certificate: `members_dir` belongs on the coordinator's machine, and into its
    backup, and nowhere else. Boards and broker get ca.crt alone.
    """
    from coordinator.authority import Authorities, AuthorityFiles, adopt_authority, create_authority
    from coordinator.devices import Devices
    from coordinator.membership import write_ended

    given = _given(certificate, key)
    settings, now = coordinator_settings(config), datetime.now(UTC)
    if given is not None:
        authority = adopt_authority(settings.members_dir, *given, now=now)
    else:
        authority = create_authority(settings.members_dir, settings.fleet, now=now)
    with Devices(settings.members_place) as devices, devices.transaction():
        write_ended(settings, Authorities(authority), devices, now)
    _show(authority)
    typer.echo(f"What boards and broker trust: {AuthorityFiles(settings.members_dir).certificate}")
    typer.echo("Next: dpagent coordinator ca server BROKER, and dpagent coordinator ca client coordinator")


@app.command()
def show(config: FleetConfig = None) -> None:
    """Show the authority, and during a change how far it has come."""
    from coordinator.devices import Devices

    settings = coordinator_settings(config)
    authorities = _authorities(settings)
    _show(authorities.issuing)
    if (retiring := authorities.retiring) is not None:
        typer.echo("It takes the place of:")
        _show(retiring)
        with Devices(settings.members_place) as devices:
            left = left_behind(authorities, devices)
            members = [device for device in devices.all() if device.is_member]
        expired = [device for device in members if device.expires_at <= time.time()]
        have = len({each.id for each in members} - {each.id for each in (*left, *expired)})
        typer.echo(f"{have} of {counted(len(members), 'member')} have certificates of the new one.")
        if expired:
            typer.echo(
                f"The certificates of {counted(len(expired), 'member')} have expired: `devices replace` "
                f"makes codes for {', '.join(each.id[:8] for each in expired[:8])}"
                f"{', …' if len(expired) > 8 else ''}."
            )
        unknown = len(left) - len(without_new(authorities, left))
        if unknown:
            typer.echo(
                f"{unknown} more {'was' if unknown == 1 else 'were'} sent one, and the endpoint has not "
                "seen it yet: a board shows it as soon as it has it."
            )


@app.command()
def change(
    config: FleetConfig = None,
    certificate: Annotated[
        Path | None, typer.Option(help="As of `ca init`: your own authority, the next one.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM, without a passphrase).")] = None,
) -> None:
    """Begin to change the authority: another one issues from now on, and the one so far retires.

    Broker and endpoint let in certificates of both. Boards get certificates of the new one, and learn to
    trust it, when they renew theirs or enrol; `ca show` counts them. Then make the certificates of the broker
    and of your programs (coordinator, mixer, workers) anew, and end the change with `ca retire`. An authority
    whose key others have is not changed: begin anew, with another members_dir.
    """
    from coordinator.authority import begin_change
    from coordinator.devices import Devices
    from coordinator.membership import tell_broker, write_ended

    given = _given(certificate, key)
    settings, now = coordinator_settings(config), datetime.now(UTC)
    with Devices(settings.members_place) as devices, devices.transaction():
        authorities = begin_change(settings.members_dir, settings.fleet, given, now=now)
        write_ended(settings, authorities, devices, now)
    _show(authorities.issuing)
    typer.echo("Boards get its certificates as they renew theirs; see `dpagent coordinator ca show`.")
    if (left := tell_broker(settings)) is not None:
        typer.echo(left, err=True)


@app.command()
def retire(
    config: FleetConfig = None,
    lock_out: Annotated[
        bool,
        typer.Option(
            "--lock-out", help="Also where members still have certificates of the one that retires."
        ),
    ] = False,
) -> None:
    """End a change of the authority: what the one before has issued is accepted no more, and its key deleted.

    Who still has one of its certificates is a member and cannot connect: `devices replace` makes a code for
    it. Codes that were made during the change can be used no more.
    """
    from coordinator.authority import end_change
    from coordinator.devices import Devices
    from coordinator.membership import tell_broker, write_ended

    settings, now = coordinator_settings(config), datetime.now(UTC)
    with Devices(settings.members_place) as devices, devices.transaction():
        authorities = _authorities(settings)
        left = left_behind(authorities, devices)
        if left and not lock_out:
            raise UsageError(
                f"{counted(len(left), 'member')} would be locked out, whose certificates are of the "
                "authority that retires, or who have not shown the one that followed: "
                f"{', '.join(each.id[:8] for each in left[:8])}{', …' if len(left) > 8 else ''}. "
                "Wait until they have renewed them, or give --lock-out."
            )
        _require_own(settings, authorities, is_broker_last=bool(left))
        write_ended(settings, end_change(settings.members_dir, now=now), devices, now)
    typer.echo("The authority before is none any more.")
    certain = {each.id for each in without_new(authorities, left)}
    for each in left:
        what = "Locked out" if each.id in certain else "Locked out, unless the last certificate sent has come"
        typer.echo(f"{what}: {each.id}. Its way back: dpagent coordinator devices replace {each.id[:8]}")
    if left:
        typer.echo(
            "Make the broker's certificate anew, and start it again: dpagent coordinator ca server BROKER. "
            "That ends the connections which they have open still."
        )
    if (text := tell_broker(settings)) is not None:
        typer.echo(text, err=True)


@app.command()
def server(
    names: Annotated[list[str], typer.Argument(help="Host names and addresses that boards call it by.")],
    config: FleetConfig = None,
    out: OutOption = None,
    days: DaysOption = 825,
) -> None:
    """Make a broker's certificate and key, which boards of this fleet trust.

    During a change of the authority it is of the one that retires, until all members trust the other.
    """
    from coordinator.devices import Devices

    settings = coordinator_settings(config)
    authorities = _authorities(settings)
    with Devices(settings.members_place) as devices:
        authority = authorities.anchor if left_behind(authorities, devices) else authorities.issuing
    _issue(
        authority, out or settings.members_dir, "broker",
        lambda key: authority.issue_server(key, names, days=days, now=datetime.now(UTC)),
    )  # fmt: skip


@app.command()
def client(
    name: Annotated[str, typer.Argument(help="The program's name at the broker, such as coordinator.")],
    config: FleetConfig = None,
    out: OutOption = None,
    days: DaysOption = 825,
) -> None:
    """Make the certificate and key of a program of yours, such as the coordinator or a mixer."""
    settings = coordinator_settings(config)
    authority = _authorities(settings).issuing
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise UsageError(f"the name {name!r} cannot be used; expected letters, digits, - and _.")
    cert_file, key_file = _issue(
        authority, out or settings.members_dir, name,
        lambda key: authority.issue_client(key, name, days=days, now=datetime.now(UTC)),
    )  # fmt: skip
    typer.echo(f"In its configuration: mqtt: {{cert_file: {cert_file}, key_file: {key_file}}}")


def left_behind(authorities: Authorities, devices: Devices) -> list[Device]:
    """The members that may have nothing but certificates of the authority that retires, of which one has not
    expired: those of which the latest is, and those that have not shown the endpoint a later one."""
    if authorities.retiring is None:
        return []
    now = time.time()
    unconfirmed = devices.unconfirmed(now)
    return [
        device
        for device in devices.all()
        if device.is_member
        and device.expires_at > now
        and (device.id in unconfirmed or not authorities.issuing.has_issued(device.parsed))
    ]


def without_new(authorities: Authorities, left: list[Device]) -> list[Device]:
    """Those of whom it is certain: the new authority has issued them nothing."""
    return [device for device in left if not authorities.issuing.has_issued(device.parsed)]


def _require_own(settings: CoordinatorSettings, authorities: Authorities, *, is_broker_last: bool) -> None:
    """Refuse to end a change that would leave a program of the operator's with a certificate that nobody
    accepts: the broker, the coordinator, or one whose certificate is in the members directory, such as a
    mixer or workers.

    Args:
        settings: of the fleet.
        authorities: before its end.
        is_broker_last: the broker's is made anew after it: while boards are left behind, `ca server` makes
            one that they accept.

    Raises:
        UsageError: One has such a certificate.
        ConfigurationError: A file holds no certificate.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    from coordinator.authority import AuthorityFiles
    from coordinator.brokers.writing import read_choices
    from dpagent.storage import disk_errors

    if (retiring := authorities.retiring) is None:
        return
    broker = read_choices(settings.broker_dir)
    named = {None if broker is None or is_broker_last else broker.certificate, settings.mqtt.cert_file}
    others = set(settings.members_dir.glob("*.crt")) - {AuthorityFiles(settings.members_dir).certificate}
    for file in sorted(each for each in named | others if each is not None):
        with disk_errors(file):
            data = file.read_bytes()
        try:
            certificate = x509.load_pem_x509_certificate(data)
        except ValueError as error:
            raise ConfigurationError(f"{file} holds no certificate; expected one in PEM.") from error
        if not retiring.has_issued(certificate) or certificate.not_valid_after_utc <= datetime.now(UTC):
            continue
        usages = [
            each.value for each in certificate.extensions if isinstance(each.value, x509.ExtendedKeyUsage)
        ]
        if file in named or any(ExtendedKeyUsageOID.CLIENT_AUTH in each for each in usages):
            raise UsageError(
                f"{file} is a certificate of the authority that retires. Remove it and its key, make them "
                "anew with the same command, and start the program that has them again; then end the change."
            )


def _authorities(settings: CoordinatorSettings) -> Authorities:
    from coordinator.authority import load_authorities

    return load_authorities(settings.members_dir, now=datetime.now(UTC))


def _given(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UsageError("Give both --certificate and --key, or neither for an authority of the fleet's own.")
    return certificate, key


def _show(authority: Authority) -> None:
    certificate = authority.certificate
    typer.echo(
        f"{certificate.subject.rfc4514_string()}, valid until {certificate.not_valid_after_utc:%Y-%m-%d}"
    )
    typer.echo(f"Fingerprint, as invitations have it: {authority.fingerprint.hex(':')}")


def _issue(
    authority: Authority,
    directory: Path,
    name: str,
    make: Callable[[ec.EllipticCurvePublicKey], x509.Certificate],
) -> tuple[Path, Path]:
    """Write a new key and what is issued for it; refuse to replace a key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from coordinator.authority import pem_of
    from dpagent.storage import disk_errors, write_atomically

    cert_file, key_file = directory / f"{name}.crt", directory / f"{name}.key"
    if key_file.exists():
        raise UsageError(f"{key_file} exists. Remove it to make another, or give another --out.")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = make(key.public_key())
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_atomically(cert_file, pem_of([certificate, *authority.chain[:-1]]))
    write_atomically(key_file, private, mode=0o600)
    typer.echo(f"{cert_file}: valid until {certificate.not_valid_after_utc:%Y-%m-%d}. Its key: {key_file}")
    return cert_file, key_file
