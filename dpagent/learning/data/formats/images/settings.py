"""How pictures become records: the section ``images`` of the settings."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Final, Literal

from dpagent.learning.data.record_form import RecordForm
from dpagent.schema.limits import After, Limits

Mode = Literal["grey", "rgb"]
MAX_PIXELS: Final = 8 << 20
"""Unless more are allowed: a frame of 4K video, and what a board of 512 MiB can decode beside its agent."""

Pixels = Annotated[int, Limits(ge=1, le=4096)]


def _relative(folder: str) -> str:
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts or not folder:
        raise ValueError("expected a folder below the path, such as train, or . for the path itself")
    return str(path)


def shape_of(size: tuple[int, int], mode: Mode) -> tuple[int, int, int]:
    """Height, width and channels of a picture of that width and height."""
    return size[1], size[0], 1 if mode == "grey" else 3


class ImageForm(RecordForm):
    """What every picture is made into."""

    compared: ClassVar = ("size", "mode")

    size: Annotated[list[Pixels], Limits(min_length=2, max_length=2)] | None = None
    """Width and height that every picture is scaled until it covers, then cut to."""
    mode: Mode | None = None
    """One channel or three."""

    @property
    def record_shape(self) -> tuple[int, ...] | None:
        """As of :class:`RecordForm`: height, width, channels."""
        pair = self.pair()
        return None if pair is None or self.mode is None else shape_of(pair, self.mode)

    def pair(self) -> tuple[int, int] | None:
        """The size as width and height."""
        return None if self.size is None else (self.size[0], self.size[1])


class ImageSettings(ImageForm):
    """How pictures become records."""

    folder: Annotated[str, After(_relative)] | None = None
    """The folder below ``path`` that holds the class folders; ``.`` for ``path`` itself."""
    max_pixels: Annotated[int, Limits(ge=1, le=1 << 28)] = MAX_PIXELS
    """Largest number of pixels of a picture as it is stored, of WebP half as many. Decoding takes up to 20
    bytes for each, its file included."""
