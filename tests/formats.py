"""Data of each format, opened as somebody opens them who may look: what is not given is inferred."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pictures import folder_of, write

from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.data.declared import Half
from dpagent.learning.data.format import Source
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.learning.data.registry import FORMATS

_LABELS = struct.pack(">BBBBI", 0, 0, 8, 1, 2) + bytes([0, 1])
_IMAGES = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 2, 2) + bytes(8)


def two_records(kind: str, folder: Path) -> Path:
    """Two records of a kind, called as they usually are."""
    folder.mkdir(exist_ok=True)
    match kind:
        case "npz":
            data = ArrayDataset(np.zeros((2, 3), np.float32), np.array([0, 1], np.int64), 2)
            save_npz(folder / "data.npz", data)
            return folder / "data.npz"
        case "idx":
            write(folder / "train-images-idx3-ubyte", _IMAGES)
            write(folder / "train-labels-idx1-ubyte", _LABELS)
        case "cifar":
            write(folder / "data_batch_1.bin", (bytes(3073) + b"\1" + bytes(3072)))
        case "images":
            folder_of(folder, "a/1.png", "b/2.png")
        case "csv":
            write(folder / "x.csv", b"x,label\n1,0\n2,1\n")
    return folder


def open_as(
    kind: str,
    path: str | Path,
    half: Half = "train",
    classes: int | Sequence[str] | None = None,
    section: Any = None,
) -> Any:
    """The dataset of a format alone, without what opening lays around it."""
    known = FORMATS[kind]
    listed = classes if isinstance(classes, int) or classes is None else tuple(classes)
    found = known.infer(Source(Path(path), half, listed), known.section() if section is None else section)
    data = known.open(found.source, found.section)
    data.origin = replace(data.origin, warnings=(*found.warnings, *data.origin.warnings))
    return data


def open_images(
    path: str | Path, half: Half = "train", classes: int | Sequence[str] | None = None, **section: Any
) -> Any:
    """Pictures; ``section`` holds keys of ``images``."""
    values = {key: list(value) if key == "size" else value for key, value in section.items()}
    return open_as("images", path, half, classes, FORMATS["images"].section.checked(values))


def open_table(
    path: str | Path, form: CsvSettings | None = None, classes: int | Sequence[str] | None = None
) -> Dataset:
    """CSV files."""
    data: Dataset = open_as("csv", path, "train", classes, form)
    return data
