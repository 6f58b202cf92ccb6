"""Predictions as one JSON document, written as they come: there may be more than memory holds."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import typer

from cli.predict.page import class_label
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.learning.inference.prediction.outcome import Outcome, Tally
from dpagent.storage import disk_errors, place_of_file


class JsonOutput:
    """Writes to a file, whole or not at all, or to standard output.

    Args:
        target: the file, or ``-``.
        model: described at the beginning.
        class_names: of its classes, or empty.
        top: how many classes each prediction lists.

    Raises:
        StorageError: The file cannot be written.
    """

    def __init__(self, target: Path, model: ExportedModel, class_names: Sequence[str], top: int) -> None:
        self._names, self._top = class_names, top
        self._target = None if str(target) == "-" else place_of_file(target)
        self._stream: IO[str] | None = None
        self._temporary: Path | None = None
        self._separator = "\n"
        if self._target is not None:
            with disk_errors(target):
                descriptor, name = tempfile.mkstemp(prefix=f".{self._target.name}.", dir=self._target.parent)
            # A name of a file that is no UTF-8 gets question marks, not an error.
            self._stream = os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
            self._temporary = Path(name)
        self._write(f'{{"model": {_dumped(_model(model, class_names))},\n"predictions": [')

    def write(self, outcome: Outcome) -> None:
        """Add one prediction, a line of its own."""
        label = outcome.input.label
        top = [
            {"class": self._label(number), "probability": round(probability, 6)}
            for number, probability in outcome.top(self._top)
        ]
        first = top[0] if top else {"class": None, "probability": None}
        scaled_from = outcome.input.scaled_from
        value = {
            "input": outcome.input.source,
            "record": outcome.input.record,
            **first,
            **({"top": top} if self._top > 1 else {}),
            "label": None if label is None else self._label(label),
            "scaled_from": None if scaled_from is None else list(scaled_from),
            "problem": outcome.problem or None,
        }
        self._write(self._separator + _dumped(value))
        self._separator = ",\n"

    def close(self, tally: Tally) -> None:
        """Add the summary, and put the file in its place."""
        summary = {
            "inputs": tally.inputs,
            "unanswered": tally.unanswered,
            "scaled": tally.scaled,
            "labelled": tally.labelled,
            "right": tally.right,
            "accuracy": tally.accuracy,
            "confusions": [
                {"label": self._label(label), "class": self._label(answer), "inputs": count}
                for (label, answer), count in sorted(tally.pairs.items())
            ],
        }  # fmt: skip
        self._write(f'\n],\n"summary": {_dumped(summary)}}}\n')
        if self._stream is not None and self._temporary is not None and self._target is not None:
            with disk_errors(self._target):
                self._stream.flush()
                os.fsync(self._stream.fileno())
                self._stream.close()
                self._temporary.replace(self._target)
            self._temporary = None

    def __enter__(self) -> JsonOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave nothing behind that is not whole."""
        if self._stream is not None and self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # of a full disk, which has been told
                self._stream.close()

    def _label(self, number: int) -> str:
        return class_label(self._names, number)

    def _write(self, text: str) -> None:
        if self._stream is None:
            typer.echo(text, nl=False)
        else:
            with disk_errors(self._target or Path("-")):
                self._stream.write(text)


def _model(model: ExportedModel, class_names: Sequence[str]) -> dict[str, Any]:
    return {
        "file": str(model.path),
        "name": model.name,
        "round": model.round,
        "input_shape": list(model.input_shape),
        "classes": list(class_names) or model.classes,
        "inputs": None if model.inputs is None else model.inputs.as_dict(only_set=True),
        "privacy": model.privacy or None,
        "privacy_statement": model.privacy_statement or None,
        "epsilon_spent": model.epsilon_spent,
        "spent": model.spent,
    }


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
