"""Files made to take a decoder's memory, or to break it, each by a function that writes it."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

AT_THE_BOUND = (4096, 2048)
"""Width and height of the largest picture that is decoded by default."""


def _saved(mode: str, size: tuple[int, int], kind: str, *, rows: int = 64, **options: object) -> bytes:
    """A picture of noise in its first rows and flat below."""
    width, height = size
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.zeros((height, width, channels), np.uint8)
    top = values[:rows]
    top[:] = np.random.default_rng(0).integers(0, 256, top.shape)
    buffer = io.BytesIO()
    Image.fromarray(values[..., 0] if channels == 1 else values, mode).save(buffer, kind, **options)
    return buffer.getvalue()


def progressive(size: tuple[int, int] = (8000, 8000)) -> bytes:
    """The JPEG that takes six bytes a pixel at whatever size it is asked for."""
    return _saved("RGB", size, "JPEG", progressive=True, subsampling=0, quality=30)


def slow_jpeg(scans: int = 20_000) -> bytes:
    """A small file whose last scan, of a few bytes and all pixels, stands as often: a minute of decoding."""
    data = _saved("L", AT_THE_BOUND, "JPEG", rows=0, progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(
    size: tuple[int, int], depth: int, colour: int, row_bytes: int, *, interlaced: bool = False
) -> bytes:
    """A flat PNG of any form, with as many bytes of pixels as it should have, or more; but not gigabytes."""
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, int(interlaced))
    packer = zlib.compressobj(9)
    rows = min(size[1] * (2 if interlaced else 1), 5_000)
    body = b"".join(packer.compress(bytes(row_bytes + 1)) for _ in range(rows))
    palette = _chunk(b"PLTE", bytes(range(256)) * 3) if colour == 3 else b""
    pixels = _chunk(b"IDAT", body + packer.flush())
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + palette + pixels + _chunk(b"IEND", b"")


def _with_chunks(png: bytes, *chunks: bytes) -> bytes:
    place = png.index(b"IDAT") - 4
    return png[:place] + b"".join(chunks) + png[place:]


def small_png() -> bytes:
    """A picture of 8 × 8 pixels."""
    return _saved("RGB", (8, 8), "PNG")


def _exif(size: int, entries: int) -> bytes:
    """A directory whose entries each name nearly all of it."""
    start = 10 + 12 * entries
    table = b"".join(
        struct.pack("<HHII", 20_000 + number, 1, size - start, start) for number in range(entries)
    )
    return (b"II*\0" + struct.pack("<IH", 8, entries) + table).ljust(size, b"\1")


def jpeg_with_exif_of_many_segments() -> bytes:
    """16 MiB of Exif in segments, as Pillow joins them: 4,000 entries that each name 16 MiB."""
    exif, jpeg = _exif(16 << 20, 4_000), _saved("RGB", (8, 8), "JPEG")
    pieces = [exif[start : start + 65_000] for start in range(0, len(exif), 65_000)]
    segments = [b"\xff\xe1" + struct.pack(">H", len(piece) + 8) + b"Exif\0\0" + piece for piece in pieces]
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def webp_of_a_canvas_too_large() -> bytes:
    """An animation that says that its canvas has 268 million pixels."""
    first = Image.new("RGB", (8, 8))
    buffer = io.BytesIO()
    first.save(buffer, "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")])
    data = bytearray(buffer.getvalue())
    assert data[12:16] == b"VP8X"
    data[24:30] = (16_382).to_bytes(3, "little") * 2
    return bytes(data)


def gif_of_a_large_screen() -> bytes:
    """A frame of one pixel on a screen of 65,535 × 65,535."""
    data = bytearray(_saved("L", (1, 1), "GIF"))
    data[6:10] = b"\xff\xff\xff\xff"
    return bytes(data)


def tiff_with_a_large_directory() -> bytes:
    """30,000 entries that each name the same megabyte; by another name, as a picture may be called."""
    return _exif(4 << 20, 30_000)


def animated_gif() -> bytes:
    """A thousand frames, of which one counts."""
    frames = [Image.new("L", (512, 512), number % 256) for number in range(1_000)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


PICTURES: dict[str, Callable[[], bytes]] = {
    "progressive.jpg": progressive,
    "progressive-cmyk-at-the-bound.jpg": lambda: _saved(
        "CMYK", AT_THE_BOUND, "JPEG", progressive=True, subsampling=0
    ),
    "at-the-bound.jpg": lambda: _saved("RGB", AT_THE_BOUND, "JPEG", subsampling=0),
    "rgba-at-the-bound.png": lambda: _saved("RGBA", AT_THE_BOUND, "PNG"),
    "16-bit-interlaced-at-the-bound.png": lambda: _png(
        AT_THE_BOUND, 16, 6, 8 * AT_THE_BOUND[0], interlaced=True
    ),
    "16-bit-grey-at-the-bound.png": lambda: _png(AT_THE_BOUND, 16, 0, 2 * AT_THE_BOUND[0]),
    "palette-at-the-bound.png": lambda: _png(AT_THE_BOUND, 8, 3, AT_THE_BOUND[0]),
    "huge.png": lambda: _png((60_000, 60_000), 8, 2, 10),
    "texts.png": lambda: _with_chunks(
        small_png(), *(_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1_000_000))) for _ in range(60))
    ),
    "profile.png": lambda: _with_chunks(
        small_png(), _chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(200 << 20)))
    ),
    "exif.png": lambda: _with_chunks(small_png(), _chunk(b"eXIf", _exif(16 << 20, 4_000))),
    "exif.jpg": jpeg_with_exif_of_many_segments,
    "comments.jpg": lambda: (lambda jpeg: jpeg[:2] + (b"\xff\xfe\xff\xff" + bytes(65_533)) * 400 + jpeg[2:])(
        _saved("RGB", (8, 8), "JPEG")
    ),
    "at-the-bound.webp": lambda: _saved("RGBA", (2048, 2048), "WEBP", lossless=True),
    "noise-at-the-bound.webp": lambda: _saved(
        "RGB", (2048, 2048), "WEBP", rows=2048, lossless=True, method=0, quality=0
    ),
    "beyond-the-bound.webp": lambda: _saved("RGB", AT_THE_BOUND, "WEBP"),
    "noise-at-the-bound.png": lambda: _saved("RGB", AT_THE_BOUND, "PNG", rows=2048, compress_level=1),
    "canvas.webp": webp_of_a_canvas_too_large,
    "screen.gif": gif_of_a_large_screen,
    "at-the-bound.gif": lambda: _saved("L", AT_THE_BOUND, "GIF"),
    "animated.gif": animated_gif,
    "at-the-bound.bmp": lambda: _saved("RGB", AT_THE_BOUND, "BMP"),
    "at-the-bound.ppm": lambda: _saved("RGB", AT_THE_BOUND, "PPM"),
    "directory.png": tiff_with_a_large_directory,
    "cut.png": lambda: _saved("RGB", AT_THE_BOUND, "PNG")[:-2_000],
    "cut.jpg": lambda: progressive(AT_THE_BOUND)[:-2_000],
    "nothing-but-zeros.jpg": lambda: bytes(16 << 20),
}
"""Pictures by their names; most are refused, some decoded."""


def gigabyte(path: Path, begin: bytes = b"", end: bytes = b"") -> Path:
    """A file with a gigabyte of null bytes that take no disk."""
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(len(begin) + (1 << 30))
        file.seek(0, os.SEEK_END)
        file.write(end)
    return path


def header_of(shape: tuple[int, ...], descr: str, version: tuple[int, int] = (1, 0)) -> bytes:
    """The beginning of an ``.npy`` file."""
    buffer = io.BytesIO()
    write = (
        np.lib.format.write_array_header_1_0 if version == (1, 0) else np.lib.format.write_array_header_2_0
    )
    write(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def npz_of(path: Path, members: dict[str, Iterator[bytes]], method: int = zipfile.ZIP_DEFLATED) -> Path:
    """An archive of members, each written piece by piece."""
    with zipfile.ZipFile(path, "w", method, compresslevel=1) as archive:
        for name, pieces in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                for piece in pieces:
                    member.write(piece)
    return path


def zeros(begin: bytes, size: int) -> Iterator[bytes]:
    """``begin``, and so many null bytes."""
    yield begin
    for _ in range(size >> 20):
        yield bytes(1 << 20)


def long_list(path: Path, members: int) -> Path:
    """An archive that lists empty members."""
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(members):
            archive.writestr(f"a/{number:06}.png", b"")
    return path


def gzip_bomb(path: Path, begin: bytes, mebibytes: int) -> Path:
    """A packed file of null bytes."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        for piece in zeros(begin, mebibytes << 20):
            file.write(piece)
    return path
