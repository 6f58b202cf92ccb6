"""The fleet's keys, made at the first start (mode 0600).

They have a directory of their own, beside the job's state and not in it: boards know the
coordinator by its key, and a new job must not take it from them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpagent.errors import StorageError
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.storage import disk_errors, read_secret


def load_signer(keys_dir: Path, fleet: str) -> Signer:
    """The key that agents know the coordinator by.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    return Signer(_read_key(keys_dir / "signing.key", new_signing_secret), fleet)


def load_opener(keys_dir: Path, fleet: str) -> Opener:
    """The key that fragments are sealed to.

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
            f"{file} is damaged: {len(key)} bytes, expected 32. Restore it from a backup; if there is none, "
            "remove it, and give the agents the new key that `dpagent coordinator key` prints."
        )
    return key
