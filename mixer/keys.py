"""The mixer's key, created at the first start (mode 0600)."""

from __future__ import annotations

from pathlib import Path

from dpagent.keys import read_key
from dpagent.protocol.mixing import OuterOpener
from dpagent.protocol.sealing import new_sealing_secret


def load_outer_opener(keys_dir: Path, fleet: str) -> OuterOpener:
    """The mixer's key; devices seal to its public part.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    remedy = "give operator and owners the new key from `dpagent mixer key`"
    return OuterOpener(read_key(keys_dir / "mixer.key", new_sealing_secret, remedy=remedy), fleet)
