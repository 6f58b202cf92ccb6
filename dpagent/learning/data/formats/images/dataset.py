"""Pictures by class, decoded when they are asked for.

The folder or archive is looked through once. A picture whose end is missing is left out and said; in a folder
it is looked at again at the next refresh, because a camera may be writing it. One that is damaged in its
middle shows only when it is decoded. Classes, size and mode are declared, and no picture changes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.archive import ZipMembers
from dpagent.learning.data.classes import ClassTable
from dpagent.learning.data.dataset import Dataset, Indices, Origin, reason_of
from dpagent.learning.data.formats.images.decoding import (
    PictureForm,
    looks_whole,
    most_bytes,
)
from dpagent.learning.data.formats.images.files import (
    GRACE_S,
    FolderFiles,
    Listing,
    PictureFiles,
    list_folder,
    list_zip,
    printable,
)

log = logging.getLogger(__name__)

_PENDING_S: Final = 600.0
"""A picture that is not whole and was written to within this is looked at again at every refresh."""


@dataclass(frozen=True, slots=True)
class PictureTerms:
    """What stays as it was when the pictures were first opened.

    Attributes:
        root: the folder that holds the class folders, or the archive.
        folder: the folder of an archive that holds them.
        form: of every picture.
        classes: by the names of their folders.
        source: what the data are called.
    """

    root: Path
    folder: str
    form: PictureForm
    classes: ClassTable
    source: str


def open_pictures(terms: PictureTerms) -> ImageDataset:
    """The pictures of a folder or an archive, maybe none.

    Raises:
        DataError: the folder cannot be read, or the archive is damaged.
    """
    found, files = listed(terms.root, terms.folder, terms.form)
    return _made(found, files, terms, range(len(found.names)), starts=True)


def listed(root: Path, folder: str, form: PictureForm) -> tuple[Listing, PictureFiles]:
    """What lies in a folder, or in a folder of an archive."""
    most = most_bytes(form.max_pixels)
    if not root.is_dir():
        return list_zip(root, folder, most)
    found = list_folder(root)
    return found, FolderFiles(root, found.names, most)


class ImageDataset(Dataset):
    """Pictures in files or in an archive; see :func:`open_pictures`."""

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

    @property
    def keys(self) -> NDArray[np.int64]:
        """As of :attr:`Dataset.keys`."""
        return np.array([hash(name) for name in self.names], np.int64)

    def _read(self, indices: Indices) -> NDArray[Any]:
        inputs, problems = self.try_read(indices)
        if problems:
            more = f" ({len(problems) - 1} more cannot be read either.)" if len(problems) > 1 else ""
            raise DataError(next(iter(problems.values())) + more)
        return inputs

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """As of :meth:`Dataset.try_read`; no picture is decoded twice."""
        inputs, problems = np.zeros((len(indices), *self.shape), np.uint8), {}
        for row, number in enumerate(self._require_in_range(indices).tolist()):
            try:
                inputs[row] = self._terms.form.decode(self._files.read(number))
            except Exception as error:
                log.debug("a picture cannot be read", exc_info=True)
                name = printable(self._found.names[number])
                problems[row] = f"{self._terms.root}: {name}: {reason_of(error)}"
        return inputs, problems

    def refresh(self) -> Dataset:
        """As of :meth:`Dataset.refresh`: new pictures are taken in, vanished ones left out.

        One that turns out damaged when it is read stays: it counts for nothing until it is whole again.
        """
        if isinstance(self._files, ZipMembers) or not self._may_have_changed():
            return self
        try:
            found, files = listed(self._terms.root, self._terms.folder, self._terms.form)
        except DataError as error:
            # The folder is gone: its records cannot be read, and add nothing.
            self.origin = replace(self.origin, left_out=(str(error),))
            return self
        known = set(self._found.names)
        new = [number for number, name in enumerate(found.names) if name not in known]
        now = _made(found, files, self._terms, new, starts=False)
        if now.names == self.names and now.origin == self.origin:
            self._found = now._found  # which knows when it was looked at
            return self
        return now

    def _may_have_changed(self) -> bool:
        """Whether a directory's time changed, or might have unseen: times are coarse."""
        if any(age_s < _PENDING_S for age_s in self._found.ages_s):
            return True  # A file that was incomplete may be whole by now.
        for name, changed_ns in self._found.watched.items():
            try:
                if (self._terms.root / name).stat().st_mtime_ns != changed_ns:
                    return True
            except OSError:
                return True
            if self._found.listed_at_ns - changed_ns < GRACE_S * 1e9:
                return True
        return False


def _made(
    found: Listing, files: PictureFiles, terms: PictureTerms, new: Sequence[int], *, starts: bool
) -> ImageDataset:
    """The dataset of the pictures that are whole and of a class; what only listing needs is let go of.

    Args:
        found: the pictures.
        files: their bytes.
        terms: of the dataset.
        new: those that were not looked at before.
        starts: trust a whole picture that is young: nothing says that a folder grows before it has.
    """
    numbers = {label: terms.classes.number(label) for label in set(found.labels)}
    unseen, keep, pending = set(new), [], []
    for place, (name, label) in enumerate(zip(found.names, found.labels, strict=True)):
        if numbers[label] is None:
            found.passed_over[
                f"in the folder {printable(label)!r}, which is no class; expected {terms.classes.expected()}"
            ] += 1
            continue
        try:
            if place in unseen:
                if not starts and found.ages_s[place] < GRACE_S:
                    raise DataError("it was written to a moment ago, and is left for later.")
                _require_whole(files, place, terms)
        except Exception as error:
            log.debug("a picture is left out", exc_info=True)
            found.problems[name] = reason_of(error)
            pending.append(found.ages_s[place])
        else:
            keep.append(place)
    labels = np.array([numbers[found.labels[place]] for place in keep], np.int64)
    found.names, found.labels, found.ages_s = [found.names[place] for place in keep], [], pending
    return ImageDataset(files.keep(keep), found, labels, terms)


def _require_whole(files: PictureFiles, number: int, terms: PictureTerms) -> None:
    """Raise unless a picture is all there, as far as a look at its two ends tells, else by decoding it."""
    if isinstance(files, ZipMembers):
        return  # Whose members have checksums, looked at when they are read.
    assert isinstance(files, FolderFiles)
    if not looks_whole(*files.ends(number)):
        terms.form.decode(files.read(number))
