"""The binary files of CIFAR-10 and CIFAR-100 (Krizhevsky, "Learning Multiple Layers of Features", 2009).

A record is its label, one byte (CIFAR-100: the coarse label, then the fine one, which is used), and 3,072
bytes of pixels: 32 rows of 32, first all reds, then greens, then blues. Files are read by number as they are;
records come out as ``(32, 32, 3)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import within
from dpagent.learning.data.dataset import Dataset, Origin
from dpagent.learning.data.format import Format, Half, Inferred, NoSettings, Source
from dpagent.learning.data.location import Location
from dpagent.learning.data.stamp import glance_at
from dpagent.learning.data.stored import (
    AbsentError,
    RawFile,
    StoredArray,
    StoredDataset,
    open_listed,
    reading,
)
from dpagent.wording import counted

_PIXELS: Final = 32 * 32 * 3
_RECORDS_AT_ONCE: Final = 1024


class _Layout(NamedTuple):
    """How one of the two datasets is laid out."""

    label_bytes: int
    classes: int
    halves: dict[Half, tuple[str, ...]]
    names_file: str


_CIFAR_10: Final = _Layout(
    1,
    10,
    {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)},
    "batches.meta.txt",
)
_CIFAR_100: Final = _Layout(2, 100, {"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt")


class CifarFormat(Format[NoSettings]):
    """The binary version of CIFAR-10 and CIFAR-100."""

    kind, title, section = "cifar", "CIFAR in binary form", NoSettings
    decoder_seconds = 0.2
    dtype = "uint8"

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        if not location.is_folder:
            return location.name.endswith(".bin")
        return not _names_of("train", "test").isdisjoint(location.names)

    def undeclared(self, source: Source, section: NoSettings) -> list[str]:
        """As of :class:`Format`: nothing, the form of a record is that of CIFAR."""
        return []

    def infer(self, source: Source, section: NoSettings) -> Inferred[NoSettings]:
        """As of :class:`Format`: the classes of CIFAR-10 or CIFAR-100, by name if the names lie beside."""
        layout, _ = _files(source.path, source.half)
        classes = source.classes or _names(source.path, layout) or layout.classes
        return Inferred(replace(source, classes=classes), section)

    def open(self, source: Source, section: NoSettings) -> Dataset:
        """As of :class:`Format`: the folder, or one file, which is taken whatever its half is."""
        return _dataset(source)

    def glance(self, source: Source) -> str | None:
        """As of :class:`Format`."""
        return glance_at(_files(source.path, source.half)[1])

    def has_test_half(self, path: Path, section: NoSettings) -> bool:
        """As of :class:`Format`."""
        return not _names_of("test").isdisjoint(Location(path).names)


def _dataset(source: Source) -> Dataset:
    path, table = source.path, source.class_table
    layout, files = _files(path, source.half)
    on_board = source.declared_records is not None
    parts, torn = [], []
    for file in files:
        part, rest = _open(open_listed(file), layout, takes_torn=on_board)
        parts.append(part)
        if rest:
            torn.append(f"{file} ends with {counted(rest, 'byte')} of a record that is not whole.")
    source.require_room(sum(part.shape[0] for part in parts))
    labels = _labels(parts, layout, source.most_listed)
    groups = np.repeat(np.arange(len(parts)), [part.shape[0] for part in parts])
    places, left_out = within(labels, table.count)
    labels, groups = labels[places], groups[places]

    def convert(stored: NDArray[Any]) -> NDArray[Any]:
        pixels: NDArray[Any] = stored[:, layout.label_bytes :].reshape(-1, 3, 32, 32)
        return pixels.transpose(0, 2, 3, 1)

    what = f"{counted(len(files), 'file')} of CIFAR-{layout.classes} in binary form"
    return StoredDataset(
        parts, convert, labels, table.count, places=places, shape=(32, 32, 3), dtype=np.dtype(np.uint8),
        class_names=table.names, groups=groups, origin=Origin("cifar", f"{path}, {what}", (*torn, *left_out)),
    )  # fmt: skip


def _names_of(*halves: Half) -> set[str]:
    """The files that these halves are in, of either dataset."""
    return {name for layout in (_CIFAR_10, _CIFAR_100) for half in halves for name in layout.halves[half]}


def _files(path: Path, half: Half) -> tuple[_Layout, list[Path]]:
    with reading(path):
        if path.is_file():
            layout = _CIFAR_100 if path.name in ("train.bin", "test.bin") else _CIFAR_10
            return layout, [path]
        names = {entry.name for entry in path.iterdir()}
    for layout in (_CIFAR_10, _CIFAR_100):
        # Part of the batches is a shard like any other.
        if found := [name for name in layout.halves[half] if name in names]:
            return layout, [path / name for name in found]
    raise AbsentError(
        f"{path} has no file of the {half} half of CIFAR: {', '.join(_CIFAR_10.halves[half])} or"
        f" {_CIFAR_100.halves[half][0]}. Unpack the archive of the binary version there."
    )


def _open(raw: RawFile, layout: _Layout, *, takes_torn: bool) -> tuple[StoredArray, int]:
    """The whole records of a file, and how many bytes follow them: on a board, of one that is still being
    written.

    Raises:
        DataError: there are such bytes, and they are not taken for that.
    """
    size = layout.label_bytes + _PIXELS
    rest = raw.size % size
    if rest and not takes_torn:
        raise DataError(
            f"{raw.path} has {counted(raw.size, 'byte')}; expected a whole number of records of "
            f"{counted(size, 'byte')}, as in CIFAR-{layout.classes}. Copy it again."
        )
    return StoredArray(raw, np.dtype(np.uint8), (raw.size // size, size)), rest


def _labels(parts: Sequence[StoredArray], layout: _Layout, most: int) -> NDArray[np.int64]:
    """Of all records in their order, or of the first."""
    labels = np.empty(min(most, sum(part.shape[0] for part in parts)), np.int64)
    first = 0
    for part in parts:
        mine = labels[first : first + part.shape[0]]
        for start in range(0, len(mine), _RECORDS_AT_ONCE):
            stop = min(start + _RECORDS_AT_ONCE, len(mine))
            mine[start:stop] = part.read(np.arange(start, stop))[:, layout.label_bytes - 1]
        first += len(mine)
    return labels


def _names(path: Path, layout: _Layout) -> tuple[str, ...] | None:
    """The names that are distributed with the records, if they are there."""
    file = (path if path.is_dir() else path.parent) / layout.names_file
    try:
        names = file.read_text("utf-8").split() if file.is_file() and file.stat().st_size < 65_536 else []
    except (OSError, UnicodeDecodeError):
        return None  # Names are an ornament here: the numbers are in the records.
    return tuple(names) if len(names) == layout.classes == len(set(names)) else None
