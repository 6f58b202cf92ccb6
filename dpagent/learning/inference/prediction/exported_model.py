"""A model file as the coordinator exports it: the graph and its metadata.

The file is untrusted. Its declarations are checked before any use, and the outputs
of ONNX Runtime are checked again.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.declared import MAX_CLASSES
from dpagent.learning.data.input_form import METADATA_KEY, InputForm
from dpagent.learning.data.stored import reading, require_readable
from dpagent.learning.inference.even_work import require_even_work
from dpagent.learning.onnx_session import LOAD_ERRORS, RUNTIME_ERRORS, first_line, quiet_session
from dpagent.wording import counted

_MOST_BYTES: Final = 1 << 30
_MOST_VALUES: Final = 1 << 24
_AXES: Final = (1, 2, 3)


class ExportedModel:
    """A model that :func:`~dpagent.learning.inference.export.model.export_onnx` wrote, on the CPU.

    Args:
        path: the file.
        threads: how many threads a call may use.

    Attributes:
        path: as given.
        name: of the architecture.
        input_shape: of one input, channels last.
        classes: how many there are.
        class_names: the name of each, or empty where the model has numbers only.
        inputs: what they must look like, or None where the file does not say.
        round: after which round of training it was exported, or None.
        privacy: the guarantee in a sentence, or empty.
        privacy_statement: the same by its parts, or empty.
        epsilon_spent: the cost of the rounds up to this one, or None.
        spent: statements of that cost by their parts, one for each column, the model's own first; or empty.

    Raises:
        DataError: the file is missing, too large, no ONNX file, of another program, or damaged; or it may
            compute longer for some inputs than for others.
    """

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        self.path = path
        data = _contents(path)
        try:
            self._session = quiet_session(data, threads=threads)
        except LOAD_ERRORS as error:
            raise DataError(_cannot_load(path, data, error)) from error
        try:
            self._read_about()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} holds names that are not UTF-8 text: it is damaged. Copy it again."
            ) from error
        require_even_work(str(path), data)

    def class_label(self, number: int) -> str:
        """The name of class ``number``, or the number."""
        return self.class_names[number] if self.class_names else str(number)

    def probabilities(self, inputs: NDArray[np.float32]) -> NDArray[np.float64]:
        """The softmax of the scores, ``(n, classes)``; a row of NaN where a score is not finite.

        Args:
            inputs: ``(n, *input_shape)`` float32; of images, values in [0, 1]. n may be 0.

        Raises:
            DataError: the inputs have another shape, or the model cannot be run.
        """
        if inputs.dtype != np.float32 or inputs.shape[1:] != self.input_shape:
            raise DataError(
                f"The inputs are {inputs.dtype} of shape {inputs.shape}; the model takes float32 of shape"
                f" (n, {', '.join(map(str, self.input_shape))})."
            )
        if not len(inputs):
            return np.empty((0, self.classes))
        try:
            (logits,) = self._session.run(["logits"], {"input": inputs})
        except RUNTIME_ERRORS as error:
            raise DataError(f"{self.path} cannot be run: {first_line(error)}") from error
        if logits.shape != (len(inputs), self.classes):
            raise DataError(
                f"{self.path} gives scores of shape {logits.shape} for {counted(len(inputs), 'input')}; "
                f"expected {(len(inputs), self.classes)}, as it says itself. Export it anew."
            )
        scores = logits.astype(np.float64)
        scores[~np.isfinite(scores).all(axis=1)] = np.nan
        with np.errstate(invalid="ignore"):
            exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
            shares: NDArray[np.float64] = exponentials / exponentials.sum(axis=1, keepdims=True)
        return shares

    def _read_about(self) -> None:
        """The file's metadata; raises UnicodeDecodeError where they are no text."""
        about = self._session.get_modelmeta()
        if about.producer_name != "dpagent":
            maker = about.producer_name[:60] or "an unnamed program"
            raise DataError(
                f"{self.path} is an ONNX file of {maker!r}, whose inputs and outputs are unknown here;"
                " expected a model that dpagent exported, such as model.onnx of a coordinator."
            )
        self.input_shape, self.classes = self._form()
        told = about.custom_metadata_map
        self.name = told.get("dpagent.model") or about.graph_name or "unnamed"
        self.class_names = self._names(told)
        self.inputs = self._inputs(told)
        self.round = _number(told.get("dpagent.round"), int)
        self.epsilon_spent = _number(told.get("dpagent.epsilon_spent"), float)
        self.privacy = told.get("dpagent.privacy", "")
        statement = _parsed(told.get("dpagent.privacy_statement"))
        self.privacy_statement: dict[str, Any] = statement if isinstance(statement, dict) else {}
        columns = _parsed(told.get("dpagent.spent"))
        self.spent: list[Any] = columns if isinstance(columns, list) else []

    def _form(self) -> tuple[tuple[int, ...], int]:
        """Shape of an input and number of classes, as the graph declares them."""
        inputs = {end.name: (end.type, list(end.shape)) for end in self._session.get_inputs()}
        outputs = {end.name: (end.type, list(end.shape)) for end in self._session.get_outputs()}
        kind, shape = inputs.get("input", ("", []))
        score_kind, scores = outputs.get("logits", ("", []))
        whole = all(isinstance(size, int) and size > 0 for size in (*shape[1:], *scores[1:]))
        if (
            set(inputs) != {"input"}
            or (kind, score_kind) != ("tensor(float)", "tensor(float)")
            or len(shape) - 1 not in _AXES
            or len(scores) != 2
            or not whole
            or isinstance(shape[0], int)
        ):
            raise DataError(
                f"{self.path} takes {_shown(inputs)} and gives {_shown(outputs)}; expected float32 'input' of"
                " shape (N, …) with one to three sizes and 'logits' of shape (N, classes). Export it anew."
            )
        if math.prod(shape[1:]) > _MOST_VALUES or not 2 <= scores[1] <= MAX_CLASSES:
            raise DataError(
                f"{self.path} has inputs of shape {tuple(shape[1:])} and {counted(scores[1], 'class')}; "
                f"expected at most {_MOST_VALUES:,} values and 2 to {MAX_CLASSES:,} classes."
            )
        return tuple(shape[1:]), scores[1]

    def _inputs(self, told: dict[str, str]) -> InputForm | None:
        if METADATA_KEY not in told:
            return None
        try:
            form = InputForm.parse(told[METADATA_KEY])
        except DataError as error:
            raise DataError(f"{self.path} says what its inputs are: {error}. Export it anew.") from error
        if misfit := form.misfit(self.input_shape):
            raise DataError(f"{self.path} says what its inputs are: {misfit}. Export it anew.")
        return form

    def _names(self, told: dict[str, str]) -> tuple[str, ...]:
        if "dpagent.classes" not in told:
            return ()
        names = _parsed(told["dpagent.classes"])
        if (
            not isinstance(names, list)
            or len(names) != self.classes
            or not all(isinstance(name, str) and name for name in names)
            or len(set(names)) != len(names)
        ):
            raise DataError(
                f"{self.path} names its classes {told['dpagent.classes'][:80]!r}; expected a list of"
                f" {self.classes} different names. Export it anew."
            )
        return tuple(names)


def _contents(path: Path) -> bytes:
    try:
        require_readable(path)
    except DataError as error:
        if error.__cause__ is not None or path.exists():
            raise
        raise DataError(
            f"There is no model file {path}. Check the path of the model, such as model.onnx in the state"
            " directory of a coordinator."
        ) from error
    with reading(path):
        if path.is_dir():
            raise DataError(f"{path} is a directory; expected a model file, such as model.onnx.")
        with open(path, "rb", opener=_without_waiting) as stream:
            known = os.fstat(stream.fileno())
            if not stat.S_ISREG(known.st_mode) or not 0 < known.st_size <= _MOST_BYTES:
                raise DataError(
                    f"{path} has {counted(known.st_size, 'byte')}; expected a model file of 1 to "
                    f"{_MOST_BYTES:,}."
                )
            return stream.read(known.st_size)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _cannot_load(path: Path, data: bytes, error: Exception) -> str:
    reason = first_line(error).rstrip(". ")
    if "InvalidProtobuf" in type(error).__name__ or "Protobuf parsing failed" in reason:
        return (
            f"{path}, {counted(len(data), 'byte')}, is not an ONNX file, or a truncated one; expected a "
            "model that dpagent exported. Copy it again."
        )
    return (
        f"{path} cannot be loaded: {reason}. Expected a model that dpagent exported, with operators that the"
        " installed onnxruntime knows. Copy it again, or update onnxruntime."
    )


def _parsed(text: str | None) -> object:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def _number(text: str | None, kind: Any) -> Any:
    try:
        number = None if text is None else kind(text)
    except ValueError:
        return None
    return number if number is None or math.isfinite(number) else None


def _shown(ends: dict[str, tuple[str, list[Any]]]) -> str:
    text = ", ".join(f"{name!r} {kind} {shape}" for name, (kind, shape) in ends.items())
    return text[:200] or "nothing"
