"""The latest model's file, as the process writes it that :mod:`agent.latest_model` starts:
``python -m agent.model_keeping DESCRIPTOR``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from agent.current_model import current_model, weights_digest_of
from agent.data_settings import DataSettings
from agent.errand_program import answer
from agent.latest_model import CurrentParts, KeepQuestion, Kept, previous_of
from dpagent.errors import DpagentError, StorageError
from dpagent.learning.data.input_form import METADATA_KEY, InputForm
from dpagent.learning.inference.model_bytes import metadata_of
from dpagent.protocol.chunks import content_digest
from dpagent.storage import SPACE_LEFT, disk_errors, real_path, replace_durably, write_atomically

_MOST_SHOWN: Final = 200


def kept(question: KeepQuestion) -> Kept:
    """Replace the file in one step, and keep the one before, unless it has that model.

    Raises:
        DpagentError: it cannot be replaced.
    """
    file, model = question.file, question.model
    if question.asset.digest in _known_in(file):
        return Kept(is_another=False)
    if isinstance(model, CurrentParts):
        model = current_model(*model)
    _write(file, model)
    return Kept(True, tuple(disagreements(model, question.declared)))


def _write(file: Path, data: bytes) -> None:
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(file.parent).free < 2 * len(data) + SPACE_LEFT:
            raise StorageError(
                f"{file.parent} has no room for {2 * len(data) >> 20} MiB besides what the ledger "
                "needs. Free some space, and start the agent again."
            )
        _keep_previous(file)
    write_atomically(file, data)


def _keep_previous(file: Path) -> None:
    """Give the file its other name, too: a second copy would wear the disk as much as the new model does.

    Raises:
        OSError, StorageError: It cannot be kept.
    """
    if not file.is_file():
        return
    previous = real_path(previous_of(file))
    link = previous.with_name(f".{previous.name}.new")
    link.unlink(missing_ok=True)
    try:
        os.link(real_path(file), link)
    except OSError:  # Of a file system without links, or of two.
        write_atomically(previous, file.read_bytes())
        return
    replace_durably(previous, link)
    link.unlink(missing_ok=True)  # It stays where both names are one file already.


def disagreements(model: bytes, data: DataSettings) -> list[str]:
    """Where this board declares records to be others than the model was trained on, a sentence each.

    Both are public: no record is looked at. It is for the owner, and changes nothing that the board does,
    since what a model says of its inputs is only the operator's word.

    Args:
        model: the file of a finished model, whoever wrote it.
        data: as the board declares them.
    """
    try:
        text, own = metadata_of(model).get(METADATA_KEY), InputForm.of(data)
        differences = [] if text is None or own is None else InputForm.parse(text).differences(own)
    except DpagentError as error:
        return [f"what the model says of its inputs cannot be read: {error}"]
    return [
        f"data.{key} is {_short(given)} on this board, and its fleet's model was trained with"
        f" {_short(expected)}"
        for key, expected, given in differences
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _known_in(file: Path) -> tuple[bytes | None, ...]:
    """What may name the model in a file: SHA-256 of it, or of the weights that were filled in."""
    try:
        data = file.read_bytes() if file.is_file() else None
    except OSError:
        data = None
    return () if data is None else (content_digest(data), weights_digest_of(data))


if __name__ == "__main__":
    answer(kept)
