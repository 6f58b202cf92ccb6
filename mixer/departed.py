"""The messages that have left: none leaves twice, not even after a kill.

A broker that delivers a part of what it has seen once more, to a mixer that has forgotten it, sees which
messages leave again, and so knows that their senders are in that part. A mixer therefore notes a batch on
disk before the first message of it leaves, as digests, in two files: when the newer one is full, the older
one is forgotten. They say no more than the broker has seen leave, but for a batch that a crash has kept from
leaving: neither order nor time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dpagent.storage import disk_errors, replace_durably, write_atomically

_DIGEST_BYTES: Final = 16


class Departed:
    """Knows messages again that have left.

    Args:
        directory: of the two files, ``departed`` and ``departed-before``.
        remembered: messages that are known again at least.

    Raises:
        StorageError: The files cannot be read or written.
    """

    def __init__(self, directory: Path, remembered: int) -> None:
        self._file, self._file_before = directory / "departed", directory / "departed-before"
        self._remembered = remembered
        self._digests, self._digests_before = _read(self._file), _read(self._file_before)

    def __contains__(self, message: bytes) -> bool:
        digest = _digest(message)
        return digest in self._digests or digest in self._digests_before

    def note(self, batch: Sequence[bytes]) -> None:
        """Remember the messages of a batch, durably; none of them may have left before.

        Raises:
            StorageError: They cannot be written.
        """
        with disk_errors(self._file):
            if len(self._digests) >= self._remembered:
                replace_durably(self._file_before, self._file)
                write_atomically(self._file, b"", mode=0o600)
                self._digests, self._digests_before = set(), self._digests
            digests = {*map(_digest, batch)}
            with self._file.open("ab") as stream:
                # Sorted: in the order of nothing that arrived.
                stream.write(b"".join(sorted(digests)))
                stream.flush()
                os.fsync(stream.fileno())
            self._digests |= digests


def _digest(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=_DIGEST_BYTES).digest()


def _read(file: Path) -> set[bytes]:
    """The digests in a file, made if it is not there. One that was cut as it was written is cut off: no
    message of its batch has left."""
    with disk_errors(file):
        if not file.exists():
            write_atomically(file, b"", mode=0o600)
        data = file.read_bytes()
        whole = len(data) - len(data) % _DIGEST_BYTES
        os.truncate(file, whole)
    return {data[at : at + _DIGEST_BYTES] for at in range(0, whole, _DIGEST_BYTES)}
