"""The files of the records as a look finds them when it begins: which there are, and how far each reaches.

A look that finds nothing new reads nothing, and what comes in then waits for the next one. So what comes in
while a look lists files has to wait, too: else one record that was there before would bring it in. Afterwards
that cannot be told. So files are opened when they are glanced at; a look lists those, whatever has taken
their places, and takes nothing new from beyond their ends.
"""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from dpagent.errors import DataError
from dpagent.learning.data.stamp import Stamp, stamp_of, watch_since
from dpagent.learning.data.stored import RawFile, open_plain

_MOST_OPEN: Final = 256
_OTHER_FILES: Final = 40
_TRIES: Final = 3


class Glance:
    """Files, open as they were.

    Args:
        files: that may hold records.

    Attributes:
        files: the same.
        text: which changes with the names, sizes and times of the files; None if one is young, or cannot be
            opened: it may have gone since its folder was listed.
        keeps_open: whether all of them stay open.
        fault: why the disk cannot list all of them, if it cannot.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = tuple(files)
        self._found: dict[Path, RawFile | DataError] = {}
        self._stamps: dict[Path, Stamp] = {}
        self._young = set[Path]()
        self._rests: dict[Path, bool] = {}
        self.keeps_open = len(self.files) <= most_open()
        stamps, is_sure = hashlib.sha256(), True
        for file in self.files:
            try:
                stamp = self._stamps[file] = self._stamp(file)
            except DataError as error:
                self._found[file] = error
                is_sure = False
                continue
            if stamp.is_young():
                self._young.add(file)
                is_sure = False
            stamps.update(repr((str(file), *stamp)).encode())
        self.text = stamps.hexdigest() if is_sure else None
        self._seen_at = time.monotonic()
        for raw in self._found.values():
            if isinstance(raw, RawFile):
                raw.seen_at = self._seen_at
        self.fault: OSError | None = None

    @classmethod
    def at(cls, files: Callable[[], Iterable[Path]]) -> Glance:
        """A glance at files that are still there when they are opened, unless some go each time."""
        for _ in range(_TRIES - 1):
            if not (glance := cls(files()))._lacks_one:
                return glance
        return cls(files())

    def note_fault(self, error: OSError) -> None:
        """Note that the disk cannot list all files: the next look lists again."""
        self.fault, self.text = error, None

    def watch(self) -> None:
        """See to which of the files that look young nobody writes (:attr:`RawFile.rests`).

        All at one time, before any of them is read: how long that takes, and whether it matters, depends on
        the records.
        """
        if self._young:
            watch_since(self._seen_at)
        for file in self._stamps:
            self._rests[file] = file not in self._young or self._is_as_it_was(file)

    def _is_as_it_was(self, file: Path) -> bool:
        raw = self._found.get(file)
        try:
            now = Stamp.of(os.fstat(raw.descriptor)) if isinstance(raw, RawFile) else stamp_of(file)
        except DataError:
            return False
        return now == self._stamps[file]

    def opened(self, file: Path) -> RawFile:
        """One of the files, as it was. Where there are more than may stay open, it may be another by now, and
        counts as it is.

        Raises:
            DataError: It could not be opened.
        """
        found = self._found.get(file)
        if isinstance(found, DataError):
            raise found
        if found is None:
            found, was = open_plain(file), self._stamps[file]
            if (now := Stamp.of(found.known)).inode != was.inode:
                return found
            found.size = min(found.size, was.size)
            if now == was:
                found.seen_at = self._seen_at
        found.rests = self._rests.get(file)
        return found

    @property
    def was_read(self) -> bool:
        """Whether the disk has read all that was listed, of files that stay open. What it has not may be read
        another time: if nothing was listed before something else comes, that would bring it in."""
        return all(found.was_read for found in self._found.values() if isinstance(found, RawFile))

    @property
    def _lacks_one(self) -> bool:
        return any(isinstance(found, DataError) for found in self._found.values())

    def _stamp(self, file: Path) -> Stamp:
        if not self.keeps_open:
            return stamp_of(file)
        raw = self._found[file] = open_plain(file)
        return Stamp.of(raw.known)


def most_open() -> int:
    """How many files may stay open: as many as this process may have, and some for other things."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if soft == resource.RLIM_INFINITY else min(_MOST_OPEN, soft - _OTHER_FILES)
