"""Pictures by class as a format: settings, recognition, opening, and pictures without classes."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from dpagent.configuration import Settings
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.format import Format, Source
from dpagent.learning.data.formats.images.dataset import open_images
from dpagent.learning.data.formats.images.decoding import Mode
from dpagent.learning.data.formats.images.files import has_halves, holds_pictures, is_picture
from dpagent.learning.data.formats.images.unlabelled import PictureReader, picture_form
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.location import Location
from dpagent.wording import counted, named

_MODES: Final[dict[int, Mode]] = {1: "grey", 3: "rgb"}

Pixels = Annotated[int, Field(ge=1, le=4096)]


class ImageSettings(Settings):
    """How pictures become records."""

    size: Annotated[list[Pixels], Field(min_length=2, max_length=2)] | None = None
    """Width and height that every picture is scaled until it covers, then cut to. Without it, all must have
    one size."""
    mode: Mode | None = None
    """One channel or three; without it, as the first picture has it."""

    def pair(self) -> tuple[int, int] | None:
        """The size as width and height."""
        return None if self.size is None else (self.size[0], self.size[1])


class ImageFormat(Format[ImageSettings]):
    """A folder with a folder of pictures for each class, or a zip archive of one."""

    kind, title, example, section = (
        "images", "a folder or zip archive of pictures by class", "NEW.png", ImageSettings,
    )  # fmt: skip

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

    def open(self, source: Source, section: ImageSettings) -> Dataset:
        """As of :class:`Format`."""
        return open_images(source.path, source.half, source.classes, size=section.pair(), mode=section.mode)

    def has_test_half(self, path: Path) -> bool:
        """As of :class:`Format`."""
        return has_halves(path)

    def fitted(self, section: ImageSettings, shape: tuple[int, ...]) -> ImageSettings:
        """As of :class:`Format`: size and mode, unless they are set."""
        if len(shape) != 3 or shape[2] not in _MODES:
            return section
        height, width, channels = shape
        given = section.model_dump(exclude_none=True)
        return ImageSettings.model_validate({"size": [width, height], "mode": _MODES[channels]} | given)

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
        reader = PictureReader(picture_form(target, wanted.pair(), wanted.mode), target, say)
        path = source.path
        if path.is_file() and not zipfile.is_zipfile(path) and path.suffix.lower() != ".zip":
            return iter([reader.read_file(path)])
        return reader.read_many(path, source.half)


def _loose(location: Location) -> list[str]:
    return [name for name in location.names if is_picture(name) and not name.startswith(".")]
