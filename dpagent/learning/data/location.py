"""A look at a path, shared by all formats that may recognise it."""

from __future__ import annotations

import heapq
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from dpagent.learning.data.archive import MAX_LIST_BYTES, listed_zip
from dpagent.learning.data.stored import is_fault, reading, require_readable


class Location:
    """The file or folder at a path. Each question is answered from disk once.

    Args:
        path: a file or a folder.

    Raises:
        DataError: the path is neither, or may not be read; also when a question is asked.
    """

    def __init__(self, path: Path) -> None:
        require_readable(path)
        self.path, self.is_folder = path, path.is_dir()

    @property
    def name(self) -> str:
        """The last part of the path, in small letters."""
        return self.path.name.lower()

    @cached_property
    def entries(self) -> list[os.DirEntry[str]]:
        """The entries of the folder by name; none of a file."""
        if not self.is_folder:
            return []
        with reading(self.path):
            return entries_of(self.path)

    @property
    def names(self) -> list[str]:
        """The names of the folder's entries."""
        return [entry.name for entry in self.entries]

    @cached_property
    def is_zip(self) -> bool:
        """Whether it is a file that begins as a zip archive does."""
        if self.is_folder:
            return False
        with reading(self.path), self.path.open("rb") as stream:
            return stream.read(2) == b"PK"

    @cached_property
    def members(self) -> list[str]:
        """The names in the zip archive; none where it is no archive, or a damaged one."""
        if not self.is_zip:
            return []
        try:
            with reading(self.path), listed_zip(self.path, MAX_LIST_BYTES) as archive:
                return archive.namelist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):
            # A zip version beyond zipfile's own is not implemented; a name that is not UTF-8 is a ValueError.
            return []


def names_in(
    folder: str | Path,
    wants: Callable[[os.DirEntry[str]], bool],
    most: int | None = None,
    say: Callable[[OSError], None] | None = None,
) -> list[str]:
    """The names of the entries of a folder that are wanted, in their order; of more than ``most``, the first.
    Of others nothing is kept, however many there are.

    Args:
        folder: to be listed.
        wants: whether an entry is wanted.
        most: names to return.
        say: is told where the disk cannot list the folder to its end; then the names are those before. None:
            an error is raised.

    Raises:
        OSError: the folder cannot be listed.
    """

    def wanted() -> Iterator[str]:
        try:
            with os.scandir(folder) as found:
                yield from (entry.name for entry in found if wants(entry))
        except OSError as error:
            if say is None or not is_fault(error):
                raise
            say(error)

    return sorted(wanted()) if most is None else heapq.nsmallest(most, wanted())


def entries_of(folder: str | Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, by name."""
    with os.scandir(folder) as found:
        return sorted(found, key=lambda entry: entry.name)
