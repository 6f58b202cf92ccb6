"""Records that lie one after the other in a file, read by number; and files that must be unpacked first.

Compressed data cannot be read by number. They are unpacked once: into memory when that takes at most
:data:`IN_MEMORY_BYTES`, else into a temporary file that has no name any more, so that it is gone with the
process, however that ends. The file is made in ``$TMPDIR``, else in ``/var/tmp``, because ``/tmp`` is
memory on many boards.

A board takes label and values of a record at one time, and notes a digest of them; to be decoded, the record
is read again, and must be that one (:class:`StoredDataset`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import stat
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.dataset import DIGEST_BYTES, Dataset, Indices, Stamps
from dpagent.learning.data.problems import Problems
from dpagent.patient_reads import PatientReads
from dpagent.wording import counted

IN_MEMORY_BYTES: Final = 32 << 20
"""Records that take at most this are kept in memory, unless they can be read from their file by number."""

AWAY: Final = 1 << 10
"""Where rows are read whose numbers are nobody's business, places are counted from so many bytes before the
file. Python has the least whole numbers at hand, and makes others anew: the first row is read in 330
instructions less than any other, by Valgrind's count, and would else be in 650 less."""
_PIECE: Final = 1 << 20
_SPACE_LEFT: Final = 256 << 20
"""Unpacking stops when the disk has less than this left: a board must go on living."""


_OF_A_FILE: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
)
"""Errors that say what a file is, and may be read as well as any other."""


class AbsentError(DataError):
    """There is no such file or folder."""


class ChangedError(DataError):
    """A record is not what it was when it was listed; it is to be listed again."""


class Readable(Protocol):
    """A stream that can be read in pieces."""

    def read(self, size: int = -1, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


Convert = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(slots=True)
class _Faults:
    """How a file is read, and whether all was that was asked for."""

    reads: PatientReads = field(default_factory=PatientReads)
    was_read: bool = True


class RawFile:
    """A file, or its part from some byte on, read at given places. It is closed when it is collected.

    Args:
        path: for the text of errors.
        descriptor: of the open file; this object owns it.
        start: where the part begins.

    Attributes:
        size: of the part, in bytes, when it was opened.
        known: what the system said of the file then.
        opened_ns: when that was, in nanoseconds since 1970.
        seen_at: when a glance saw it as it was then (monotonic); None: it is of no glance.
        rests: whether nobody wrote to it while a glance watched it; None: none has.
    """

    seen_at: float | None = None
    rests: bool | None = None

    def __init__(self, path: Path, descriptor: int, start: int = 0) -> None:
        weakref.finalize(self, os.close, descriptor)
        self.path, self.descriptor, self._start = path, descriptor, start
        self.known, self.opened_ns = os.fstat(descriptor), time.time_ns()
        self.size = self.known.st_size - start
        self._faults = _Faults()

    @property
    def was_read(self) -> bool:
        """Whether the disk could read all that it was asked for, of this file and of its parts."""
        return self._faults.was_read

    def note_unread(self) -> None:
        """Note that it could not."""
        self._faults.was_read = False

    def part(self, start: int) -> RawFile:
        """The part from byte ``start`` on."""
        part = RawFile(self.path, os.dup(self.descriptor), self._start + start)
        part._faults = self._faults
        return part

    def read_some(self, view: memoryview, place: int) -> int:
        """As of :func:`os.preadv`, from byte ``place`` on.

        Raises:
            OSError: the disk cannot read what is there.
        """
        return self._faults.reads.read(self.descriptor, view, self._start + place)

    def read_into(self, target: NDArray[np.uint8], place: int) -> None:
        """Fill ``target``, contiguous, from byte ``place`` on.

        Raises:
            DataError: the file has become shorter, or the disk cannot read it.
        """
        view = target.data.cast("B")
        try:
            done = self.read_some(view, place) if view else 0
            while done < len(view):
                got = self.read_some(view[done:], place + done) if done else 0
                if not got:
                    raise DataError(
                        f"{self.path} ends at byte {self._start + place + done}; it was longer when it was"
                        " opened. Copy it again."
                    )
                done += got
        except OSError as error:
            self.note_unread()
            raise DataError(f"Cannot read {self.path}: {error.strerror or error}.") from error


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file, its first axis the records.

    Attributes:
        file: where its values lie, from byte 0 on.
        dtype: as stored, with its byte order.
        shape: ``(n, …)``.
    """

    file: RawFile
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self, indices: Indices) -> NDArray[Any]:
        """The records at ``indices``, in that order: one read for each run of neighbours."""
        size = self.dtype.itemsize * math.prod(self.shape[1:])
        raw = np.empty((len(indices), size), np.uint8)
        # Where one does not follow on the one before, a run begins.
        breaks = np.flatnonzero(np.diff(indices) != 1) + 1
        for start, stop in zip([0, *breaks], [*breaks, len(indices)], strict=True):
            if stop > start:
                self.file.read_into(raw[start:stop], int(indices[start]) * size)
        return raw.view(self.dtype).reshape(len(indices), *self.shape[1:])

    def read_all(self) -> NDArray[Any]:
        """All of it."""
        return self.read(np.arange(self.shape[0]))

    def readable(self, start: int, stop: int, problems: Problems) -> Iterator[tuple[int, NDArray[Any]]]:
        """Those of some neighbouring records that the disk can read, each with its number.

        Args:
            start, stop: which of them, so few that they are in memory at once.
            problems: is told of each that it cannot.
        """
        try:
            yield from zip(range(start, stop), self.read(np.arange(start, stop)), strict=True)
        except DataError:
            for number in range(start, stop):
                try:
                    yield number, self.read(np.array([number]))[0]
                except DataError as error:
                    problems.add(f"{self.file.path}: record {number}: {error}")


class StoredDataset(Dataset):
    """Records in files, a run of them in each.

    Args:
        parts: the files' arrays.
        convert: from stored records ``(m, …)`` to inputs ``(m, *shape)`` of ``dtype``.
        labels: of the records that are used.
        classes: number of classes.
        places: which of the stored records these are, rising.
        contents: ``(n, 16)`` uint8, the digest of each as it was when its label was read
            (:func:`digest_of`). From then on a record is what has it: to read one that has not raises
            :class:`ChangedError`. None: a file is as it stands there.
        unread: files that the disk cannot read.
        others: as of :class:`Dataset`.
    """

    def __init__(
        self,
        parts: Sequence[StoredArray],
        convert: Convert,
        labels: NDArray[np.int64],
        classes: int,
        *,
        places: NDArray[np.int64],
        contents: NDArray[np.uint8] | None = None,
        unread: Sequence[Path] = (),
        **others: Any,
    ) -> None:
        self._unread = [os.fsdecode(path) for path in unread]
        self._parts, self._convert, self._places, self._contents = tuple(parts), convert, places, contents
        self._ends = np.cumsum([part.shape[0] for part in parts], dtype=np.int64)
        super().__init__(labels, classes, **others)

    def stamps(self, key: bytes) -> NDArray[np.uint64]:
        """As of :meth:`Dataset.stamps`: of the records as they were listed, which are not read again."""
        if self._contents is None:
            return super().stamps(key)
        numbers = Stamps(key)
        for content, label in zip(self._contents, self.labels.tolist(), strict=True):
            numbers.add(content.tobytes(), label)
        return numbers.taken()

    @property
    def files(self) -> Sequence[str]:
        """As of :attr:`Dataset.files`."""
        return [os.fsdecode(part.file.path) for part in self._parts]

    @property
    def unread(self) -> Sequence[str]:
        """As of :attr:`Dataset.unread`."""
        return self._unread

    @property
    def file_numbers(self) -> Indices:
        """As of :attr:`Dataset.file_numbers`."""
        return np.searchsorted(self._ends, self._places, side="right")

    def place_of(self, number: int) -> str:
        """As of :meth:`Dataset.place_of`: its number in its file."""
        place = int(self._places[number])
        owner = int(np.searchsorted(self._ends, place, side="right"))
        part = self._parts[owner]
        return f"{part.file.path}: record {place - int(self._ends[owner]) + part.shape[0]}"

    def _read(self, indices: Indices) -> NDArray[Any]:
        places = self._places[indices]
        inputs = np.empty((len(places), *self.shape), self.dtype)
        owners = np.searchsorted(self._ends, places, side="right")
        for number in np.flatnonzero(np.bincount(owners)):  # np.unique loads masked arrays.
            mine = np.flatnonzero(owners == number)
            part = self._parts[number]
            first = self._ends[number] - part.shape[0]
            # In pieces, so that a lot is not in memory twice, as it was stored and as it is used.
            step = max(1, _PIECE // self.record_bytes)
            for start in range(0, len(mine), step):
                piece = mine[start : start + step]
                inputs[piece] = self._convert(self._stored(part, places[piece] - first, indices[piece]))
        return inputs

    def _stored(self, part: StoredArray, places: Indices, numbers: Indices) -> NDArray[Any]:
        """Records of a file as they are stored, and as they were listed."""
        if self._contents is None:
            return part.read(places)
        try:
            stored = part.read(places)
        except DataError as error:  # It could be read then.
            raise ChangedError(str(error)) from error
        for number, record in zip(numbers.tolist(), stored, strict=True):
            if digest_of(record) != self._contents[number].tobytes():
                raise ChangedError(
                    f"{self.place_of(number)} is not what it was when it was listed; it is listed again at"
                    " the next look."
                )
        return stored


def digest_of(record: bytes | NDArray[Any]) -> bytes:
    """Sixteen bytes that tell whether a record, as it is stored, is what it was."""
    data = record if isinstance(record, bytes) else record.tobytes()
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def to_inputs(stored: NDArray[Any]) -> NDArray[Any]:
    """uint8 as it is, floats of any size and byte order as float32."""
    if stored.dtype.kind != "f":
        return stored  # uint8, or for the check to refuse
    with np.errstate(over="ignore", invalid="ignore"):
        return stored.astype(np.float32, copy=False)


def input_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """The type that :func:`to_inputs` makes of ``stored``; the check refuses other types later."""
    return np.dtype(np.float32) if stored.kind == "f" else stored


def may_be_there(path: Path) -> bool:
    """Whether there is an entry of that name, or may be one for all the disk tells."""
    try:
        path.lstat()
    except OSError as error:
        return is_fault(error)
    return True


def require_readable(path: Path) -> None:
    """Raise :class:`DataError` unless ``path`` is a regular file or a directory that may be read."""
    try:
        known = path.exists()
        if known and (path.is_file() or path.is_dir()):
            if not os.access(path, os.R_OK):
                raise DataError(f"{path} may not be read by this user. Check its owner and its mode.")
            return
    except (OSError, ValueError) as error:  # too long a name, a link to itself, a null character
        raise DataError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error
    if known:
        raise DataError(f"{path} is neither a file nor a directory; expected one of them.")
    raise AbsentError(f"There is no file or directory {path}. Check the path of the data.")


def is_fault(error: BaseException, path: str | Path | None = None) -> bool:
    """Whether the disk, or the system, cannot tell what a file or folder holds; not what that is.

    Args:
        error: that came of it.
        path: of what must be no link: somebody may make one to where nothing is ever had.
    """
    if path is not None and os.path.islink(path):  # noqa: PTH114 - of text
        return False
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return cause is not None and cause.errno not in _OF_A_FILE


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of files and decompressors about ``path`` into :class:`DataError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise AbsentError(f"There is no file {path}. Check the path of the data.") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"Cannot read {path}: {reason}. Copy it again.") from error


def open_raw(path: Path, *, most: int | None = None) -> RawFile:
    """Open a file whose values are read by number; a ``.gz`` file is unpacked first.

    Args:
        path: of the file.
        most: bytes after which unpacking stops.

    Raises:
        DataError: it cannot be read, or is damaged, or unpacks to more than the disk holds.
    """
    if path.suffix != ".gz":
        return open_plain(path)
    import gzip  # which a round never loads

    require_readable(path)
    with reading(path), gzip.open(path, "rb") as packed:
        return unpack(packed, path, most=most)


def open_plain(path: Path) -> RawFile:
    """Open a file as it is.

    Raises:
        DataError: it cannot be read, or is no regular file.
    """
    require_readable(path)
    with reading(path):
        # Without waiting, should there be a pipe by now.
        raw = RawFile(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        if not stat.S_ISREG(raw.known.st_mode):
            raise DataError(f"Cannot read {path}: it is no regular file.")
        return raw


def unpack(packed: Readable, path: Path, *, most: int | None = None) -> RawFile:
    """Copy a stream into a temporary file without a name.

    Args:
        packed: read to its end.
        path: for the text of errors.
        most: bytes after which to stop; one more than expected shows that there are too many.

    Raises:
        DataError: the disk is nearly full, or no temporary file can be made.
    """
    folder = os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp")
    written = 0
    with _temporary_file(folder, path) as stream:
        while piece := packed.read(_PIECE if most is None else min(_PIECE, most - written)):
            space = os.fstatvfs(stream.fileno())
            if space.f_bavail * space.f_frsize < _SPACE_LEFT:
                raise DataError(
                    f"{path} unpacks to more than {counted(written, 'byte')}, and the disk of {folder} is "
                    "nearly full. Unpack it elsewhere, or set TMPDIR to a directory of a larger disk."
                )
            stream.write(piece)
            written += len(piece)
        stream.flush()
        return RawFile(path, os.dup(stream.fileno()))


def _temporary_file(folder: str, path: Path) -> IO[bytes]:
    import tempfile  # which a round never loads

    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        raise DataError(
            f"{path} has to be unpacked, and no temporary file can be made in {folder}: {error.strerror}. Set"
            " TMPDIR to another directory."
        ) from error
