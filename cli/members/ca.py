"""``dpagent coordinator ca …``: the fleet's certificate authority."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands import Commands
from cli.configurations import FleetConfig, coordinator_settings
from dpagent.errors import UsageError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    from coordinator.authority import Authority
    from coordinator.devices import Devices
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
    from coordinator.authority import AuthorityFiles, adopt_authority, create_authority
    from coordinator.devices import Devices

    if (certificate is None) != (key is None):
        raise UsageError("Give both --certificate and --key, or neither for an authority of the fleet's own.")
    settings, now = coordinator_settings(config), datetime.now(UTC)
    if certificate is not None and key is not None:
        authority = adopt_authority(settings.members_dir, certificate, key, now=now)
    else:
        authority = create_authority(settings.members_dir, settings.fleet, now=now)
    with Devices(settings.members_place) as devices:
        write_revocations(settings, authority, devices, now)
    _show(authority)
    typer.echo(
        f"For the broker: {AuthorityFiles(settings.members_dir).certificate} (who may connect), "
        f"{settings.revocation_file} (who no longer)."
    )
    typer.echo("Next: dpagent coordinator ca server BROKER, and dpagent coordinator ca client coordinator")


@app.command()
def show(config: FleetConfig = None) -> None:
    """Show the authority."""
    _show(_authority(config)[0])


@app.command()
def server(
    names: Annotated[list[str], typer.Argument(help="Host names and addresses that boards call it by.")],
    config: FleetConfig = None,
    out: OutOption = None,
    days: DaysOption = 825,
) -> None:
    """Make a broker's certificate and key, which boards of this fleet trust."""
    authority, directory = _authority(config)
    _issue(
        authority, out or directory, "broker",
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
    authority, directory = _authority(config)
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise UsageError(f"the name {name!r} cannot be used; expected letters, digits, - and _.")
    cert_file, key_file = _issue(
        authority, out or directory, name,
        lambda key: authority.issue_client(key, name, days=days, now=datetime.now(UTC)),
    )  # fmt: skip
    typer.echo(f"In its configuration: mqtt: {{cert_file: {cert_file}, key_file: {key_file}}}")


def _authority(config: Path | None) -> tuple[Authority, Path]:
    from coordinator.authority import load_authority

    directory = coordinator_settings(config).members_dir
    return load_authority(directory, now=datetime.now(UTC)), directory


def write_revocations(
    settings: CoordinatorSettings, authority: Authority, devices: Devices, now: datetime
) -> None:
    """Write the revocation list for the broker, as the table has it."""
    from dpagent.storage import write_atomically

    revoked = devices.revoked_certificates(now.timestamp())
    write_atomically(settings.revocation_file, authority.revocation_list(revoked, now=now))


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
