"""The binary files of CIFAR-10 and CIFAR-100 (Krizhevsky, "Learning Multiple Layers of Features", 2009).

A record is its label, one byte (CIFAR-100: the coarse label, then the fine one, which is used), and 3,072
bytes of pixels: 32 rows of 32, first all reds, then greens, then blues. Files are read by number as they are;
records come out as ``(32, 32, 3)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import named_classes
from dpagent.learning.data.dataset import Dataset, Origin
from dpagent.learning.data.format import Format, Half, NoSettings, Source
from dpagent.learning.data.location import Location
from dpagent.learning.data.stored import RawFile, StoredArray, StoredDataset, open_raw, reading
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

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        if not location.is_folder:
            return location.name.endswith(".bin")
        return not _names_of("train", "test").isdisjoint(location.names)

    def open(self, source: Source, section: NoSettings) -> Dataset:
        """As of :class:`Format`."""
        return open_cifar(source.path, source.half, source.classes)

    def has_test_half(self, path: Path) -> bool:
        """As of :class:`Format`."""
        return not _names_of("test").isdisjoint(Location(path).names)


def open_cifar(path: str | Path, half: Half, classes: Sequence[str] | None = None) -> Dataset:
    """CIFAR-10 or CIFAR-100 in its binary form.

    Args:
        path: the folder with ``data_batch_1.bin`` … or ``train.bin``, or one file of CIFAR-10's form.
        half: ``train`` or ``test``; a single file counts as either.
        classes: names of the classes; without them those of the file that lies beside, if it does.

    Raises:
        DataError: a file is missing, or is no whole number of records.
    """
    if half not in _CIFAR_10.halves:
        raise DataError(f"The half is {half!r}; expected 'train' or 'test'.")
    path = Path(path)
    layout, files = _files(path, half)
    parts, labels, groups = [], [], []
    for number, file in enumerate(files):
        part = _open(open_raw(file), layout)
        parts.append(part)
        labels.append(_labels(part, layout))
        groups.append(np.full(part.shape[0], number, np.int64))
    numbers = np.concatenate(labels)
    names: Sequence[str] | None = classes if classes is not None else _names(path, layout)
    count, named = named_classes(numbers, names)
    if names is None:
        count = layout.classes

    def convert(stored: NDArray[Any]) -> NDArray[Any]:
        pixels: NDArray[Any] = stored[:, layout.label_bytes :].reshape(-1, 3, 32, 32)
        return pixels.transpose(0, 2, 3, 1)

    try:
        return StoredDataset(
            parts, convert, numbers, count, shape=(32, 32, 3), dtype=np.dtype(np.uint8), class_names=named,
            groups=np.concatenate(groups),
            origin=Origin(
                "cifar", f"{path}, {counted(len(files), 'file')} of CIFAR-{layout.classes} in binary form"
            ),
        )  # fmt: skip
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


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
    raise DataError(
        f"{path} has no file of the {half} half of CIFAR: {', '.join(_CIFAR_10.halves[half])} or"
        f" {_CIFAR_100.halves[half][0]}. Unpack the archive of the binary version there."
    )


def _open(raw: RawFile, layout: _Layout) -> StoredArray:
    size = layout.label_bytes + _PIXELS
    if raw.size == 0 or raw.size % size:
        raise DataError(
            f"{raw.path} has {counted(raw.size, 'byte')}; expected a whole number of records of "
            f"{counted(size, 'byte')}, as in CIFAR-{layout.classes}. Copy it again."
        )
    return StoredArray(raw, np.dtype(np.uint8), (raw.size // size, size))


def _labels(part: StoredArray, layout: _Layout) -> NDArray[np.int64]:
    labels = np.empty(part.shape[0], np.int64)
    for start in range(0, len(labels), _RECORDS_AT_ONCE):
        stop = min(start + _RECORDS_AT_ONCE, len(labels))
        labels[start:stop] = part.read(np.arange(start, stop))[:, layout.label_bytes - 1]
    if labels.max() >= layout.classes:
        place = int(labels.argmax())
        raise DataError(
            f"{part.file.path}, record {place}: the label is {labels[place]}; expected 0 to"
            f" {layout.classes - 1}. Is it a file of CIFAR-{layout.classes}?"
        )
    return labels


def _names(path: Path, layout: _Layout) -> Sequence[str] | None:
    """The names that are distributed with the records, if they are there."""
    file = (path if path.is_dir() else path.parent) / layout.names_file
    try:
        names = file.read_text("utf-8").split() if file.is_file() and file.stat().st_size < 65_536 else []
    except (OSError, UnicodeDecodeError):
        return None  # Names are an ornament here: the numbers are in the records.
    return names if len(names) == layout.classes and len(set(names)) == len(names) else None
