"""``dpagent coordinator broker-config``: the configuration of a fleet's broker, and the broker itself."""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.configurations import FleetConfig, coordinator_settings
from dpagent.errors import BrokerError, UsageError

if TYPE_CHECKING:
    from coordinator.brokers.deployment import TlsFiles


def broker_config(
    software: Annotated[Literal["mosquitto", "rabbitmq", "nats", "emqx"], typer.Argument(help="The broker.")],
    config: FleetConfig = None,
    directory: Annotated[
        Path, typer.Option(help="Where its files go; those of before are replaced, passwords are kept.")
    ] = Path("broker"),
    address: Annotated[str, typer.Option(help="Address to listen at.")] = "0.0.0.0",
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Port to listen at.", show_default="8883 or 1883")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="The broker's certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="The private key of --certificate (PEM).")] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            help="Authority whose certificates boards, coordinator and mixer have to show (PEM). Then boards "
            "need no --board."
        ),
    ] = None,
    revoked: Annotated[
        Path | None, typer.Option(help="Certificates that --authority has revoked (PEM; mosquitto).")
    ] = None,
    board: Annotated[
        list[str] | None, typer.Option(help="Name of a board, which gets a password; once for each.")
    ] = None,
    mixer: Annotated[bool, typer.Option("--mixer", help="The fleet has a mixer.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Without TLS, on a loopback address alone.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Start the broker on these files, until SIGTERM.")
    ] = False,
) -> None:
    """Write a broker's configuration for this fleet: TLS, access rules for each role, limits, persistence.

    A board may publish fragments, and read plan, model, assets and receipts; nobody may do more than its role
    needs. What holds on which broker: docs/brokers.md.
    """
    from coordinator.brokers.deployment import Deployment
    from coordinator.brokers.registry import BROKERS
    from coordinator.brokers.writing import USERS, users_of, write_files

    chosen, boards = BROKERS[software], board or []
    if plain and (given := _given(certificate=certificate, key=key, authority=authority, revoked=revoked)):
        raise UsageError(f"`--plain` and `--{given}` do not go together: certificates are TLS's.")
    tls = None if plain else _tls(certificate, key, authority, revoked)
    if plain and not _is_loopback(address):
        raise UsageError(
            f"`--plain` at {address}: passwords would cross the network as they are. Give --address "
            "127.0.0.1, or --certificate and --key."
        )
    if not boards and authority is None:
        raise UsageError("No board can connect: give --board once for each, or --authority.")
    if boards and authority is not None:
        raise UsageError(
            "`--board` and `--authority` do not go together: certificates take passwords' place."
        )
    program = chosen.find()
    if run and program is None:
        raise BrokerError(f"{software} is not installed: {chosen.package}.")
    fleet = coordinator_settings(config).fleet
    directory = directory.absolute()
    deployment = Deployment(
        fleet, directory, address, port or (1883 if plain else 8883), tls,
        users_of(directory, boards=boards, mixed=mixer), mixer,
    )  # fmt: skip
    for file in write_files(chosen, deployment):
        typer.echo(f"Wrote {file}.")
    for user in deployment.users:
        typer.echo(
            f"{user.role}: mqtt.username {user.name}, mqtt.password_file {directory / USERS / user.name}"
        )
    for remark in chosen.remarks(deployment):
        typer.echo(remark)
    if run and program is not None:
        command = chosen.command(program, deployment)
        typer.echo(f"Starting {software} at {address}:{deployment.port}.")
        os.execve(command.arguments[0], list(command.arguments), os.environ | dict(command.environment))


def _given(**options: Path | None) -> str | None:
    return next((name for name, value in options.items() if value is not None), None)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _tls(
    certificate: Path | None, key: Path | None, authority: Path | None, revoked: Path | None
) -> TlsFiles:
    """The files of TLS, each of which is there.

    Raises:
        UsageError: One is missing.
    """
    from coordinator.brokers.deployment import TlsFiles

    if certificate is None or key is None:
        raise UsageError("Give the broker's --certificate and --key, or --plain on loopback.")
    if revoked is not None and authority is None:
        raise UsageError("`--revoked` needs the --authority that has revoked them.")
    for name, file in (
        ("certificate", certificate), ("key", key), ("authority", authority), ("revoked", revoked),
    ):  # fmt: skip
        if file is not None and not file.is_file():
            raise UsageError(f"`--{name}` {file} is not a file; expected one in PEM.")
    absolute = [None if each is None else each.absolute() for each in (authority, revoked)]
    return TlsFiles(certificate.absolute(), key.absolute(), *absolute)
