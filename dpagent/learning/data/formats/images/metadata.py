"""The bytes of a picture without what is no pixel: Exif, colour profiles, comments, texts, previews.

None of it changes a record, but for one number: which side is up. All of it is input to parsers that can be
made to take memory out of all proportion: a compressed text, or an Exif directory with thousands of entries
that each name the same megabytes. So it is cut away before Pillow sees the file, and the one number is read
here. Sources: ITU-T T.81, annex B (JPEG); PNG, third edition, section 5; Exif 2.32, section 4.6; the WebP
container specification.
"""

from __future__ import annotations

import struct
from typing import Final

from dpagent.errors import DataError

_ORIENTATION: Final = 0x0112
_SHORT: Final = 3
_MOST_ENTRIES: Final = 1_024

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS: Final = (b"IHDR", b"PLTE", b"IDAT", b"IEND")

_STANDALONE: Final = frozenset({0x01, *range(0xD0, 0xD8)})
_START_OF_SCAN: Final = 0xDA
_EXIF: Final = 0xE1
_COLOURS: Final = (0xE0, 0xEE)
"""JFIF and Adobe: they tell how colours are coded, in a few bytes."""
_LONGEST_COLOURS: Final = 64
_METADATA: Final = frozenset({*range(0xE0, 0xF0), 0xFE})


def without_metadata(data: bytes) -> tuple[bytes, int]:
    """A picture without its metadata, and its orientation.

    Args:
        data: a file of any kind. What is neither JPEG nor PNG stays as it is.

    Returns:
        The bytes for the decoder, and the orientation of Exif, 1 to 8; 1 where none is given.
    """
    if data.startswith(b"\xff\xd8"):
        return _of_jpeg(data)
    if data.startswith(_PNG):
        return _of_png(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return data, _of_webp(data)
    return data, 1


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP picture, which its decoder sets memory aside for when it is opened.

    Returns:
        None: it is no WebP picture.

    Raises:
        DataError: it is one of no known form.
    """
    if not data.startswith(b"RIFF") or data[8:12] != b"WEBP":
        return None
    kind, header = data[12:16], data[20:30]
    if kind == b"VP8X" and len(header) == 10:
        return 1 + int.from_bytes(header[4:7], "little"), 1 + int.from_bytes(header[7:10], "little")
    if kind == b"VP8 " and len(header) == 10:
        width, height = struct.unpack_from("<HH", header, 6)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and len(header) >= 5:
        bits = int.from_bytes(header[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    raise DataError("it is a WebP picture of no known form.")


def _of_jpeg(data: bytes) -> tuple[bytes, int]:
    kept, place, orientation = bytearray(data[:2]), 2, 1
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # filling
            place += 1
            continue
        if marker in _STANDALONE:
            place += 2
            continue
        if marker == _START_OF_SCAN:
            break
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == _EXIF and orientation == 1 and data[place + 4 : place + 10] == b"Exif\0\0":
            orientation = _orientation(data[place + 10 : end])
        if marker not in _METADATA or (marker in _COLOURS and end - place <= _LONGEST_COLOURS):
            kept += data[place:end]
        place = end
    kept += memoryview(data)[place:]
    return bytes(kept), orientation


def _of_png(data: bytes) -> tuple[bytes, int]:
    kept, place, orientation = bytearray(_PNG), len(_PNG), 1
    while place + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, place)
        end = place + 12 + size
        if kind in _PNG_CHUNKS:
            kept += memoryview(data)[place:end]
        elif kind == b"eXIf" and orientation == 1:
            orientation = _orientation(data[place + 8 : end - 4])
        place = end
    return bytes(kept), orientation


def _of_webp(data: bytes) -> int:
    place = 12
    while place + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, place)
        if kind == b"EXIF":
            return _orientation(data[place + 8 : place + 8 + size].removeprefix(b"Exif\0\0"))
        place += 8 + size + size % 2
    return 1


def _orientation(exif: bytes) -> int:
    """The orientation in the first directory of Exif data; 1 where there is none."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 10:
        return 1
    (place,) = struct.unpack_from(f"{order}I", exif, 4)
    if place + 2 > len(exif):
        return 1
    (entries,) = struct.unpack_from(f"{order}H", exif, place)
    for entry in range(min(entries, _MOST_ENTRIES)):
        start = place + 2 + 12 * entry
        if start + 12 > len(exif):
            return 1
        tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, start)
        if tag == _ORIENTATION:
            return value if kind == _SHORT and 1 <= value <= 8 else 1
    return 1
