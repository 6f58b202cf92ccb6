"""The fleet's keys, created at the first start (mode 0600).

They have their own directory, outside the job's state: boards identify the
coordinator by its key, and a new job must keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpagent.errors import StorageError
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.storage import disk_errors, read_secret
from dpagent.wording import counted


def load_signer(keys_dir: Path, fleet: str) -> Signer:
    """The signing key; agents identify the coordinator by its public part.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    return Signer(_read_key(keys_dir / "signing.key", new_signing_secret), fleet)


def load_opener(keys_dir: Path, fleet: str) -> Opener:
    """The sealing key; devices seal fragments to its public part.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    return Opener(_read_key(keys_dir / "sealing.key", new_sealing_secret), fleet)


def _read_key(file: Path, create: Callable[[], bytes]) -> bytes:
    with disk_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = read_secret(file, create)
    if len(key) != 32:
        raise StorageError(
            f"{file} is damaged: {counted(len(key), 'byte')}, expected 32. Restore it from a backup. "
            "Without a backup, remove it, and give the agents the new key from `dpagent coordinator key`."
        )
    return key
