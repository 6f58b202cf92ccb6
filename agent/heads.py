"""The heads of a ledger: files that say how far its chain has come, so that it cannot go back unnoticed.

``ledger.head`` stands beside the database and reveals a database that was shortened or replaced alone. Who
puts a backup of the whole state directory back puts both back. So there is a *second head*, outside that
directory: at each start the chain has to reach it. It also holds, for each dataset, the lifetime budget and
everything that is reserved, so that after a restore the missing entries are written off to the last bit, and
no more.

Order of writes, each durable before the next: the commit of an entry, ``ledger.head``, the second head, and
only then whatever follows from the entry; for a charge, the first look at a record. So a head never leads the
chain, lags behind it by the entries of one transaction at most, and **nothing leaves under an entry that the
second head does not know**: an entry that a power cut kept from it has cost nothing. Likewise, when the
fragments of a round are spooled, the second head ceases to call its charges `unsent` before the first byte
leaves: a directory that was copied in between, and put back, does not get a second noisy sum for them.

A running agent reads the second head before it writes it: one whose state directory was copied, and whose
copy another agent runs, finds that its chain does not reach the other's entry, and ends before it reads a
record. From the reading to the writing it holds a lock (:class:`HeadLock`), and so does a command of the
owner's: else what another program writes in between would be written over, and what it has charged forgotten.

The second head is as trustworthy as its place. Nothing here stops an owner who writes both.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from agent.charges import Epsilon
from dpagent.errors import LedgerError, StorageError
from dpagent.schema.base import read_json
from dpagent.schema.json_values import json_of
from dpagent.schema.limits import Limits
from dpagent.schema.problems import SchemaError
from dpagent.storage import beside, disk_errors, place_of_file, real_path, write_over_spare

GENESIS: Final = bytes(32)
"""Stands before the first entry of a chain."""
_HELD_S: Final = 10.0
"""A lock that another program holds for so long is not waited for any longer."""
_TRY_S: Final = 0.02
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What a file system says that knows no locks."""

_Amount = Annotated[float, Limits(ge=0)]


@dataclass(frozen=True, slots=True)
class LedgerFiles:
    """Where the ledger of a device is."""

    state_dir: Path
    second_head: Path

    @property
    def database(self) -> Path:
        """Entries, rounds and spool."""
        return self.state_dir / "ledger.db"

    @property
    def head(self) -> Path:
        """The head beside the database."""
        return self.state_dir / "ledger.head"


def second_head_beside(state_dir: Path) -> Path:
    """Where the second head is by default: beside the state directory, under its name and ``.head``."""
    return Path(f"{real_path(state_dir)}.head")


@dataclass(frozen=True, slots=True)
class Head:
    """The length and the last hash of a chain."""

    entries: Annotated[int, Limits(ge=0)]
    hash: Annotated[str, Limits(pattern="^[0-9a-f]{64}$")]

    def is_reached_by(self, digests: Sequence[bytes]) -> bool:
        """Whether a chain with these digests is the recorded one, or goes on from it."""
        if self.entries > len(digests):
            return False
        return self.hash == (digests[self.entries - 1] if self.entries else GENESIS).hex()


@dataclass(frozen=True, slots=True)
class Totals:
    """The lifetime budget of a dataset, and what is reserved of it."""

    epsilon_budget: _Amount
    delta_budget: _Amount
    epsilon_reserved: Epsilon
    delta_reserved: _Amount


@dataclass(frozen=True, slots=True)
class SecondHead(Head):
    """What the ledger adds up to, besides its head."""

    unsent: tuple[int, ...]
    """Charges under which nothing has left, by the number of their entry: only these may be run again."""
    datasets: dict[str, Totals]

    def knows_as_sent(self, repeatable: Collection[int]) -> bool:
        """Whether one of these charges, which a state directory would run again, has left already."""
        return any(number <= self.entries and number not in self.unsent for number in repeatable)


class HeadLock:
    """A lock for a second head: a file beside it, ``.NAME.lock``. State directories that were copied share
    it, as they share the second head, where their own locks are two.

    Where the file cannot be made for want of room, or the file system knows no locks, nothing is locked: an
    agent that has its books goes on. Where its disk is gone, or read-only, the second head cannot be written
    either: that is found before a round is spooled, which an agent with a copy would spool again.

    It is opened each time. So the disk that it is on can be unmounted, or mounted read-only, while an agent
    runs; and programs that opened it before and after somebody had deleted it do not hold two.

    Args:
        second_head: the file.
    """

    def __init__(self, second_head: Path) -> None:
        self._path, self._is_held = second_head, False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it, also where it is held here already.

        Raises:
            StorageError: Another program holds it, or it cannot be opened.
        """
        if self._is_held:
            yield
            return
        descriptor, self._is_held = self._take(), True
        try:
            yield
        finally:
            self._is_held = False
            if descriptor is not None:
                os.close(descriptor)

    def _take(self) -> int | None:
        """The file, open, and locked as far as it can be; None: there is none."""
        lock, until = beside(place_of_file(self._path), "lock"), time.monotonic() + _HELD_S
        with disk_errors(lock):
            while (descriptor := _opened(lock)) is not None:
                with ExitStack() as unless_locked:
                    unless_locked.callback(os.close, descriptor)
                    if _is_locked(descriptor, lock):
                        unless_locked.pop_all()
                        return descriptor
                if time.monotonic() >= until:
                    raise StorageError(
                        f"{self._path} is held by another program, which works with another copy of this "
                        "state directory. Stop that program first."
                    )
                time.sleep(_TRY_S)
        return None


def _opened(lock: Path) -> int | None:
    """The file of a lock; None: there is no room to make it."""
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        return None


def _is_locked(descriptor: int, lock: Path) -> bool:
    """Lock a file, unless another program has, or it is not the one of that name any more."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        return os.path.samestat(os.fstat(descriptor), lock.lstat())
    except FileNotFoundError:
        return False


def read_head(file: Path) -> Head | None:
    """``ledger.head``, or None if there is none.

    Raises:
        LedgerError: It is not readable.
    """
    head: Head | None = _read(file, Head, "Remove it, and run `dpagent budget restored`")
    return head


def read_second_head(file: Path) -> SecondHead | None:
    """The second head, or None if there is none.

    Raises:
        LedgerError: It is not readable.
    """
    advice = "Put it back, or, if it is lost, remove it and run `dpagent budget restored --write-off-all`"
    head: SecondHead | None = _read(file, SecondHead, advice)
    return head


def save_head(file: Path, head: Head) -> None:
    """Replace a head, durably.

    Raises:
        StorageError: It cannot be written; the one before it remains.
    """
    write_over_spare(file, json_of(head) + b"\n", mode=0o600)


def require_head(digests: Sequence[bytes], head: Head | None, file: Path) -> None:
    """Check that a chain reaches a head.

    Args:
        digests: of the chain.
        head: as recorded; None if it is not.
        file: that records it.

    Raises:
        LedgerError: It does not.
    """
    if head is None or head.is_reached_by(digests):
        return
    if head.entries > len(digests):
        problem = f"Entries are missing: the ledger had {head.entries} and has {len(digests)}, by {file}"
    else:
        problem = f"Entry {head.entries} is not the one recorded in {file}: the ledger was replaced"
    raise LedgerError(
        f"{problem}. If an older copy was put back, run `dpagent budget restored`: "
        "it writes off what the missing entries may have spent."
    )


def require_kept(
    digests: Sequence[bytes], repeatable: Collection[int], second: SecondHead, file: Path
) -> None:
    """Check that a state directory is the one whose second head that is, or a later one.

    Args:
        digests: of its chain.
        repeatable: the charges whose rounds it would run again, by the number of their entry.
        second: the second head.
        file: that holds it.

    Raises:
        LedgerError: It is an older one, or another.
    """
    require_head(digests, second, file)
    if second.knows_as_sent(repeatable):
        raise LedgerError(
            f"The state directory is an older copy: a round that it would run again has left already, by "
            f"{file}. Run `dpagent budget restored`: it gives the round up."
        )


def _read(file: Path, kind: type[Head], advice: str) -> Any:
    try:
        with disk_errors(file):
            if file.exists() and not file.is_file():
                raise StorageError(f"{file} is no regular file. {advice}.")
            text = file.read_bytes() if file.exists() else None
        return None if text is None else read_json(kind, text)
    except SchemaError as error:
        said = error.first.sentence(shows_value=False)
        raise LedgerError(f"{file} is not readable: {said}. {advice}.") from error
