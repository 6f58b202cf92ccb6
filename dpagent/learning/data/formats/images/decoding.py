"""From the bytes of one picture to an array of the public shape.

Pillow does the decoding; it is imported when the first picture is opened and comes with the extra
``images``. The answer for any file is an array or a sentence: a picture that would decompress to
more than :data:`MAX_PIXELS` is refused before it does.
"""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import IO, TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.extras import extra_needed
from dpagent.wording import named

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["grey", "rgb"]

SUFFIXES: Final = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm"}
)
MAX_PIXELS: Final = 64 << 20
_MOST_DECODED: Final = 16 << 20
"""Pixels of a picture as it is decoded: it takes some nine bytes for each, and a board may have 512 MiB."""

_FORMATS: Final = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_ORIENTATION: Final = 0x0112  # the tag of Exif
_SIDEWAYS: Final = (5, 6, 7, 8)
_GREY_MODES: Final = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L")
_UNSCALED: Final = ("I", "F")
_DAMAGE: Final = (
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, AttributeError, ArithmeticError,
    RuntimeError, AssertionError, MemoryError, struct.error, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PictureForm:
    """The common form of all pictures. Public.

    Attributes:
        size: width and height in pixels; pictures of another size are scaled until they cover it, and
            the excess is cut off evenly. None: they must have one size as they are.
        mode: ``grey`` is one channel, ``rgb`` three.
    """

    size: tuple[int, int] | None
    mode: Mode

    def decode(self, data: bytes) -> NDArray[np.uint8]:
        """One picture, turned upright, as ``(height, width, channels)`` uint8.

        Transparency is dropped, 16-bit greys keep their upper 8 bits, of an animation the first
        picture counts.

        Raises:
            DataError: the bytes are not a picture, or a damaged, truncated or gigantic one. The
                text has no name in it: the caller knows it.
            ConfigurationError: Pillow is not installed.
        """
        with _damage():
            pillow, ops = _pillow("Image"), _pillow("ImageOps")
            with _open(io.BytesIO(data)) as opened:
                if self.size is not None and opened.format in ("JPEG", "MPO"):
                    # A large photograph is decoded at a half, a quarter or an eighth of its size.
                    opened.draft(None, (2 * max(self.size), 2 * max(self.size)))
                if opened.width * opened.height > _MOST_DECODED:
                    raise DataError(
                        f"it is {opened.width} × {opened.height} pixels large; expected at most "
                        f"{_MOST_DECODED:,} in all, but of a JPEG that {named('size')} scales. Scale it down."
                    )
                opened.load()
                upright = _in_mode(ops.exif_transpose(opened), self.mode)
                if self.size is not None and upright.size != self.size:
                    upright = ops.fit(upright, self.size, method=pillow.Resampling.BILINEAR)
                pixels = np.array(upright, np.uint8)
        return pixels[..., np.newaxis] if pixels.ndim == 2 else pixels


def read_form(stream: IO[bytes]) -> tuple[tuple[int, int], Mode]:
    """Width and height as seen upright, and the mode, from the header of a picture alone.

    Raises:
        DataError, ConfigurationError: as of :meth:`PictureForm.decode`.
    """
    with _damage(), _open(stream) as opened:
        width, height = opened.size
        if "exif" in opened.info and opened.getexif().get(_ORIENTATION) in _SIDEWAYS:
            width, height = height, width
        return (width, height), "grey" if opened.mode in _GREY_MODES else "rgb"


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


def _open(stream: IO[bytes]) -> Image:
    pillow = _pillow("Image")
    opened: Image = pillow.open(stream, formats=_FORMATS)
    width, height = opened.size
    if width * height > MAX_PIXELS:
        raise DataError(
            f"it is {width} × {height} pixels large; expected at most {MAX_PIXELS:,} in all. Scale it down."
        )
    return opened


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
    return image.convert("L" if mode == "grey" else "RGB")


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Turn all errors of a decoder about a file's bytes into :class:`DataError`."""
    errors = (*_DAMAGE, _pillow("Image").DecompressionBombError)
    with warnings.catch_warnings():
        # Pillow warns of mere oddities; its own limit of pixels is above ours.
        warnings.simplefilter("ignore")
        try:
            yield
        except errors as error:
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            if "cannot identify" in reason:
                reason = "it is not a picture of a known kind"
            raise DataError(f"{reason}.") from error
