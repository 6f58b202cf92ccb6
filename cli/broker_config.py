"""``dpagent coordinator broker-config``: the configuration of a fleet's broker, and the broker itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.configurations import coordinator_settings
from cli.options.daemons import FleetConfig
from dpagent.errors import BrokerError, UsageError

if TYPE_CHECKING:
    from coordinator.brokers.deployment import Membership
    from coordinator.settings import CoordinatorSettings


def broker_config(
    software: Annotated[Literal["mosquitto", "rabbitmq", "nats", "emqx"], typer.Argument(help="The broker.")],
    config: FleetConfig = None,
    address: Annotated[str, typer.Option(help="Address to listen at.")] = "0.0.0.0",
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Port to listen at.", show_default="8883 or 1883")
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(help="The broker's certificate (PEM).", show_default="broker.crt in broker_dir"),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="The private key of --certificate (PEM).", show_default="broker.key in broker_dir"),
    ] = None,
    members: Annotated[
        bool,
        typer.Option(
            "--members",
            help="Boards, coordinator and mixer have to show certificates of the fleet's authority; boards "
            "need no --board.",
        ),
    ] = False,
    board: Annotated[
        list[str] | None, typer.Option(help="Name of a board, which gets a password; once for each.")
    ] = None,
    mixer: Annotated[bool, typer.Option("--mixer", help="The fleet has a mixer.")] = False,
    worker: Annotated[
        bool,
        typer.Option(
            "--worker", help="Workers count beside the coordinator (mosquitto, emqx; docs/scale.md)."
        ),
    ] = False,
    bridge: Annotated[
        bool,
        typer.Option(
            "--bridge",
            help="Other brokers of the fleet have a bridge to this one (mosquitto; docs/scale.md).",
        ),
    ] = False,
    bridge_to: Annotated[
        str | None,
        typer.Option(
            "--bridge-to",
            metavar="HOST[:PORT]",
            help="Have a bridge to the broker of the coordinators; its certificate is bridge.crt in "
            "members_dir.",
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without TLS, on a loopback address alone.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Start the broker on these files, until SIGTERM.")
    ] = False,
) -> None:
    """Write a broker's configuration for this fleet: TLS, access rules for each role, limits, persistence.

    Its files go to broker_dir of fleet.yaml; those of before are replaced, passwords are kept. A board may
    publish fragments, and read plan, model, assets and receipts; nobody may do more than its role needs. With
    --members the files follow who is a member, and a broker that --run started reads them. What holds on
    which broker: docs/brokers.md.
    """
    from coordinator.brokers.registry import BROKERS
    from coordinator.brokers.running import claim, note_start
    from coordinator.brokers.writing import TLS_PORT, USERS, BrokerChoices, deployment_of, write_broker

    chosen, boards = BROKERS[software], board or []
    settings = coordinator_settings(config)
    directory = settings.broker_dir.absolute()
    if plain and (given := [name for name, value in _of_tls(certificate, key, members) if value]):
        raise UsageError(f"`--plain` and `--{given[0]}` do not go together: certificates are TLS's.")
    if plain and not _is_loopback(address):
        raise UsageError(
            f"`--plain` at {address}: passwords would cross the network as they are. Give --address "
            "127.0.0.1, or --certificate and --key."
        )
    if not boards and not members:
        raise UsageError("No board can connect: give --board once for each, or --members.")
    if boards and members:
        raise UsageError("`--board` and `--members` do not go together: certificates take passwords' place.")
    if (bridge or bridge_to is not None) and not members:
        raise UsageError(
            "`--bridge` and `--bridge-to` go with --members: a bridge is known by its certificate."
        )
    if bridge and bridge_to is not None:
        raise UsageError(
            "`--bridge` and `--bridge-to` do not go together: the coordinators are at one broker."
        )
    files = (None, None) if plain else _tls(directory, certificate, key)
    carrier = (None, None) if bridge_to is None else _of_bridge(settings.members_dir)
    program = chosen.find()
    if run and program is None:
        raise BrokerError(f"{software} is not installed: {chosen.package}.")
    choices = BrokerChoices(
        software=software, address=address, port=port or (1883 if plain else TLS_PORT), certificate=files[0],
        key=files[1], members=members, boards=tuple(boards), mixer=mixer,
        worker=worker, bridge=bridge, bridge_to=bridge_to,
        bridge_certificate=carrier[0], bridge_key=carrier[1],
    )  # fmt: skip
    if run and chosen.reload_signal is not None:
        # A broker that is told before it listens for that would end.
        signal.signal(chosen.reload_signal, signal.SIG_IGN)
        claim(directory)  # First: the files are those of the one that runs.
    with _membership(settings) if members else nullcontext() as membership:
        deployment = deployment_of(settings.fleet, directory, choices, membership)
        written = write_broker(choices, deployment)
    for file in written:
        typer.echo(f"Wrote {file}.")
    for user in deployment.users:
        if user.password is not None:
            typer.echo(
                f"{user.role}: mqtt.username {user.name}, mqtt.password_file {directory / USERS / user.name}"
            )
    for remark in chosen.remarks(deployment):
        typer.echo(remark)
    if run and program is not None:
        command = chosen.command(program, deployment)
        if chosen.reload_signal is not None:
            note_start(directory)
        typer.echo(f"Starting {software} at {address}:{choices.port}.")
        os.execve(command.arguments[0], list(command.arguments), os.environ | dict(command.environment))


@contextmanager
def _membership(settings: CoordinatorSettings) -> Iterator[Membership]:
    """Who is a member, which nobody changes before it is written: who enrols next finds the broker there."""
    from datetime import UTC, datetime

    from coordinator.authority import load_authorities
    from coordinator.devices import Devices
    from coordinator.membership import membership_of

    now = datetime.now(UTC)
    authorities = load_authorities(settings.members_dir, now=now)
    with Devices(settings.members_place) as devices, devices.transaction():
        yield membership_of(authorities, devices, now)


def _of_tls(certificate: Path | None, key: Path | None, members: bool) -> list[tuple[str, object]]:
    return [("certificate", certificate), ("key", key), ("members", members)]


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _tls(directory: Path, certificate: Path | None, key: Path | None) -> tuple[Path, Path]:
    """The files of TLS, each of which is there.

    Raises:
        UsageError: One is missing.
    """
    found = {"certificate": certificate or directory / "broker.crt", "key": key or directory / "broker.key"}
    for name, file in found.items():
        if not file.is_file():
            raise UsageError(
                f"`--{name}` {file} is not a file; expected one in PEM. `dpagent coordinator ca server "
                f"HOST --out "
                f"{directory}` makes both, or give --plain on loopback."
            )
    return found["certificate"].absolute(), found["key"].absolute()


def _of_bridge(members_dir: Path) -> tuple[Path, Path]:
    """Certificate and key by which the broker of the coordinators knows this one.

    Raises:
        UsageError: One is missing.
    """
    found = members_dir / "bridge.crt", members_dir / "bridge.key"
    for file in found:
        if not file.is_file():
            raise UsageError(
                f"`--bridge-to`: {file} is not a file; `dpagent coordinator ca client bridge` makes it."
            )
    return found[0].absolute(), found[1].absolute()
