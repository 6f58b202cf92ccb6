"""Which pictures there are: in a folder with a folder for each class, or in a zip archive of that form.

The class of a picture is the name of the first folder it lies in; deeper folders belong to the same class.
The folder that holds the class folders is declared: one more picture in a folder called ``test`` must not
make all others vanish. Without a declaration it is inferred (:func:`class_folder`): where folders are called
``train`` and ``test`` and hold folders themselves, it is one of the two.

An entry that cannot be looked at costs itself alone.
Hidden files, and files that are no pictures by their names, are passed over.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

from dpagent.errors import DataError
from dpagent.learning.data.archive import ZipMembers, obstacle, open_zip
from dpagent.learning.data.declared import Half
from dpagent.learning.data.formats.images.decoding import SUFFIXES
from dpagent.learning.data.location import entries_of, names_in
from dpagent.learning.data.problems import MOST_SAID
from dpagent.learning.data.stamp import GRACE_S
from dpagent.learning.data.stored import ChangedError, is_fault, reading
from dpagent.wording import counted

IN_NO_FOLDER: Final = "a picture that lies in no class folder"

_HALVES: Final[dict[Half, tuple[str, ...]]] = {
    "train": ("train", "training"),
    "test": ("test", "val", "valid", "validation"),
}
_Member = tuple[tuple[str, ...], zipfile.ZipInfo]
"""The parts of a member's name, and the archive's entry for it."""

HERE: Final = "."
"""The folder itself, as the one that holds the class folders."""

_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EINTR})
"""Errors that say nothing of the file."""
_DEPTH: Final = 3
_DEEPEST: Final = 64
_LONGEST: Final = 512
"""Bytes of a path below the folder: names take memory."""
_MOST_LOOKED_AT: Final = 20_000


@dataclass(slots=True)
class Listing:
    """The findings of a look at a folder or archive.

    Attributes:
        names: relative paths of the pictures, in order.
        labels: the class folder of each.
        signs: of each, two numbers that change when it does: size and time of change in nanoseconds, in an
            archive checksum and size.
        classes: all class folders, those without pictures too.
        passed_over: how many files were not looked at, by reason.
        problems: a sentence for each picture that cannot be read, by its name; on a board, for the first.
        unlisted: the class folders of which the disk could not list all.
        unread: pictures that it cannot find, though it lists them.
        most: pictures and folders to look at, on a board.
        is_cut_short: whether there are more.
        unsaid: how many pictures cannot be read besides.
        listed_at_ns: when the look began.
        seen_at: the same, by a clock that nobody sets (monotonic).
    """

    names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    signs: list[tuple[int, int]] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)
    passed_over: Counter[str] = field(default_factory=Counter)
    problems: dict[str, str] = field(default_factory=dict)
    unlisted: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)
    most: int | None = None
    is_cut_short: bool = False
    unsaid: int = 0
    listed_at_ns: int = field(default_factory=lambda: time.time_ns())
    seen_at: float = field(default_factory=time.monotonic)

    def is_young(self, number: int) -> bool:
        """Whether a picture in a folder may still be growing. A time that is to come is no sign of that: the
        clock was set back."""
        return abs(self.listed_at_ns - self.signs[number][1]) < GRACE_S * 1e9

    def sentences(self) -> tuple[str, ...]:
        """The files that were left out."""
        over = [f"{counted(count, 'file')}: {reason}" for reason, count in sorted(self.passed_over.items())]
        cut = ["There is more than is looked at; max_records bounds it."] if self.is_cut_short else []
        said = [f"{printable(name)}: {text}" for name, text in self.problems.items()]
        more = [f"{counted(self.unsaid, 'more file')} cannot be read."] if self.unsaid else []
        return (*cut, *over, *said, *more)

    def note_unlisted(self, name: str, label: str, error: OSError) -> None:
        """Note what the disk cannot tell of a class."""
        self.unlisted.add(label)
        self.leave_out(
            name, f"the disk cannot list it ({error.strerror}). What was known stays until it can."
        )

    def leave_out(self, name: str, why: str) -> None:
        """Note why a picture cannot be read."""
        if self.most is None or len(self.problems) < MOST_SAID:
            self.problems[name] = why
        else:
            self.unsaid += 1


class PictureFiles(Protocol):
    """Where the bytes of pictures come from."""

    def read(self, number: int) -> bytes:
        """The bytes of a picture. Raises :class:`DataError` without the picture's name."""
        ...

    def keep(self, numbers: Sequence[int]) -> PictureFiles:
        """Only these pictures, in this order."""
        ...


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """Pictures as files of at most ``most`` bytes, by their paths relative to ``root``."""

    root: Path
    names: Sequence[str]
    most: int

    def read(self, number: int) -> bytes:
        """As of :class:`PictureFiles`."""
        path = self.root / self.names[number]
        try:
            # Without waiting, should there be a pipe by now.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as stream:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise DataError("it is no regular file any more.")
                size = os.fstat(descriptor).st_size
                if not 0 < size <= self.most:
                    raise DataError(f"it has {counted(size, 'byte')}; expected 1 to {self.most:,}.")
                data = stream.read(self.most)
        except FileNotFoundError as error:
            raise ChangedError("it has vanished since the folder was read.") from error
        except OSError as error:
            if error.errno in _PASSING:
                raise ChangedError(f"it cannot be read now: {error.strerror}.") from error
            raise DataError(f"it cannot be read: {error.strerror or error}.") from error
        return data

    def keep(self, numbers: Sequence[int]) -> FolderFiles:
        """As of :class:`PictureFiles`."""
        return FolderFiles(self.root, [self.names[number] for number in numbers], self.most)

    def signs(self, number: int) -> tuple[int, int] | None:
        """Size and time of change of a picture as they are now; None where they cannot be had."""
        try:
            known = (self.root / self.names[number]).stat()
        except OSError:
            return None
        return known.st_size, known.st_mtime_ns

    def ends(self, number: int) -> tuple[bytes, bytes]:
        """The first and the last bytes of a picture; nothing where it cannot be read."""
        try:
            with (self.root / self.names[number]).open("rb") as stream:
                begin = stream.read(16)
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - 16))
                return begin, stream.read(16)
        except OSError:
            return b"", b""


def list_folder(root: Path, most: int | None = None, expected: Sequence[str] = ()) -> Listing:
    """Look through a folder of class folders.

    Links to files and to class folders are followed, links deeper down are not: they could lead round.

    Args:
        root: the folder.
        most: pictures and folders to look at, on a board: the first of each folder, and those of a folder
            before those of the folders in it. So one more moves at most one out of a look that has far more
            than it may.
        expected: class folders, to be looked for by name where the disk cannot list the outermost one.

    Raises:
        DataError: the folder cannot be read.
    """
    walk = _Walk(most)
    with reading(root):
        names = walk.folders_of_classes(root, expected)
    for name in names:
        walk.found.classes.add(name)
        walk.into(f"{root}/{name}", name, name)
    return walk.found


def class_folder(path: Path, half: Half) -> str:
    """The folder in a folder or an archive that holds the class folders, as a relative path; for ``infer``.

    Raises:
        DataError: there is the other half only.
    """
    if not path.is_dir():
        parts, _ = _below(_visible(open_zip(path)[1]), half, str(path))
        return "/".join(parts) or HERE
    with reading(path):
        folders = [entry.name for entry in entries_of(path) if _is_folder(entry) and _has_folders(entry.path)]
    return _half_of(folders, half, str(path)) or HERE


def has_halves(path: Path) -> bool:
    """Whether a folder or archive of pictures comes as a training and a test half."""
    try:
        return class_folder(path, "train") != class_folder(path, "test")
    except DataError:
        return False  # There is one of them only.


def holds_pictures(root: Path) -> bool:
    """Whether a folder below ``root`` holds a picture, after a look at no more than some thousand files."""
    with reading(root):
        level = [entry.path for entry in entries_of(root) if _is_folder(entry)]
    looked_at = 0
    for _ in range(_DEPTH):
        below: list[str] = []
        for folder in level:
            try:
                for entry in entries_of(folder):
                    looked_at += 1
                    if looked_at > _MOST_LOOKED_AT:
                        return False
                    if _is_folder(entry, links=False):
                        below.append(entry.path)
                    elif is_picture(entry.name):
                        return True
            except OSError:
                continue  # One that may not be read holds nothing for us.
        level = below
    return False


def list_zip(path: Path, folder: str, most: int) -> tuple[Listing, ZipMembers]:
    """Look through an archive of class folders.

    Args:
        path: of the archive.
        folder: the one that holds the class folders.
        most: bytes of a picture.

    Raises:
        DataError: it is not a zip archive.
    """
    file, listed = open_zip(path)
    above = PurePosixPath(folder).parts
    members = [
        (parts[len(above) :], info)
        for parts, info in _visible(listed)
        if parts[: len(above)] == above and len(parts) > len(above)
    ]
    found, chosen = Listing(), []
    for parts, info in sorted(members, key=lambda member: member[0]):
        name = "/".join(parts)
        if info.is_dir() or len(parts) > 1:
            found.classes.add(parts[0])
        if info.is_dir():
            continue
        if not is_picture(parts[-1]):
            found.passed_over["no picture by its name"] += 1
        elif len(parts) == 1:
            found.passed_over[IN_NO_FOLDER] += 1
        elif (reason := obstacle(info, most)) is not None:
            found.leave_out(name, f"{reason}.")
        else:
            found.names.append(name)
            found.labels.append(parts[0])
            found.signs.append((info.CRC, info.file_size))
            chosen.append(info)
    return found, ZipMembers(file, chosen)


def is_picture(name: str) -> bool:
    """Whether a file is a picture by its name."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def printable(name: str) -> str:
    """A file's name as a terminal may show it."""
    return "".join(letter if letter.isprintable() else "�" for letter in name)


class _Walk:
    """A look through folders. The names of pictures and folders are kept, and nothing of the rest."""

    def __init__(self, most: int | None) -> None:
        self.found, self._left = Listing(most=most), most

    def folders_of_classes(self, root: Path, expected: Sequence[str]) -> list[str]:
        """The names of the folders in the outermost one."""
        found, over, faults = self.found, self.found.passed_over, list[OSError]()

        def is_wanted(entry: os.DirEntry[str]) -> bool:
            if _is_hidden(entry.name):
                return False
            if _is_folder(entry):
                return True
            over[IN_NO_FOLDER if is_picture(entry.name) else "no picture by its name"] += 1
            return False

        names = self._names(str(root), is_wanted, faults.append if expected else None)
        for error in faults:
            for label in expected:
                found.note_unlisted(".", label, error)
            names = sorted({*names, *(each for each in expected if os.path.lexists(root / each))})
        return names

    def into(self, path: str, relative: str, label: str, depth: int = 0) -> None:
        """Look through a folder of a class."""
        found = self.found

        def is_wanted(entry: os.DirEntry[str]) -> bool:
            if _is_hidden(entry.name):
                return False
            if len(os.fsencode(f"{relative}/{entry.name}")) > _LONGEST:
                found.passed_over[f"a path of more than {_LONGEST} bytes"] += 1
            elif _is_folder(entry, links=False):
                if depth < _DEEPEST:
                    return True
                found.passed_over[f"a folder more than {_DEEPEST} deep"] += 1
            elif is_picture(entry.name):
                return True
            else:
                found.passed_over["no picture by its name"] += 1
            return False

        try:
            names = self._names(path, is_wanted, lambda error: found.note_unlisted(relative, label, error))
        except OSError as error:
            found.leave_out(relative, f"it cannot be looked into: {error.strerror or error}.")
            return
        for name in names:
            self._take(f"{path}/{name}", f"{relative}/{name}", label, depth)

    def _take(self, path: str, relative: str, label: str, depth: int) -> None:
        """Take a picture, or look into a folder."""
        found = self.found
        try:
            known = os.lstat(path)
            if stat.S_ISDIR(known.st_mode):
                self.into(path, relative, label, depth + 1)
                return
            if stat.S_ISLNK(known.st_mode):
                known = Path(path).stat()
        except OSError as error:
            if is_fault(error, path):
                found.unread.append(relative)
                found.leave_out(
                    relative,
                    f"the disk cannot find it ({error.strerror}). What was known stays until it can.",
                )
            else:
                found.leave_out(relative, f"it cannot be read: {error.strerror or error}.")
            return
        if not stat.S_ISREG(known.st_mode):
            found.leave_out(relative, "it is no regular file.")
            return
        found.names.append(relative)
        found.labels.append(label)
        found.signs.append((known.st_size, known.st_mtime_ns))

    def _names(
        self,
        path: str,
        is_wanted: Callable[[os.DirEntry[str]], bool],
        say: Callable[[OSError], None] | None,
    ) -> list[str]:
        """The wanted names in a folder, as many as may be looked at yet."""
        if self._left is None:
            return names_in(path, is_wanted)
        names = names_in(path, is_wanted, self._left + 1, say)
        self.found.is_cut_short |= len(names) > self._left
        del names[self._left :]
        self._left -= len(names)
        return names


def _visible(listed: Iterable[zipfile.ZipInfo]) -> list[_Member]:
    members = [(PurePosixPath(info.filename).parts, info) for info in listed]
    return [(parts, info) for parts, info in members if parts and not any(map(_is_hidden, parts))]


def _below(members: list[_Member], half: Half, where: str) -> tuple[tuple[str, ...], list[_Member]]:
    """The folder that holds the class folders, and the members below it."""
    above: tuple[str, ...] = ()
    while True:
        tops = {parts[0] for parts, _ in members}
        # Folders that hold folders, and no picture themselves.
        outer = {parts[0] for parts, info in members if len(parts) > 2 or (len(parts) == 2 and info.is_dir())}
        outer -= {parts[0] for parts, info in members if len(parts) == 2 and is_picture(parts[1])}
        name = _half_of(outer, half, where)
        if name is None and len(tops) == 1 and tops == outer:
            (name,) = tops
        if name is None:
            return above, members
        members = [(parts[1:], info) for parts, info in members if parts[0] == name and len(parts) > 1]
        above = (*above, name)


def _half_of(folders: Iterable[str], half: Half, where: str) -> str | None:
    names = {name.lower(): name for name in folders}
    for choice in _HALVES[half]:
        if choice in names:
            return names[choice]
    for others in _HALVES.values():
        if found := [names[other] for other in others if other in names]:
            raise DataError(
                f"{where} has the folder {found[0]!r}, and none called {' or '.join(_HALVES[half])}; expected"
                " both halves, or class folders only. Give the path of the half itself."
            )
    return None


def _has_folders(path: str) -> bool:
    """Whether a folder holds folders, and no picture of its own."""
    try:
        kinds = [(_is_folder(entry), is_picture(entry.name)) for entry in entries_of(path)]
    except OSError:
        return False
    return any(folder for folder, _ in kinds) and not any(picture for folder, picture in kinds if not folder)


def _is_folder(entry: os.DirEntry[str], *, links: bool = True) -> bool:
    """Whether an entry is a folder, or with ``links`` a link to one, or may be one for all the disk tells."""
    try:
        return entry.is_dir(follow_symlinks=links)
    except OSError as error:
        return is_fault(error)  # Else a link to itself.


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in ("__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir")
