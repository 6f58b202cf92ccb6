"""Writes a broker's files, and passwords for those who log in by one; a second time it keeps them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.brokers.deployment import BrokerSoftware, Deployment, User
from dpagent.errors import UsageError
from dpagent.protocol.access import Role
from dpagent.storage import disk_errors, write_atomically

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_ROLES: Final = frozenset(Role)
USERS: Final = "users"
"""The folder with a file for each password, which goes to that user's machine."""


def users_of(directory: Path, *, boards: Sequence[str], mixed: bool) -> tuple[User, ...]:
    """The coordinator, the mixer if there is one, and boards, each with its password.

    Args:
        directory: of the broker; made, with its folder of passwords, if it is not there.
        boards: names.
        mixed: whether there is a mixer.

    Raises:
        UsageError: A board's name cannot be one, or occurs twice.
        StorageError: Something cannot be read or written.
    """
    roles = {"coordinator": Role.COORDINATOR} | ({"mixer": Role.MIXER} if mixed else {})
    for name in boards:
        if _NAME.fullmatch(name) is None or name in _ROLES:
            raise UsageError(
                f"`--board` {name!r} cannot be a user's name; expected 1 to 63 letters, digits, - or _, and "
                "no name of a role."
            )
        if name in roles:
            raise UsageError(f"`--board` {name} is given twice.")
        roles[name] = Role.BOARD
    with disk_errors(directory):
        (directory / USERS).mkdir(mode=0o700, parents=True, exist_ok=True)
    return tuple(User(name, role, _password(directory / USERS / name)) for name, role in roles.items())


def _password(file: Path) -> str:
    with disk_errors(file):
        if file.exists() and (known := file.read_text(encoding="utf-8").strip()):
            return known
    password = secrets.token_urlsafe(32)
    write_atomically(file, f"{password}\n".encode(), mode=0o600)
    return password


def write_files(software: BrokerSoftware, deployment: Deployment) -> list[Path]:
    """Write a broker's configuration, and make the directory of what it keeps; return the files.

    Raises:
        UsageError: The broker cannot do what is asked.
        StorageError: A file cannot be written.
    """
    written = []
    for name, file in software.files(deployment).items():
        write_atomically(deployment.directory / name, file.text.encode(), mode=file.mode)
        written.append(deployment.directory / name)
    with disk_errors(deployment.store):
        deployment.store.mkdir(mode=0o700, exist_ok=True)
    return written
