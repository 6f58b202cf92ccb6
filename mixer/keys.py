"""The mixer's key, created at the first start (mode 0600)."""

from __future__ import annotations

from pathlib import Path

from dpagent.errors import StorageError
from dpagent.protocol.mixing import OuterOpener
from dpagent.protocol.sealing import new_sealing_secret
from dpagent.storage import disk_errors, read_secret
from dpagent.wording import counted


def load_outer_opener(keys_dir: Path, fleet: str) -> OuterOpener:
    """The mixer's key; devices seal to its public part.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    with disk_errors(keys_dir):
        keys_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = keys_dir / "mixer.key"
    secret = read_secret(file, new_sealing_secret)
    if len(secret) != 32:
        raise StorageError(
            f"{file} is damaged: {counted(len(secret), 'byte')}, expected 32. Restore it from a backup. "
            "Without a backup, remove it, and give operator and owners the new key from `dpagent mixer key`."
        )
    return OuterOpener(secret, fleet)
