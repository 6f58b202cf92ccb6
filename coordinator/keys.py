"""The fleet's keys, made at the first start and kept in the state directory (mode 0600)."""

from __future__ import annotations

from pathlib import Path

from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.storage import disk_errors, read_secret


def load_signer(state_dir: Path, fleet: str) -> Signer:
    """The key that agents know the coordinator by.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    with disk_errors(state_dir):
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Signer(read_secret(state_dir / "signing.key", new_signing_secret), fleet)


def load_opener(state_dir: Path, fleet: str) -> Opener:
    """The key that fragments are sealed to."""
    return Opener(read_secret(state_dir / "sealing.key", new_sealing_secret), fleet)
