"""The directory of a broker (``broker_dir``): what was chosen, its files, and passwords, which stay.

What was chosen is in it too (``broker.json``), so that who is a member can be written anew without being told
again how the broker is set up.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from coordinator.brokers.deployment import Bridge, Deployment, Membership, TlsFiles, User, Written
from coordinator.brokers.registry import BROKERS
from coordinator.enrolment_settings import split_address
from dpagent.errors import ConfigurationError, UsageError
from dpagent.protocol.access import Role
from dpagent.schema.json_values import json_values
from dpagent.schema.problems import SchemaError
from dpagent.settings import FilePath, Settings
from dpagent.storage import disk_errors, write_atomically

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_ROLES: Final = frozenset(Role)
USERS: Final = "users"
"""The folder with a file for each password, which goes to that user's machine."""
_RECORD: Final = "broker.json"
_SESSION: Final = "bridge-session"
TLS_PORT: Final = 8883


class BrokerChoices(Settings):
    """What is chosen of a broker."""

    software: Literal["mosquitto", "rabbitmq", "nats", "emqx"]
    address: str
    """To listen at."""
    port: int
    certificate: FilePath | None = None
    """The broker's; None: without TLS."""
    key: FilePath | None = None
    members: bool = False
    """Whether boards are known by certificates of the fleet."""
    boards: tuple[str, ...] = ()
    """Names of those with a password."""
    mixer: bool = False
    worker: bool = False
    """Whether workers count beside the coordinator, as one user."""
    bridge: bool = False
    """Whether other brokers of the fleet have a bridge to this one, as one user."""
    bridge_to: str | None = None
    """``host:port`` of the broker at which the coordinators are, if that is another one."""
    bridge_certificate: FilePath | None = None
    """By which this one is known there."""
    bridge_key: FilePath | None = None


def deployment_of(
    fleet: str, directory: Path, choices: BrokerChoices, membership: Membership | None
) -> Deployment:
    """The broker that is chosen; passwords that are not there yet are made.

    Args:
        fleet: its name.
        directory: absolute, of the broker's files.
        choices: what is chosen.
        membership: who is known by a certificate, if ``choices.members``.

    Raises:
        UsageError: A board's name cannot be one, or occurs twice; or the address of another broker is none.
        StorageError: Something cannot be read or written.
    """
    tls = None
    if choices.certificate is not None and choices.key is not None:
        tls = TlsFiles(choices.certificate, choices.key)
    roles = {"coordinator": Role.COORDINATOR} | ({"mixer": Role.MIXER} if choices.mixer else {})
    roles |= {"worker": Role.WORKER} if choices.worker else {}
    roles |= {"bridge": Role.BRIDGE} if choices.bridge else {}
    for name in choices.boards:
        if _NAME.fullmatch(name) is None or name in _ROLES:
            raise UsageError(
                f"`--board` {name!r} cannot be a user's name; expected 1 to 63 letters, digits, - or _, and "
                "no name of a role."
            )
        if name in roles:
            raise UsageError(f"`--board` {name} is given twice.")
        roles[name] = Role.BOARD
    need_no_password = choices.members and BROKERS[choices.software].names_by_certificate
    users = tuple(
        User(name, role, None if need_no_password else _secret(directory / USERS / name))
        for name, role in roles.items()
    )
    return Deployment(
        fleet,
        directory,
        choices.address,
        choices.port,
        tls,
        users,
        choices.mixer,
        membership,
        _bridge(fleet, directory, choices),
    )


def _bridge(fleet: str, directory: Path, choices: BrokerChoices) -> Bridge | None:
    if choices.bridge_to is None or choices.bridge_certificate is None or choices.bridge_key is None:
        return None
    try:
        host, port = split_address(choices.bridge_to, TLS_PORT)
    except ValueError as error:
        raise UsageError(f"`--bridge-to` {choices.bridge_to!r}: {error}.") from error
    # Kept, since the other broker keeps what waits for it. Several brokers may show the same certificate.
    session = f"dpagent-bridge-{fleet}-{_secret(directory / _SESSION)}"
    return Bridge(host, port, choices.bridge_certificate, choices.bridge_key, session)


def _secret(file: Path) -> str:
    """What nobody guesses, made if it is not there yet."""
    with disk_errors(file):
        if file.exists() and (known := file.read_text(encoding="utf-8").strip()):
            return known
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = secrets.token_urlsafe(32)
    write_atomically(file, f"{secret}\n".encode(), mode=0o600)
    return secret


def write_broker(choices: BrokerChoices, deployment: Deployment) -> list[Path]:
    """Write a broker's configuration, what was chosen, and the directory of what it keeps; return the files.

    Raises:
        StorageError: A file cannot be written.
    """
    written = _write(deployment.directory, BROKERS[choices.software].files(deployment))
    with disk_errors(deployment.store):
        deployment.store.mkdir(mode=0o700, exist_ok=True)
    write_atomically(deployment.directory / _RECORD, json.dumps(json_values(choices), indent=2).encode())
    return written


def write_members(choices: BrokerChoices, deployment: Deployment) -> None:
    """Write anew what follows who is a member.

    Raises:
        StorageError: A file cannot be written.
    """
    _write(deployment.directory, BROKERS[choices.software].member_files(deployment))


def read_choices(directory: Path) -> BrokerChoices | None:
    """What was chosen of the broker in a directory, if there is one.

    Raises:
        ConfigurationError: It cannot be understood.
        StorageError: It cannot be read.
    """
    file = directory / _RECORD
    if not file.exists():
        return None
    with disk_errors(file):
        text = file.read_bytes()
    try:
        return BrokerChoices.from_json(text)
    except SchemaError as error:
        raise ConfigurationError(
            f"{file} is not what `dpagent coordinator broker-config` wrote. Run that command again."
        ) from error


def _write(directory: Path, files: Mapping[str, Written]) -> list[Path]:
    written = []
    for name, file in files.items():
        path = directory / name
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.text.encode(), mode=file.mode)
        written.append(path)
    return written
