"""Pictures by class, decoded when they are asked for.

The folder or archive is looked through once. A picture whose end is missing is left out and said. One that is
damaged in its middle shows only when it is decoded. Classes, size and mode are declared, and no picture
changes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import ClassTable
from dpagent.learning.data.dataset import Dataset, Indices, Origin, Stamps, reason_of
from dpagent.learning.data.formats.images.decoding import (
    PictureForm,
    looks_whole,
    most_bytes,
)
from dpagent.learning.data.formats.images.files import (
    FolderFiles,
    Listing,
    PictureFiles,
    list_folder,
    list_zip,
    printable,
)
from dpagent.learning.data.stamp import watch_since
from dpagent.learning.data.stored import ChangedError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PictureTerms:
    """What stays as it was when the pictures were first opened.

    Attributes:
        root: the folder that holds the class folders, or the archive.
        folder: the folder of an archive that holds them.
        form: of every picture.
        classes: by the names of their folders.
        source: what the data are called.
        most: pictures and folders to look at, on a board.
    """

    root: Path
    folder: str
    form: PictureForm
    classes: ClassTable
    source: str
    most: int | None = None


def open_pictures(terms: PictureTerms) -> ImageDataset:
    """The pictures of a folder or an archive, whole as far as a look at their ends tells; maybe none.

    Raises:
        DataError: the folder cannot be read, or the archive is damaged.
    """

    def require_whole(found: Listing, files: PictureFiles, number: int) -> None:
        # Members of an archive have checksums, looked at when they are read.
        if isinstance(files, FolderFiles) and not looks_whole(*files.ends(number)):
            terms.form.decode(files.read(number))

    return _made(terms, require_whole)


def list_pictures(terms: PictureTerms, *, growing: bool) -> ImageDataset:
    """The same by their names alone, maybe broken ones among them.

    Args:
        terms: of the dataset.
        growing: those that were written to a moment ago count only if they were known before.

    Raises:
        DataError: as of :func:`open_pictures`.
    """

    dataset = _made(terms, lambda *_: None, terms.classes.texts if growing else ())
    dataset.is_growing = growing  # A board takes no archive.
    return dataset


def listed(
    root: Path, folder: str, form: PictureForm, most: int | None = None, expected: Sequence[str] = ()
) -> tuple[Listing, PictureFiles]:
    """What lies in a folder, as of :func:`list_folder`; or in a folder of an archive."""
    size = most_bytes(form.max_pixels)
    if not root.is_dir():
        return list_zip(root, folder, size)
    found = list_folder(root, most, expected)
    return found, FolderFiles(root, found.names, size)


class ImageDataset(Dataset):
    """Pictures in files or in an archive; see :func:`open_pictures`.

    Attributes:
        is_growing: whether pictures that were written to a moment ago are left for later.
    """

    is_growing = False

    def __init__(
        self, files: PictureFiles, found: Listing, labels: NDArray[np.int64], terms: PictureTerms
    ) -> None:
        self._files, self._found, self._terms = files, found, terms
        super().__init__(
            labels, terms.classes.count, shape=terms.form.shape, dtype=np.dtype(np.uint8),
            class_names=terms.classes.names, origin=Origin("images", terms.source, found.sentences()),
        )  # fmt: skip

    @property
    def names(self) -> Sequence[str]:
        """The pictures' paths, relative to the folder."""
        return self._found.names

    def stamps(self, key: bytes) -> NDArray[np.uint64]:
        """As of :meth:`Dataset.stamps`: of name, size and time of change. Of files in a folder."""
        numbers, found, changes = Stamps(key), self._found, self._changing()
        for number, (name, signs) in enumerate(zip(found.names, found.signs, strict=True)):
            numbers.add(name, *signs, found.listed_at_ns if number in changes else 0)
        return numbers.taken()

    def _changing(self) -> set[int]:
        """Young pictures that are taken all the same, and change in the next seconds: not to be known again.

        Times are coarse, so one may change once more unseen; but not after those seconds, and it is decoded
        after them. By the clock alone, all would be young at a first start soon after they were copied, or
        with a clock that somebody has set to then, and be decoded anew, as few in a look as are new.
        """
        found, files = self._found, self._files
        if self.is_growing or not isinstance(files, FolderFiles):
            return set()
        young = [number for number in range(len(self)) if found.is_young(number)]
        if young:
            watch_since(found.seen_at)
        return {number for number in young if files.signs(number) != found.signs[number]}

    @property
    def unfinished(self) -> Indices:
        """As of :attr:`Dataset.unfinished`: those that were written to a moment ago."""
        young = [number for number in range(len(self)) if self.is_growing and self._found.is_young(number)]
        return np.array(young, np.intp)

    @property
    def unlisted(self) -> frozenset[int]:
        """As of :attr:`Dataset.unlisted`."""
        numbers = map(self._terms.classes.number, self._found.unlisted)
        return frozenset(number for number in numbers if number is not None)

    @property
    def files(self) -> Sequence[str]:
        """As of :attr:`Dataset.files`."""
        return self._found.names

    @property
    def unread(self) -> Sequence[str]:
        """As of :attr:`Dataset.unread`."""
        return self._found.unread

    @property
    def file_numbers(self) -> Indices:
        """As of :attr:`Dataset.file_numbers`."""
        return np.arange(len(self))

    def place_of(self, number: int) -> str:
        """As of :meth:`Dataset.place_of`."""
        return f"{self._terms.root}: {printable(self._found.names[number])}"

    def _read(self, indices: Indices) -> NDArray[Any]:
        inputs, errors = self._tried(indices)
        for row, error in errors.items():
            more = f" ({len(errors) - 1} more cannot be read either.)" if len(errors) > 1 else ""
            kind = ChangedError if isinstance(error, ChangedError) else DataError
            raise kind(self._sentence(int(indices[row]), error) + more)
        return inputs

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """As of :meth:`Dataset.try_read`; no picture is decoded twice."""
        inputs, errors = self._tried(indices)
        return inputs, {row: self._sentence(int(indices[row]), error) for row, error in errors.items()}

    def _tried(self, indices: Indices) -> tuple[NDArray[Any], dict[int, Exception]]:
        inputs, errors = np.zeros((len(indices), *self.shape), np.uint8), dict[int, Exception]()
        for row, number in enumerate(self._require_in_range(indices).tolist()):
            try:
                inputs[row] = self._terms.form.decode(self._files.read(number))
            except Exception as error:
                log.debug("a picture cannot be read", exc_info=True)
                errors[row] = error
        return inputs, errors

    def _sentence(self, number: int, error: Exception) -> str:
        return f"{self.place_of(number)}: {reason_of(error)}"


def _made(
    terms: PictureTerms,
    require: Callable[[Listing, PictureFiles, int], None],
    expected: Sequence[str] = (),
) -> ImageDataset:
    """The dataset of the pictures that are of a class and fulfil a requirement."""
    found, files = listed(terms.root, terms.folder, terms.form, terms.most, expected)
    numbers = {label: terms.classes.number(label) for label in set(found.labels)}
    keep = []
    for place, (name, label) in enumerate(zip(found.names, found.labels, strict=True)):
        if numbers[label] is None:
            found.passed_over[
                f"in the folder {printable(label)!r}, which is no class; expected {terms.classes.expected()}"
            ] += 1
            continue
        try:
            require(found, files, place)
        except Exception as error:
            log.debug("a picture is left out", exc_info=True)
            found.leave_out(name, reason_of(error))
        else:
            keep.append(place)
    labels = np.array([numbers[found.labels[place]] for place in keep], np.int64)
    found.names, found.labels = [found.names[place] for place in keep], []
    found.signs = [found.signs[place] for place in keep]
    return ImageDataset(files.keep(keep), found, labels, terms)
