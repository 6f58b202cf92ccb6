"""From the bytes of one picture to an array of the declared shape.

Pillow does the decoding; it is imported when the first picture is opened and comes with the extra
``images``. The answer for any file is an array or a sentence, and the memory it takes is bounded:

- A file of more than ``4 · max_pixels`` bytes is not read.
- A picture whose header tells of more than ``max_pixels`` is refused before it is decoded. The bound is on
  the picture as it is stored, not as it is scaled: a progressive JPEG has all its coefficients in memory even
  where an eighth of its size is asked for (8000 × 8000 pixels take 400 MiB). It does not follow from the
  declared size, because a camera's pictures are as large as its sensor, at any scale.
- Metadata are cut away unread (:mod:`dpagent.learning.data.formats.images.metadata`).
- Only the kinds of :data:`SUFFIXES` are decoded. TIFF is none: its directory alone, which is read when a file
  is opened, can be made to take any amount of memory.

Decoding takes at most some 12 bytes a pixel (CMYK in a progressive JPEG), besides the file. A decoder of WebP
takes 16 and the file once more, already when it is opened: of WebP, half as many pixels are allowed.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError, DpagentError
from dpagent.extras import extra_needed
from dpagent.learning.data.formats.images.metadata import webp_size, without_metadata
from dpagent.learning.data.formats.images.settings import MAX_PIXELS, Mode, shape_of
from dpagent.wording import counted, named

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES: Final = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".pnm"}
)
_BYTES_A_PIXEL: Final = 4

_FORMATS: Final = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM")
_SIDEWAYS: Final = (5, 6, 7, 8)
_GREY_MODES: Final = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L")
_UNSCALED: Final = ("I", "F")


@dataclass(frozen=True, slots=True)
class PictureForm:
    """The common form of all pictures. Public.

    Attributes:
        size: width and height in pixels; pictures of another size are scaled until they cover it, and
            the excess is cut off evenly.
        mode: ``grey`` is one channel, ``rgb`` three.
        max_pixels: of a picture as it is stored.
    """

    size: tuple[int, int]
    mode: Mode
    max_pixels: int = MAX_PIXELS

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a record: height, width, channels."""
        return shape_of(self.size, self.mode)

    def decode(self, data: bytes) -> NDArray[np.uint8]:
        """One picture, turned upright, as a record.

        Transparency is dropped, 16-bit greys keep their upper 8 bits, of an animation the first
        picture counts.

        Raises:
            DataError: the bytes are not a picture, or a damaged, truncated or gigantic one. The
                text has no name in it: the caller knows it.
            ConfigurationError: Pillow is not installed.
        """
        with _damage(), _opened(data, self.max_pixels) as (opened, orientation):
            if opened.format == "JPEG":
                # A large photograph is decoded at a half, a quarter or an eighth of its size.
                opened.draft(None, (2 * max(self.size), 2 * max(self.size)))
            opened.load()
            image = _in_mode(_upright(opened, orientation), self.mode)
            if image.size != self.size:
                image = _pillow("ImageOps").fit(image, self.size, method=_pillow("Image").Resampling.BILINEAR)
            return np.array(image, np.uint8).reshape(self.shape)


def read_form(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[tuple[int, int], Mode]:
    """Width and height as seen upright, and the mode, from the header of a picture alone.

    Raises:
        DataError, ConfigurationError: as of :meth:`PictureForm.decode`.
    """
    with _damage(), _opened(data, max_pixels) as (opened, orientation):
        size = opened.size[::-1] if orientation in _SIDEWAYS else opened.size
        return size, "grey" if opened.mode in _GREY_MODES else "rgb"


def most_bytes(max_pixels: int) -> int:
    """Bytes that the file of a picture may have."""
    return _BYTES_A_PIXEL * max_pixels


def looks_whole(begin: bytes, end: bytes) -> bool | None:
    """Whether a file is all there, judged by its first and last bytes; None where these do not tell."""
    if begin.startswith(b"\x89PNG"):
        return b"IEND" in end[-12:] or None
    if begin.startswith(b"\xff\xd8"):
        return end.endswith(b"\xff\xd9") or None
    return None


def require_pillow() -> None:
    """Raise :class:`ConfigurationError` unless pictures can be read here."""
    _pillow("Image")


def _pillow(name: str) -> ModuleType:
    with extra_needed("images", "Reading pictures"):
        from PIL import Image, ImageOps
    return {"Image": Image, "ImageOps": ImageOps}[name]


@contextlib.contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[tuple[Image, int]]:
    """The picture, of which no more than its header is read, and its orientation."""
    if len(data) > most_bytes(max_pixels):
        raise DataError(f"it has {counted(len(data), 'byte')}; expected at most {most_bytes(max_pixels):,}.")
    _require_modest(webp_size(data), max_pixels // 2)
    bare, orientation = without_metadata(data)
    with _pillow("Image").open(io.BytesIO(bare), formats=_FORMATS) as opened:
        _require_modest(opened.size, max_pixels)
        yield opened, orientation


def _require_modest(size: tuple[int, int] | None, max_pixels: int) -> None:
    if size is not None and size[0] * size[1] > max_pixels:
        raise DataError(
            f"it is {size[0]} × {size[1]} pixels large; expected at most {max_pixels:,} in all. Scale it"
            f" down, or raise {named('max_pixels')}."
        )


def _upright(image: Image, orientation: int) -> Image:
    turns = _pillow("Image").Transpose
    turn = {
        2: turns.FLIP_LEFT_RIGHT, 3: turns.ROTATE_180, 4: turns.FLIP_TOP_BOTTOM, 5: turns.TRANSPOSE,
        6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90,
    }.get(orientation)  # fmt: skip
    return image if turn is None else image.transpose(turn)


def _in_mode(image: Image, mode: Mode) -> Image:
    if image.mode in _UNSCALED:
        raise DataError(
            f"its pixels are of the mode {image.mode}, whose range is unknown; expected 8 or 16 bits a"
            " channel."
        )
    if image.mode.startswith("I;16"):
        pillow = _pillow("Image")
        image = pillow.fromarray((np.asarray(image, np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    wanted = "L" if mode == "grey" else "RGB"
    return image if image.mode == wanted else image.convert(wanted)


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Turn all errors of a decoder about a file's bytes into :class:`DataError`.

    All of them: decoders have raised nearly every kind of error about damaged files, and an error of a new
    kind must cost no more than its picture.
    """
    with warnings.catch_warnings():
        # Pillow warns of mere oddities; its own limit of pixels is not ours.
        warnings.simplefilter("ignore")
        try:
            yield
        except DpagentError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            if "cannot identify" in reason:
                reason = "it is not a picture of a known kind"
            raise DataError(f"{reason}.") from error
