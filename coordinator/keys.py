"""The fleet's keys, created at the first start (mode 0600).

They have their own directory, outside the job's state: boards identify the
coordinator by its key, and a new job must keep it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from dpagent.errors import NotReadyError
from dpagent.keys import read_key
from dpagent.protocol.issuing import AskOpener
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.storage import disk_errors

_REMEDY: Final = "give the agents the new key from `dpagent coordinator key`"


def load_signer(keys_dir: Path, fleet: str) -> Signer:
    """The signing key; agents identify the coordinator by its public part.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    return Signer(read_key(keys_dir / "signing.key", new_signing_secret, remedy=_REMEDY), fleet)


def find_signer(keys_dir: Path, fleet: str) -> Signer:
    """The signing key, for a command that signs in the coordinator's name and must not make one.

    Raises:
        NotReadyError: It is not there: the coordinator has begun on another machine, or never.
        StorageError, ConfigurationError: It cannot be read, or others can read it too.
    """
    with disk_errors(keys_dir):
        is_there = (keys_dir / "signing.key").exists()
    if not is_there:
        raise NotReadyError(
            f"keys_dir {keys_dir} has no signing.key, so nothing can be signed in the coordinator's name. "
            "Run this on a machine that has the fleet's keys."
        )
    return load_signer(keys_dir, fleet)


def client_id(keys_dir: Path, fleet: str) -> str:
    """By what the broker knows the coordinator's session, the same after each restart.

    Brokers let any user take a session over whose id it gives: a board that knew this one could keep the
    coordinator offline, and empty its queue. So it follows from the signing key, one way.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    secret = read_key(keys_dir / "signing.key", new_signing_secret, remedy=_REMEDY)
    name = hashlib.blake2b(secret, digest_size=8, person=b"mqtt client id").hexdigest()
    return f"dpagent-coordinator-{fleet}-{name}"


def load_opener(keys_dir: Path, fleet: str) -> Opener:
    """The sealing key; devices seal fragments to its public part.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    return Opener(sealing_secret(keys_dir), fleet)


def find_opener(keys_dir: Path, fleet: str) -> Opener | None:
    """The sealing key if it is there, for a program that must not make one.

    Raises:
        StorageError, ConfigurationError: The key cannot be read, or others can read it too.
    """
    with disk_errors(keys_dir):
        is_there = (keys_dir / "sealing.key").exists()
    return load_opener(keys_dir, fleet) if is_there else None


def sealing_secret(keys_dir: Path) -> bytes:
    """The secret of the sealing key.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    return read_key(keys_dir / "sealing.key", new_sealing_secret, remedy=_REMEDY)


def load_ask_opener(keys_dir: Path, fleet: str) -> AskOpener:
    """The same key, for requests.

    Raises:
        StorageError, ConfigurationError: The key cannot be kept secret or read.
    """
    return AskOpener(sealing_secret(keys_dir), fleet)
