"""Tokens by which the page knows who asks from elsewhere: one to look, one to give orders.

A token is 32 random bytes in a file of mode 0600 beside the fleet's keys; whoever has its text has its role.
It is compared by digest, so that the time tells nothing of it. A file that is replaced or removed ends the
sessions that were begun with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from enum import IntEnum
from pathlib import Path
from typing import Final

from dpagent.errors import ConfigurationError
from dpagent.keys import read_key
from dpagent.storage import disk_errors

_BYTES: Final = 32


class Role(IntEnum):
    """What somebody may do on the page."""

    VIEWER = 1
    """Look."""
    OPERATOR = 2
    """Look, and give orders."""

    @property
    def word(self) -> str:
        """In lower case, as in a file's name."""
        return self.name.lower()


def token_file(keys_dir: Path, role: Role) -> Path:
    """Where the token of a role is."""
    return keys_dir / f"page-{role.word}.token"


def make_token(keys_dir: Path, role: Role, *, renew: bool = False) -> str:
    """The token of a role, as its holders write it; made if there is none.

    Args:
        keys_dir: of the coordinator.
        role: that it gives.
        renew: whether another one takes its place.

    Raises:
        ConfigurationError: Other users may read it.
        StorageError: It cannot be read or written.
    """
    file = token_file(keys_dir, role)
    if renew:
        with disk_errors(file):
            file.unlink(missing_ok=True)
    remedy = f"make another with `dpagent coordinator page-token --role {role.word}`"
    return _text(read_key(file, lambda: os.urandom(_BYTES), remedy=remedy))


class Tokens:
    """The tokens of a coordinator, as their files are now.

    Args:
        keys_dir: of the coordinator.
    """

    def __init__(self, keys_dir: Path) -> None:
        self._keys_dir = keys_dir

    def any(self) -> bool:
        """Whether there is one."""
        return any(self.digest(role) is not None for role in Role)

    def digest(self, role: Role) -> bytes | None:
        """A digest of the token of a role; None if there is none.

        Raises:
            ConfigurationError: Other users may read it.
            StorageError: It cannot be read.
        """
        file = token_file(self._keys_dir, role)
        with disk_errors(file):
            try:
                with file.open("rb") as stream:
                    if os.fstat(stream.fileno()).st_mode & 0o077:
                        raise ConfigurationError(
                            f"{file} is a secret that other users may read. Run: chmod 600 {file}"
                        )
                    key = stream.read(_BYTES + 1)
            except FileNotFoundError:
                return None
        return _digest(_text(key)) if len(key) == _BYTES else None

    def role_of(self, text: str) -> Role | None:
        """The role that a text is the token of; None if it is none."""
        found, given = None, _digest(text.strip())
        for role in Role:
            known = self.digest(role)
            if known is not None and hmac.compare_digest(known, given):
                found = role
        return found


def _text(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).decode().rstrip("=")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
