"""One request and its answer: a line of JSON each.

    {"id": 7, "inputs": {"ax": [0.1, …], "ay": [9.8, …]}, "top": 2}
    {"id": 7, "class": "walk", "probability": 0.93, "top": [{"class": "walk", "probability": 0.93}, …]}

``inputs`` are columns by name, as the sensor reads them: what the model's file says of its inputs is applied.
Or it is an array in the shape that the model takes, as it is. ``picture`` is the path of one,
``picture_bytes`` one in base64. ``about`` asks what the model is. What cannot be answered has an ``error``.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpagent.errors import DataError, DpagentError
from dpagent.learning.data.formats.images.format import ImageFormat
from dpagent.learning.data.formats.images.unlabelled import PictureReader, picture_form
from dpagent.learning.data.formats.tables.record import record_of
from dpagent.learning.data.formats.tables.settings import TableForm
from dpagent.learning.data.input_form import InputForm
from dpagent.learning.data.inputs import Input, Target
from dpagent.learning.data.opening import section_of
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.learning.inference.prediction.outcome import predict

log = logging.getLogger(__name__)

_KEYS: Final = {"id", "inputs", "picture", "picture_bytes", "about", "top"}
_ASKS: Final = ("inputs", "picture", "picture_bytes", "about")
_LONGEST_ID: Final = 128
_MOST_SHOWN: Final = 200
_IMAGES: Final = ImageFormat()


class Requests:
    """Answers for one model.

    Args:
        model: the model.
    """

    def __init__(self, model: ExportedModel) -> None:
        self._model = model
        self._form = InputForm() if model.inputs is None else model.inputs
        self._target = Target(model.name, model.input_shape, model.classes, model.class_names)

    def answer(self, line: bytes, *, reads_files: bool) -> bytes:
        """The answer to a request, without a line break. Raises nothing, whatever the request is.

        Args:
            line: the request, of bounded length.
            reads_files: whether who asks may name files of this board.
        """
        identity: dict[str, Any] = {}
        try:
            request = _parsed(line)
            identity = _identity(request)
            answer = self._answered(request, reads_files=reads_files)
        except DpagentError as error:
            answer = {"error": str(error)}
        except Exception as error:
            # A decoder may raise anything: it costs this request.
            log.debug("a request cannot be answered", exc_info=True)
            answer = {
                "error": f"The request cannot be answered: {type(error).__name__}: {error}"[:_MOST_SHOWN]
            }
        return json.dumps(identity | answer, ensure_ascii=False).encode(errors="replace")

    def _answered(self, request: Mapping[str, Any], *, reads_files: bool) -> dict[str, Any]:
        if unknown := sorted(set(request) - _KEYS):
            raise DataError(
                f"The request has the key {unknown[0][:40]!r}; expected {', '.join(sorted(_KEYS))}."
            )
        asked = [key for key in _ASKS if key in request]
        if len(asked) != 1:
            raise DataError(
                f"The request has {' and '.join(asked) or 'no input'}; expected one of {', '.join(_ASKS)}."
            )
        top = request.get("top", 3)
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:
            raise DataError(f"`top` is {_short(top)}; expected a whole number from 1.")
        match asked[0], request[asked[0]]:
            case "about", True:
                return self._about()
            case "inputs", dict() as columns:
                return self._predicted(self._columns(columns), top)
            case "inputs", list() as values:
                return self._predicted(self._array(values), top)
            case "picture", str() as path:
                if not reads_files:
                    raise DataError(
                        "`picture` names a file; who asks over MQTT sends `picture_bytes` instead."
                    )
                if not Path(path).is_absolute():
                    raise DataError(f"`picture` is {_short(path)}; expected an absolute path.")
                return self._predicted(self._pictures().read_file(Path(path)), top)
            case "picture_bytes", str() as text:
                return self._predicted(self._pictures().read_bytes("picture_bytes", _decoded(text)), top)
            case key, value:
                raise DataError(f"`{key}` is {_short(value)}; expected {_EXPECTED[key]}.")

    def _about(self) -> dict[str, Any]:
        model = self._model
        return {
            "model": model.name,
            "round": model.round,
            "input_shape": list(model.input_shape),
            "classes": list(model.class_names) or model.classes,
            "inputs": self._form.as_dict(only_set=True),
            "privacy": model.privacy or None,
        }

    def _columns(self, columns: Mapping[str, Any]) -> Input:
        form = self._form.of_kind("csv")
        if not isinstance(form, TableForm):
            raise DataError(
                f"Model {self._model.name!r} does not say what columns it takes; expected `inputs` as an "
                f"array of shape {self._model.input_shape}, scaled as in training."
            )
        return Input("inputs", None, record_of(form, columns).reshape(self._model.input_shape))

    def _array(self, values: list[Any]) -> Input:
        array = _numbers(values)
        if array is None or array.shape != self._model.input_shape:
            shape = "something else than numbers" if array is None else f"numbers of shape {array.shape}"
            raise DataError(f"`inputs` are {shape}; expected numbers of shape {self._model.input_shape}.")
        return Input("inputs", None, array.astype(np.float32))

    def _pictures(self) -> PictureReader:
        settings = self._form.completed(
            DatasetSettings(path=Path("/"), kind=_IMAGES.kind), _IMAGES.kind, self._target.shape
        )
        section = _IMAGES.fitted(section_of(settings, _IMAGES), self._target.shape)
        return PictureReader(picture_form(self._target, section), self._target, lambda sentence: None)

    def _predicted(self, one: Input, top: int) -> dict[str, Any]:
        (outcome,) = predict(self._model, [one])
        if outcome.problem:
            raise DataError(outcome.problem)
        found = [
            {"class": self._model.class_label(number), "probability": round(probability, 6)}
            for number, probability in outcome.top(top)
        ]
        return {**found[0], "top": found}


_EXPECTED: Final = {
    "about": "true",
    "inputs": "columns by name, or an array",
    "picture": "the path of a picture",
    "picture_bytes": "a picture in base64",
}


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"The request is no JSON ({str(error)[:_MOST_SHOWN]}); expected an object on one line."
        ) from error
    if not isinstance(request, dict):
        raise DataError(f"The request is {_short(request)}; expected a JSON object.")
    return request


def _identity(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer repeats, so that who asks knows it."""
    identity = request.get("id")
    if identity is None:
        return {}
    if isinstance(identity, bool) or not isinstance(identity, int | str) or len(str(identity)) > _LONGEST_ID:
        raise DataError(
            f"`id` is {_short(identity)}; expected a number or text of at most {_LONGEST_ID} characters."
        )
    return {"id": identity}


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"`picture_bytes` are no base64: {error}.") from error


def _numbers(values: Any) -> Any:
    """An array of numbers, or None: numpy would read numbers from text, and take truth values for them."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "iuf" else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
