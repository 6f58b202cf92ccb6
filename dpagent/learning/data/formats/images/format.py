"""Pictures by class as a format: settings, recognition, opening, and pictures without classes."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from dpagent.errors import DataError
from dpagent.learning.data.classes import Classes, classes_of_texts, warnings_about
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.format import Format, Inferred, Source
from dpagent.learning.data.formats.images.dataset import PictureTerms, list_pictures, listed, open_pictures
from dpagent.learning.data.formats.images.decoding import PictureForm, read_form, require_pillow
from dpagent.learning.data.formats.images.files import (
    Listing,
    PictureFiles,
    class_folder,
    has_halves,
    holds_pictures,
    is_picture,
    printable,
)
from dpagent.learning.data.formats.images.settings import ImageForm, ImageSettings, Mode
from dpagent.learning.data.formats.images.unlabelled import PictureReader, picture_form
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.location import Location
from dpagent.wording import counted, named

_MARGIN_BYTES: Final = 96 << 20
_MODES: Final[dict[int, Mode]] = {1: "grey", 3: "rgb"}


class ImageFormat(Format[ImageSettings]):
    """A folder with a folder of pictures for each class, or a zip archive of one."""

    kind, title, example, section = (
        "images", "a folder or zip archive of pictures by class", "NEW.png", ImageSettings,
    )  # fmt: skip
    form, dtype = ImageForm, "uint8"

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        if location.is_folder:
            return holds_pictures(location.path)
        # An archive whose list cannot be read is told so when it is opened.
        damaged = location.name.endswith(".zip") and not location.members
        return damaged or any(map(is_picture, location.members))

    def hint(self, location: Location) -> str:
        """As of :class:`Format`."""
        path, loose = location.path, _loose(location)
        if loose:
            return (
                f"It holds {counted(len(loose), 'picture')}, and none lies in a class folder: make a folder"
                f" for each class and move the pictures in, such as {path / 'CLASS' / loose[0]}; or, if"
                f" {path.absolute().name!r} is itself a class, give the folder above it."
            )
        if not location.is_folder and is_picture(path.name):
            return (
                "It is a single picture, and nothing tells its class. Give the folder that holds a folder of"
                " pictures for each class; `dpagent predict` takes single pictures."
            )
        archives = [name for name in location.names if name.endswith(".zip")]
        return f"Give the path of the file: {path / archives[0]}?" if archives else ""

    def undeclared(self, source: Source, section: ImageSettings) -> list[str]:
        """As of :class:`Format`: size, mode, and where the class folders are."""
        return [f"{self.kind}.{key}" for key in ("size", "mode", "folder") if getattr(section, key) is None]

    def infer(self, source: Source, section: ImageSettings) -> Inferred[ImageSettings]:
        """As of :class:`Format`: the folders' names, and the form of the first picture, if all are alike."""
        require_pillow()
        path = source.path
        warnings: list[str] = []
        folder = section.folder or class_folder(path, source.half)
        form = PictureForm((1, 1), "rgb", section.max_pixels)
        root = path / folder if path.is_dir() else path
        found, files = listed(root, folder, form)
        if not found.names:
            left = f" Left out: {'; '.join(found.sentences()[:3])}" if found.sentences() else ""
            raise DataError(
                f"{root} holds no pictures in class folders; expected a folder for each class with pictures"
                f" in it (PNG, JPEG, …).{left}"
            )
        classes = source.classes
        if classes is None:
            classes = _classes(root, found)
            warnings += warnings_about(classes)
        size, mode = section.size, section.mode
        if size is None or mode is None:
            pair, first_mode = _common_form(root, found, files, section)
            mode = mode or first_mode
            if size is None:
                size = list(pair)
                warnings.append(f"The pictures are taken at the size they have. {_no_size()}")
        if not path.is_dir():
            warnings.append("A board takes pictures from a folder: unpack the archive there.")
        complete = section.with_values({"size": size, "mode": mode, "folder": folder})
        return Inferred(replace(source, classes=classes), complete, tuple(warnings))

    def open(self, source: Source, section: ImageSettings) -> Dataset:
        """As of :class:`Format`."""
        return open_pictures(self._terms(source, section))

    def listed(self, source: Source, section: ImageSettings, *, growing: bool) -> Dataset:
        """As of :class:`Format`: whether a picture is whole shows when it is decoded."""
        return list_pictures(self._terms(source, section), growing=growing)

    def decoder_bytes(self, section: ImageSettings) -> int:
        """As of :class:`Format`: 20 bytes for each pixel of the largest picture, and its record."""
        return 20 * section.max_pixels + _MARGIN_BYTES

    def _terms(self, source: Source, section: ImageSettings) -> PictureTerms:
        require_pillow()
        size, mode, folder = section.pair(), section.mode, section.folder
        assert size is not None
        assert mode is not None
        assert folder is not None
        is_folder = source.path.is_dir()
        if source.declared_records is not None and not is_folder:
            raise DataError(
                f"{source.path} is no folder; expected one, since one odd entry in an archive's list would"
                " keep all others out. Unpack it there."
            )
        what = "a folder" if is_folder else "a zip archive"
        return PictureTerms(
            root=source.path / folder if is_folder else source.path,
            folder=folder,
            form=PictureForm(size, mode, section.max_pixels),
            classes=source.class_table,
            source=f"{source.path}, {what} of pictures by class",
            most=None if source.declared_records is None else source.most_listed(),
        )

    def has_test_half(self, path: Path, section: ImageSettings) -> bool:
        """As of :class:`Format`."""
        return section.folder is None and has_halves(path)

    def fitted(self, section: ImageSettings, shape: tuple[int, ...]) -> ImageSettings:
        """As of :class:`Format`: size and mode, unless they are set."""
        if len(shape) != 3 or shape[2] not in _MODES:
            return section
        height, width, channels = shape
        given = section.as_dict(only_set=True)
        return ImageSettings.checked({"size": [width, height], "mode": _MODES[channels]} | given)

    def advice_on_shape(self, shape: tuple[int, ...]) -> str:
        """As of :class:`Format`."""
        wanted = self.fitted(ImageSettings(), shape)
        if wanted.size is None:
            return ""
        return f"Read them with {named('size', wanted.size)} and {named('mode', wanted.mode)}"

    def recognises_unlabelled(self, location: Location) -> bool:
        """As of :class:`Format`: a picture, or pictures in no class folder."""
        return bool(_loose(location)) or (not location.is_folder and is_picture(location.path.name))

    def unlabelled(self, source: Source, section: ImageSettings, target: Target, say: Say) -> Iterator[Input]:
        """As of :class:`Format`. A picture in a folder that is called as a class is of that class."""
        wanted = self.fitted(section, target.shape)
        reader = PictureReader(picture_form(target, wanted), target, say)
        path = source.path
        if path.is_file() and not zipfile.is_zipfile(path) and path.suffix.lower() != ".zip":
            return iter([reader.read_file(path)])
        return reader.read_many(path, section.folder or class_folder(path, source.half))


def _loose(location: Location) -> list[str]:
    return [name for name in location.names if is_picture(name) and not name.startswith(".")]


def _classes(root: Path, found: Listing) -> Classes:
    try:
        return classes_of_texts(found.classes)
    except DataError as error:
        raise DataError(f"{root}: {error}") from error


def _common_form(
    root: Path, found: Listing, files: PictureFiles, section: ImageSettings
) -> tuple[tuple[int, int], Mode]:
    """Size and mode of the first picture that can be read; unless a size is set, all must have that size."""
    first: tuple[tuple[int, int], Mode] | None = None
    problem = ""
    for number, name in enumerate(found.names):
        try:
            form = read_form(files.read(number), section.max_pixels)
        except DataError as error:
            problem = problem or f"{printable(name)}: {error}"
            continue
        first = first or form
        if section.size is not None:
            break
        if form[0] != first[0]:
            came, expected = (f"{size[0]} × {size[1]}" for size in (form[0], first[0]))
            raise DataError(
                f"{root}: {printable(name)}: it is {came} pixels large; the first picture is {expected}."
                f" {_no_size()}"
            )
    if first is None:
        raise DataError(
            f"{root}: of {counted(len(found.names), 'picture')} none can be read. The first: {problem}"
        )
    return first


def _no_size() -> str:
    """Advice for pictures that differ in size."""
    return (
        f"Give all boards the same {named('size')} and {named('mode')}, so that every picture is made to fit."
    )
