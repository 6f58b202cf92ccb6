"""The binary files of CIFAR-10 and CIFAR-100 (Krizhevsky, "Learning Multiple Layers of Features", 2009).

A record is its label, one byte (CIFAR-100: the coarse label, then the fine one, which is used), and 3,072
bytes of pixels: 32 rows of 32, first all reds, then greens, then blues. Files are read by number as they are;
records come out as ``(32, 32, 3)``.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import within
from dpagent.learning.data.dataset import DIGEST_BYTES, Dataset, Origin
from dpagent.learning.data.declared import Half
from dpagent.learning.data.format import Format, Inferred, Source
from dpagent.learning.data.formats.cifar.settings import CifarSettings
from dpagent.learning.data.glance import Glance
from dpagent.learning.data.location import Location
from dpagent.learning.data.problems import Problems
from dpagent.learning.data.stored import (
    AbsentError,
    RawFile,
    StoredArray,
    StoredDataset,
    digest_of,
    is_fault,
    may_be_there,
    open_raw,
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

    @property
    def record_bytes(self) -> int:
        """Of a record as it is stored."""
        return self.label_bytes + _PIXELS


_LAYOUTS: Final[dict[str, _Layout]] = {
    "cifar-10": _Layout(
        1,
        10,
        {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)},
        "batches.meta.txt",
    ),
    "cifar-100": _Layout(2, 100, {"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt"),
}


class CifarFormat(Format[CifarSettings]):
    """The binary version of CIFAR-10 and CIFAR-100."""

    kind, title, section = "cifar", "CIFAR in binary form", CifarSettings
    decoder_seconds = 0.2
    dtype = "uint8"

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        if not location.is_folder:
            return location.name.endswith(".bin")
        return not _names_of("train", "test").isdisjoint(location.names)

    def undeclared(self, source: Source, section: CifarSettings) -> list[str]:
        """As of :class:`Format`: the layout. Were it that of the files in a folder, one more could change
        what all others mean."""
        return [f"{self.kind}.layout"] * (section.layout is None)

    def infer(self, source: Source, section: CifarSettings) -> Inferred[CifarSettings]:
        """As of :class:`Format`: the layout by the names of the files, its classes, by name if the names lie
        beside."""
        name = section.layout or _layout_at(source.path, source.half)
        classes = source.classes or _names(source.path, _LAYOUTS[name]) or _LAYOUTS[name].classes
        return Inferred(replace(source, classes=classes), section.with_values({"layout": name}))

    def open(self, source: Source, section: CifarSettings) -> Dataset:
        """As of :class:`Format`: the folder, or one file, which is taken whatever its half is."""
        layout = _layout_of(section)
        parts = [_require_whole(open_raw(file), layout) for file in _files(source, layout)]
        count = sum(part.shape[0] for part in parts)
        source.require_room(count)
        places, left_out = within(labels := _labels(parts, layout), source.class_table.count)
        return _dataset(source, layout, parts, labels[places], left_out, places=places)

    def listed(self, source: Source, section: CifarSettings, *, growing: bool) -> Dataset:
        """As of :class:`Format`. A file that cannot be opened is left out alone while the agent runs, and in
        any case what follows the last whole record of one, and a record that the disk cannot read."""
        layout = _layout_of(section)
        parts, problems, unread = [], Problems(), list[Path]()
        for file in _files(source, layout) if source.glance is None else source.glance.files:
            try:
                raw = source.opened(file)
            except DataError as error:
                if not growing or file == source.path:
                    raise
                problems.add(str(error))
                if is_fault(error, file):
                    unread.append(file)
                continue
            parts.append(_whole_records(raw, layout))
            if rest := raw.size % layout.record_bytes:
                problems.add(f"{file} ends with {counted(rest, 'byte')} of a record that is not whole.")
        source.require_room(sum(part.shape[0] for part in parts))
        places, labels, contents = _read_first(parts, layout, source.most_listed(_PIXELS), problems)
        used, left_out = within(labels, source.class_table.count, places)
        return _dataset(
            source, layout, parts, labels[used], (*problems.sentences(), *left_out),
            places=places[used], contents=contents[used], unread=unread,
        )  # fmt: skip

    def glance(self, source: Source, section: CifarSettings) -> Glance:
        """As of :class:`Format`."""
        return Glance.at(lambda: _files(source, _layout_of(section)))

    def has_test_half(self, path: Path, section: CifarSettings) -> bool:
        """As of :class:`Format`."""
        return not _names_of("test").isdisjoint(Location(path).names)


def _dataset(
    source: Source,
    layout: _Layout,
    parts: Sequence[StoredArray],
    labels: NDArray[np.int64],
    left_out: tuple[str, ...],
    *,
    places: NDArray[np.int64],
    contents: NDArray[np.uint8] | None = None,
    unread: Sequence[Path] = (),
) -> Dataset:
    table = source.class_table

    def convert(stored: NDArray[Any]) -> NDArray[Any]:
        pixels: NDArray[Any] = stored[:, layout.label_bytes :].reshape(-1, 3, 32, 32)
        return pixels.transpose(0, 2, 3, 1)

    what = f"{counted(len(parts), 'file')} of CIFAR-{layout.classes} in binary form"
    ends = np.cumsum([part.shape[0] for part in parts], dtype=np.int64)
    return StoredDataset(
        parts, convert, labels, table.count, places=places, contents=contents, unread=unread,
        shape=(32, 32, 3), dtype=np.dtype(np.uint8), class_names=table.names,
        groups=np.searchsorted(ends, places, side="right").astype(np.int64),
        origin=Origin("cifar", f"{source.path}, {what}", left_out),
    )  # fmt: skip


def _layout_of(section: CifarSettings) -> _Layout:
    assert section.layout is not None
    return _LAYOUTS[section.layout]


def _names_of(*halves: Half) -> set[str]:
    """The files that these halves are in, of either dataset."""
    return {name for layout in _LAYOUTS.values() for half in halves for name in layout.halves[half]}


def _layout_at(path: Path, half: Half) -> Literal["cifar-10", "cifar-100"]:
    """The layout that the names of files tell of. Never on a board."""
    if path.is_file():
        return "cifar-100" if path.name in ("train.bin", "test.bin") else "cifar-10"
    is_100 = any(os.path.lexists(path / name) for name in _LAYOUTS["cifar-100"].halves[half])
    is_10 = any(os.path.lexists(path / name) for name in _LAYOUTS["cifar-10"].halves[half])
    return "cifar-100" if is_100 and not is_10 else "cifar-10"


def _files(source: Source, layout: _Layout) -> list[Path]:
    """The file at the path, or those of a half that are in the folder there; part of them is a shard like any
    other. The folder is not listed, however many entries it has.

    Raises:
        AbsentError: There is none.
    """
    path, names = source.path, layout.halves[source.half]
    if not path.is_dir():
        return [path]
    if found := [path / name for name in names if may_be_there(path / name)]:
        return found
    raise AbsentError(
        f"{path} has no file of the {source.half} half of CIFAR-{layout.classes}: {', '.join(names)}. Unpack"
        " the archive of the binary version there."
    )


def _whole_records(raw: RawFile, layout: _Layout) -> StoredArray:
    size = layout.record_bytes
    return StoredArray(raw, np.dtype(np.uint8), (raw.size // size, size))


def _require_whole(raw: RawFile, layout: _Layout) -> StoredArray:
    """The records of a file.

    Raises:
        DataError: bytes follow that are none.
    """
    size = layout.record_bytes
    if raw.size % size:
        raise DataError(
            f"{raw.path} has {counted(raw.size, 'byte')}; expected a whole number of records of "
            f"{counted(size, 'byte')}, as in CIFAR-{layout.classes}. Copy it again."
        )
    return _whole_records(raw, layout)


def _labels(parts: Sequence[StoredArray], layout: _Layout) -> NDArray[np.int64]:
    """Of all records in their order."""
    labels = [np.empty(0, np.int64)]
    for part in parts:
        for start in range(0, part.shape[0], _RECORDS_AT_ONCE):
            stop = min(start + _RECORDS_AT_ONCE, part.shape[0])
            labels.append(part.read(np.arange(start, stop))[:, layout.label_bytes - 1].astype(np.int64))
    return np.concatenate(labels)


def _read_first(
    parts: Sequence[StoredArray], layout: _Layout, most: int, problems: Problems
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Places, labels and digests ``(n, 16)`` of the first records, each of one read: who writes to the file
    meanwhile changes the record that he writes, and no other."""
    places, labels, contents = array("q"), array("B"), bytearray()
    first = 0
    for part in parts:
        for start in range(0, min(part.shape[0], most - first), _RECORDS_AT_ONCE):
            stop = min(start + _RECORDS_AT_ONCE, part.shape[0], most - first)
            for place, record in part.readable(start, stop, problems):
                places.append(first + place)
                labels.append(int(record[layout.label_bytes - 1]))
                contents += digest_of(record)
        first += part.shape[0]
    digests = np.frombuffer(bytes(contents), np.uint8).reshape(-1, DIGEST_BYTES)
    return np.array(places, np.int64), np.array(labels, np.int64), digests


def _names(path: Path, layout: _Layout) -> tuple[str, ...] | None:
    """The names that are distributed with the records, if they are there."""
    file = (path if path.is_dir() else path.parent) / layout.names_file
    try:
        names = file.read_text("utf-8").split() if file.is_file() and file.stat().st_size < 65_536 else []
    except (OSError, UnicodeDecodeError):
        return None  # Names are an ornament here: the numbers are in the records.
    return tuple(names) if len(names) == layout.classes == len(set(names)) else None
