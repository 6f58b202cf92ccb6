"""Opens data of any known kind, and recognises the kind by what is there."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dpagent.errors import ConfigurationError, DataError, DpagentError
from dpagent.learning.data.cifar import has_cifar, open_cifar
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.derived import Reshaped
from dpagent.learning.data.idx import has_idx, open_idx
from dpagent.learning.data.images import open_images
from dpagent.learning.data.npz import open_npz
from dpagent.learning.data.picture_files import entries_of, is_picture
from dpagent.learning.data.stored import reading, require_readable
from dpagent.learning.data.tables import is_table, open_table
from dpagent.wording import counted, named

if TYPE_CHECKING:
    from dpagent.learning.data.settings import DatasetSettings

KINDS: Final = ("npz", "idx", "cifar", "images", "csv")

_DEPTH: Final = 3
_MOST_LOOKED_AT: Final = 20_000
_KNOWN: Final = (
    "an NPZ file, a folder of IDX files, CIFAR in binary form, a folder or zip archive of pictures by class,"
    " or CSV files"
)


def open_dataset(settings: DatasetSettings) -> Dataset:
    """The records that ``settings`` describe.

    Args:
        settings: with its path resolved.

    Raises:
        DataError: they are missing, damaged or of no known kind; names file, line or record.
        ConfigurationError: a setting does not go with the data, or what reads them is not installed.
    """
    require_readable(settings.path)
    kind = recognise(settings.path) if settings.kind == "auto" else settings.kind
    for section in ("images", "csv"):
        if section in settings.model_fields_set and section != kind:
            keys = sorted(getattr(settings, section).model_fields_set)
            given = ", ".join(named(f"{section}.{key}") for key in keys) or named(section)
            raise ConfigurationError(
                f"{given} {'are' if len(keys) > 1 else 'is'} set, and {settings.path} is taken for {kind}."
                f" Leave {'them' if len(keys) > 1 else 'it'} out, or set {named('kind', section)}."
            )
    try:
        dataset = _OPEN[kind](settings)
        if settings.shape is not None:
            dataset = Reshaped(dataset, settings.shape)
    except DpagentError:
        raise
    except (OSError, MemoryError) as error:
        raise DataError(f"Cannot read {settings.path}: {error}.") from error
    if settings.kind == "auto":
        dataset.origin = replace(dataset.origin, source=f"{dataset.origin.source} (recognised)")
    return dataset


def recognise(path: Path) -> str:
    """Which of :data:`KINDS` the data at ``path`` are.

    Raises:
        DataError: none, or several.
    """
    require_readable(path)
    with reading(path):
        found = _kinds_of_folder(path) if path.is_dir() else _kinds_of_file(path)
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"{path} could be {' or '.join(found)}. Set {named('kind')} to one of them.")
    advice = ""
    if path.is_dir():
        with reading(path):
            names = [entry.name for entry in entries_of(path)]
        if not names:
            raise DataError(f"{path} is an empty folder; expected {_KNOWN}. Check the path.")
        if loose := [name for name in names if is_picture(name) and not name.startswith(".")]:
            raise DataError(
                f"{path} holds {counted(len(loose), 'picture')}, and none lies in a class folder. Make"
                f" a folder for each class and move the pictures in, such as {path / 'CLASS' / loose[0]};"
                f" or, if {path.absolute().name!r} is itself a class, give the folder above it."
            )
        if archives := sorted(name for name in names if name.endswith((".npz", ".zip"))):
            advice = f" Give the path of the file: {path / archives[0]}?"
    elif is_picture(path.name):
        raise DataError(
            f"{path} is a single picture, and what its class is nothing tells. Give the folder that holds a"
            " folder of pictures for each class; `dpagent predict` takes single pictures."
        )
    elif path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.xz", ".7z", ".rar")):
        advice = " Unpack it first."
    elif has_idx([path.name]):
        advice = " Give the path of the folder that holds the IDX files."
    raise DataError(f"{path} is nothing known; expected {_KNOWN}.{advice}")


def _kinds_of_file(path: Path) -> list[str]:
    name = path.name.lower()
    if is_table(path.name):
        return ["csv"]
    if name.endswith(".bin"):
        return ["cifar"]
    with path.open("rb") as stream:
        if stream.read(2) != b"PK":
            # What should be an archive and is none is told so by the one who reads it.
            return ["npz"] if name.endswith(".npz") else ["images"] if name.endswith(".zip") else []
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError):
        return ["npz" if name.endswith(".npz") else "images"]
    return (
        ["npz"]
        if any(member in ("inputs.npy", "labels.npy") for member in names) or name.endswith(".npz")
        else ["images"]
    )


def _kinds_of_folder(path: Path) -> list[str]:
    names = [entry.name for entry in entries_of(path)]
    found = []
    if has_idx(names):
        found.append("idx")
    if has_cifar(names):
        found.append("cifar")
    if any(is_table(name) for name in names):
        found.append("csv")
    if _has_pictures(path):
        found.append("images")
    return found


def _has_pictures(root: Path) -> bool:
    """Whether a folder below ``root`` holds a picture; it does not look for long."""
    looked_at, level = 0, [entry.path for entry in entries_of(root) if entry.is_dir()]
    for _ in range(_DEPTH):
        below: list[str] = []
        for folder in level:
            try:
                for entry in entries_of(folder):
                    looked_at += 1
                    if looked_at > _MOST_LOOKED_AT:
                        return False
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.path)
                    elif is_picture(entry.name):
                        return True
            except OSError:
                continue  # One that may not be read holds nothing for us.
        level = below
    return False


def _open_images(settings: DatasetSettings) -> Dataset:
    pictures = settings.images
    size = None if pictures.size is None else (pictures.size[0], pictures.size[1])
    return open_images(settings.path, settings.half, settings.classes, size=size, mode=pictures.mode)


_OPEN: Final[dict[str, Callable[[DatasetSettings], Dataset]]] = {
    "npz": lambda settings: open_npz(settings.path, settings.classes),
    "idx": lambda settings: open_idx(settings.path, settings.half, settings.classes),
    "cifar": lambda settings: open_cifar(settings.path, settings.half, settings.classes),
    "images": _open_images,
    "csv": lambda settings: open_table(settings.path, settings.csv.form(), settings.classes),
}
