"""Pictures and folders of them for tests."""

from __future__ import annotations

import io
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def noise(seed: int, width: int = 12, height: int = 8, channels: int = 3) -> np.ndarray:
    """Pixels ``(height, width, channels)``."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """A picture file of ``pixels``."""
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def damaged_inside(png: bytes) -> bytes:
    """A PNG that cannot be decoded, though it begins and ends like a whole one."""
    middle = png.index(b"IDAT") + 12
    return png[:middle] + bytes(255 - value for value in png[middle : middle + 8]) + png[middle + 8 :]


def write(path: Path, data: bytes, *, age_s: float = 60.0) -> Path:
    """A file that was last written to a while ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    aged(path, age_s)
    return path


def aged(path: Path, age_s: float) -> None:
    """Set a file's, or a folder's, time of change."""
    then = time.time() - age_s
    os.utime(path, (then, then))


def folder_of(root: Path, *names: str, **options: Any) -> list[np.ndarray]:
    """Write a picture at each of ``names``; their pixels in that order."""
    made = []
    for seed, name in enumerate(names):
        made.append(noise(seed, **options))
        write(root / name, encoded(made[-1]))
    return made


def zip_of(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """An archive."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path
