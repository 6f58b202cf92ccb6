"""A program's secret keys: 32 bytes in a file that only its user may read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dpagent.errors import ConfigurationError, StorageError
from dpagent.storage import disk_errors, write_atomically
from dpagent.wording import counted

_BYTES: Final = 32


def read_key(path: Path, create: Callable[[], bytes], *, remedy: str) -> bytes:
    """Return the key in ``path`` (mode 0600), created the first time, by one program of several that begin
    together.

    Args:
        path: its directory is created where it is missing.
        create: makes a key, 32 bytes.
        remedy: what to do without a backup of a damaged key, after "Without a backup, remove it, and".

    Raises:
        ConfigurationError: Other users may read the file.
        StorageError: It cannot be read or written, or is damaged.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            if not path.exists():
                write_atomically(path, create(), mode=0o600)
        finally:
            os.close(directory)
        if path.stat().st_mode & 0o077:
            raise ConfigurationError(f"{path} is a secret that other users may read. Run: chmod 600 {path}")
        key = path.read_bytes()
    if len(key) != _BYTES:
        raise StorageError(
            f"{path} is damaged: {counted(len(key), 'byte')}, expected {_BYTES}. Restore it from a backup. "
            f"Without a backup, remove it, and {remedy}."
        )
    return key
