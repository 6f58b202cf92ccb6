"""Pictures by class, decoded when they are asked for.

The folder or archive is looked through once. A picture whose end is missing is left out and said; in a folder
it is looked at again at the next refresh, because a camera may be writing it. One that is damaged in its
middle shows only when it is decoded. The classes and the form of the records stay as they were when the
folder was opened.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.archive import ZipMembers
from dpagent.learning.data.classes import ClassTable, unlisted
from dpagent.learning.data.dataset import Dataset, Indices, Origin
from dpagent.learning.data.format import Half
from dpagent.learning.data.formats.images.decoding import (
    Mode,
    PictureForm,
    looks_whole,
    read_form,
    require_pillow,
)
from dpagent.learning.data.formats.images.files import (
    GRACE_S,
    FolderFiles,
    Listing,
    PictureFiles,
    choose_half,
    list_folder,
    list_zip,
    printable,
)
from dpagent.learning.data.stored import require_readable
from dpagent.wording import counted, named

_PENDING_S: Final = 600.0
"""A picture that is not whole and was written to within this is looked at again at every refresh."""


def _no_size() -> str:
    """Advice for pictures that differ in size."""
    return (
        f"Give all boards the same {named('size')} and {named('mode')}, so that every picture is made to fit."
    )


@dataclass(frozen=True, slots=True)
class _Terms:
    """The properties that stay as they were when the pictures were first opened."""

    path: Path
    form: PictureForm
    classes: ClassTable
    one_size: tuple[int, int]
    """Width and height that a picture must have where the form gives none."""


def open_images(
    path: str | Path,
    half: Half = "train",
    classes: Sequence[str] | None = None,
    *,
    size: tuple[int, int] | None = None,
    mode: Mode | None = None,
) -> Dataset:
    """A folder of class folders with pictures, or a zip archive of one.

    Args:
        path: the folder or archive.
        half: which of ``train`` and ``test`` to take, if it has such folders.
        classes: the public list of class folders; without it, those that are here, sorted.
        size: width and height that every picture is scaled and cut to; without it all must have one size.
        mode: ``grey`` or ``rgb``; without it, that of the first picture.

    Raises:
        DataError: there is no readable picture, a class is not in the list, or sizes differ.
        ConfigurationError: Pillow is not installed.
    """
    path = Path(path)
    require_readable(path)
    require_pillow()
    if path.is_dir():
        path = choose_half(path, half)
        found = list_folder(path)
        files: PictureFiles = FolderFiles(path, found.names)
        what = "a folder of pictures by class"
    else:
        found, files = list_zip(path, half)
        what = "a zip archive of pictures by class"
    table = ClassTable(found.classes, classes)
    if unknown := sorted(label for label in set(found.labels) if table.number(label) is None):
        raise DataError(
            f"{path} has pictures in the folder {printable(unknown[0])!r}, which is no class; expected"
            f" {table.expected()}. Move them, or correct {named('classes')}."
        )
    if not found.names:
        left = f" Left out: {'; '.join(found.sentences()[:3])}" if found.sentences() else ""
        raise DataError(
            f"{path} holds no pictures in class folders; expected a folder for each class with pictures in it"
            f" (PNG, JPEG, …).{left}"
        )
    first, first_mode = _first_form(path, files, found)
    terms = _Terms(path, PictureForm(size, mode or first_mode), table, first)
    keep = _check(files, found, terms, range(len(found.names)), strict=True)
    if not keep:
        raise DataError(f"{path}: no picture can be read. {'; '.join(found.sentences()[:3])}")
    return _made(files, found, _numbers(found, table), keep, terms, f"{path}, {what}")


class ImageDataset(Dataset):
    """Pictures in files or in an archive; see :func:`open_images`."""

    def __init__(
        self,
        files: PictureFiles,
        found: Listing,
        labels: NDArray[np.int64],
        terms: _Terms,
        source: str,
    ) -> None:
        self._files, self._found, self._terms = files, found, terms
        width, height = terms.form.size or terms.one_size
        warnings = [] if terms.classes.is_listed or not terms.classes.names else [unlisted()]
        if terms.form.size is None:
            warnings.append(f"The pictures are taken at the size they have. {_no_size()}")
        super().__init__(
            labels, terms.classes.count, shape=(height, width, 1 if terms.form.mode == "grey" else 3),
            dtype=np.dtype(np.uint8), class_names=terms.classes.names,
            origin=Origin("images", source, found.sentences(), tuple(warnings)),
        )  # fmt: skip

    @property
    def names(self) -> Sequence[str]:
        """The pictures' paths, relative to the folder."""
        return self._found.names

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
                picture = self._terms.form.decode(self._files.read(number))
                if picture.shape != self.shape:
                    raise DataError(_other_size(picture.shape[1::-1], self._terms.one_size))
                inputs[row] = picture
            except DataError as error:
                problems[row] = f"{self._terms.path}: {printable(self._found.names[number])}: {error}"
        return inputs, problems

    def refresh(self) -> Dataset:
        """As of :meth:`Dataset.refresh`: new pictures are taken in, vanished ones left out.

        One that turns out damaged when it is read stays: it counts for nothing until it is whole again.
        """
        if isinstance(self._files, ZipMembers) or not self._may_have_changed():
            return self
        try:
            found = list_folder(self._terms.path)
            known = set(self._found.names)
            new = [number for number, name in enumerate(found.names) if name not in known]
            files = FolderFiles(self._terms.path, found.names)
            keep = _check(files, found, self._terms, new, strict=False)
            now = _made(files, found, _numbers(found, self._terms.classes), keep, self._terms, self)
        except DataError as error:
            # The folder is gone or empty: the earlier records are the best there is.
            self.origin = replace(self.origin, left_out=(str(error),))
            return self
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
                if (self._terms.path / name).stat().st_mtime_ns != changed_ns:
                    return True
            except OSError:
                return True
            if self._found.listed_at_ns - changed_ns < GRACE_S * 1e9:
                return True
        return False


def _first_form(path: Path, files: PictureFiles, found: Listing) -> tuple[tuple[int, int], Mode]:
    """Size and mode of the first picture that can be read."""
    problem = ""
    for number, name in enumerate(found.names):
        try:
            return read_form(io.BytesIO(files.read(number)))
        except DataError as error:
            problem = problem or f"{printable(name)}: {error}"
    raise DataError(
        f"{path}: of {counted(len(found.names), 'picture')} none can be read. The first: {problem}"
    )


def _check(
    files: PictureFiles, found: Listing, terms: _Terms, numbers: Sequence[int], *, strict: bool
) -> list[int]:
    """Which pictures to keep; the problems of the others are noted.

    Args:
        numbers: those that were not looked at before.
        strict: raise for a class or a size that does not fit, instead of leaving the picture out; and trust a
            whole picture that is young: nothing says that a folder grows before it has.
    """
    out: set[int] = set()
    for number in numbers:
        name = found.names[number]
        try:
            if not strict and terms.classes.number(found.labels[number]) is None:
                raise DataError(f"its folder is no class; expected {terms.classes.expected()}.")
            if not strict and found.ages_s[number] < GRACE_S:
                raise DataError("it was written to a moment ago, and is left for later.")
            _require_whole(files, number, terms)
            if terms.form.size is None:
                size, _ = read_form(io.BytesIO(files.read(number)))
                if size != terms.one_size:
                    text = _other_size(size, terms.one_size)
                    if strict:
                        raise _Misfit(f"{terms.path}: {printable(name)}: {text}")
                    raise DataError(text)
        except _Misfit:
            raise
        except DataError as error:
            out.add(number)
            found.problems[name] = str(error)
    unchecked = set(range(len(found.names))).difference(numbers)
    return sorted((set(numbers) | unchecked) - out)


class _Misfit(DataError):
    """A picture that is whole and does not fit the others."""


def _require_whole(files: PictureFiles, number: int, terms: _Terms) -> None:
    """Raise unless a picture is all there, as far as a look at its two ends tells, else by decoding it."""
    if isinstance(files, ZipMembers):
        return  # Whose members have checksums, looked at when they are read.
    assert isinstance(files, FolderFiles)
    if not looks_whole(*files.ends(number)):
        terms.form.decode(files.read(number))


def _numbers(found: Listing, classes: ClassTable) -> NDArray[np.int64]:
    """The class of each picture, -1 for none."""
    numbers = {label: classes.number(label) for label in set(found.labels)}
    known = {label: -1 if number is None else number for label, number in numbers.items()}
    return np.array([known[label] for label in found.labels], np.int64)


def _made(
    files: PictureFiles,
    found: Listing,
    labels: NDArray[np.int64],
    keep: list[int],
    terms: _Terms,
    before: ImageDataset | str,
) -> ImageDataset:
    """The dataset of the kept files; drops the data that only listing needs.

    Args:
        before: the earlier dataset, or the name of its source.
    """
    kept, out = set(keep), range(len(found.ages_s))
    found.ages_s = [found.ages_s[number] for number in out if number not in kept]
    found.names, found.labels = [found.names[number] for number in keep], []
    source = before if isinstance(before, str) else before.origin.source
    return ImageDataset(files.keep(keep), found, labels[keep], terms, source)


def _other_size(size: tuple[int, ...], expected: tuple[int, int]) -> str:
    came, first = f"{size[0]} × {size[1]}", f"{expected[0]} × {expected[1]}"
    return f"it is {came} pixels large; the first picture is {first}. {_no_size()}"
