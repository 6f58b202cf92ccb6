"""Pictures for a model: a file, a folder or a zip archive of them, with or without classes.

Every picture is made to fit the model's inputs, as in training
(:class:`~dpagent.learning.data.formats.images.decoding.PictureForm`). The class of a picture is the first
folder it lies in, if that is a class of the model; a folder of any other name says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.archive import ZipMembers, obstacle, open_zip
from dpagent.learning.data.formats.images.dataset import listed
from dpagent.learning.data.formats.images.decoding import (
    PictureForm,
    most_bytes,
    read_form,
    require_pillow,
)
from dpagent.learning.data.formats.images.files import (
    IN_NO_FOLDER,
    FolderFiles,
    Listing,
    PictureFiles,
    is_picture,
)
from dpagent.learning.data.formats.images.settings import ImageSettings
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.location import entries_of
from dpagent.learning.data.stored import reading
from dpagent.wording import counted, named

_MOST_NAMES: Final = 8


def picture_form(target: Target, section: ImageSettings) -> PictureForm:
    """How pictures are made to fit a model.

    Args:
        target: the model.
        section: with the size and mode of the settings or else of the model.

    Raises:
        ConfigurationError: the model takes no pictures of that form.
    """
    size, mode = section.pair(), section.mode
    if size is None or mode is None:
        raise ConfigurationError(
            f"Model {target.model!r} takes inputs of shape {target.shape}, which is no picture (height,"
            f" width, 1 or 3); say what pictures are made into, with {named('size')} and {named('mode')}, or"
            " give other data."
        )
    values = size[0] * size[1] * (1 if mode == "grey" else 3)
    if values != math.prod(target.shape):
        raise ConfigurationError(
            f"Pictures of {size[0]} × {size[1]}, {mode}, have {counted(values, 'value')}; model "
            f"{target.model!r} takes {math.prod(target.shape):,}, of shape {target.shape}. Leave "
            f"{named('size')} and {named('mode')} out, or correct them."
        )
    return PictureForm(size, mode, section.max_pixels)


class PictureReader:
    """Reads pictures for one model.

    Args:
        form: of every picture, with as many values as the model's inputs.
        target: the model.
        say: is told what is skipped or assumed.

    Raises:
        ConfigurationError: Pillow is not installed.
    """

    def __init__(self, form: PictureForm, target: Target, say: Say) -> None:
        require_pillow()
        self._form, self._target, self._say = form, target, say
        self._most = most_bytes(form.max_pixels)
        self._numbers = {name: number for number, name in enumerate(target.class_names)}

    def read_file(self, path: Path) -> Input:
        """The picture in one file."""
        return self._picture(str(path), FolderFiles(path.parent, [path.name], self._most), 0, None)

    def read_bytes(self, name: str, data: bytes) -> Input:
        """The picture that a file of these bytes would hold."""
        return self._decoded(name, lambda: data, None)

    def read_many(self, path: Path, folder: str) -> Iterator[Input]:
        """The pictures of a folder or a zip archive, last those that lie in no folder.

        Args:
            path: of the folder or archive.
            folder: the one in it that holds the class folders.

        Raises:
            DataError: there is none.
        """
        root = path / folder if path.is_dir() else path
        found, files = listed(root, folder, self._form)
        if path.is_dir():
            with reading(root):
                loose = [entry.name for entry in entries_of(root) if _is_loose(entry.name)]
            loose_files: PictureFiles = FolderFiles(root, loose, self._most)
        else:
            loose, loose_files = _loose_members(path, self._most)
        found.passed_over.pop(IN_NO_FOLDER, None)
        if not (loose or found.names or found.problems):
            raise DataError(f"{path} holds no pictures (PNG, JPEG, …). Check the path.")
        for reason, count in sorted(found.passed_over.items()):
            self._say(f"{path}: {counted(count, 'file')} passed over: {reason}.")
        labels = self._labels(path, found)
        for number, name in enumerate(found.names):
            yield self._picture(f"{root}/{name}", files, number, labels.get(found.labels[number]))
        for number, name in enumerate(loose):
            yield self._picture(f"{root}/{name}", loose_files, number, None)
        for name, problem in found.problems.items():
            yield Input(f"{root}/{name}", problem=problem)

    def _labels(self, path: Path, found: Listing) -> dict[str, int]:
        """The class of each folder that is one."""
        folders = sorted(set(found.labels))
        if self._numbers:
            known = {name: self._numbers[name] for name in folders if name in self._numbers}
        elif all(name.isascii() and name.isdigit() and len(name) < 9 for name in folders):
            known = {name: int(name) for name in folders if int(name) < self._target.classes}
        else:
            known = {}
            if folders:
                self._say(
                    f"{path}: the model does not name its classes, so what the folders are called is not"
                    " compared. List all classes in the fleet's order to compare it."
                )
            return known
        if unknown := [name for name in folders if name not in known]:
            shown = ", ".join(unknown[:_MOST_NAMES]) + (", …" if len(unknown) > _MOST_NAMES else "")
            self._say(f"{path}: no class of the model, so taken for unlabelled: {shown}.")
        return known

    def _picture(self, name: str, files: PictureFiles, number: int, label: int | None) -> Input:
        return self._decoded(name, lambda: files.read(number), label)

    def _decoded(self, name: str, read: Callable[[], bytes], label: int | None) -> Input:
        try:
            data = read()
            size, _ = read_form(data, self._form.max_pixels)
            values = self._form.decode(data).reshape(self._target.shape)
        except DataError as error:
            return Input(name, label=label, problem=str(error))
        return Input(name, None, values, label, scaled_from=None if size == self._form.size else size)


def _is_loose(name: str) -> bool:
    return is_picture(name) and not name.startswith(".")


def _loose_members(path: Path, most: int) -> tuple[list[str], ZipMembers]:
    """The pictures of an archive that lie in no folder."""
    file, listed = open_zip(path)
    chosen = [
        info
        for info in listed
        if len(PurePosixPath(info.filename).parts) == 1
        and _is_loose(info.filename)
        and obstacle(info, most) is None
    ]
    return [info.filename for info in chosen], ZipMembers(file, chosen)
