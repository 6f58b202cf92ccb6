"""A frozen network from an ONNX file, run by ONNX Runtime on one record at a time.

Whoever ships a network, or trusts one for a device, has its operators checked when the model file is read
(:mod:`dpagent.learning.front_end.network_check`); a device runs what its owner trusts by digest. A record
that the network fails on nevertheless has features that are not finite, and is excluded like any other
such record: that a round fails must not tell that a device has such a record.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError
from dpagent.learning.inference.evaluation import LOAD_ERRORS, RUNTIME_ERRORS, first_line, quiet_session
from dpagent.learning.models.description import from_description
from dpagent.learning.models.layers import Shape

Floats = NDArray[np.float32]

# Whatever comes of a record is the record's own affair: memory for a shape it asks for, too.
_RUN_ERRORS: tuple[type[Exception], ...] = (
    *RUNTIME_ERRORS, RuntimeError, ValueError, TypeError, MemoryError, ArithmeticError
)  # fmt: skip


def named_files(description: dict[Any, Any], path: Path) -> list[tuple[int, bytes]]:
    """The number of each stage of a front end that names a file, and what is in the file.

    Args:
        description: of a model file.
        path: of the model file, which the names are relative to.

    Raises:
        ConfigurationError: a file cannot be read, or is a network that may not see private records.
    """
    found = []
    for number, stage in enumerate(description["front_end"]):
        values = stage.get("onnx") if isinstance(stage, dict) else None
        if not isinstance(values, dict) or "file" not in values:
            continue
        file = path.parent / str(values["file"])
        where = f"{path}, front end, stage {number} onnx: {file}"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"{where}: {error.strerror}. Give the path of an ONNX file, relative to the model file."
            ) from error
        _check(where, data)
        found.append((number, data))
    return found


def _check(where: str, model: bytes) -> None:
    try:
        from dpagent.learning.front_end.network_check import check_network
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{where} has to be checked with the package {error.name}, which is not installed: pip install"
            " 'dpagent[coordinator]'."
        ) from error
    check_network(where, model)


def with_digests(description: dict[Any, Any], path: Path) -> dict[Any, Any]:
    """``description`` with the digest and the output shape of each file in place of its name.

    Raises:
        ConfigurationError: a file cannot be read, or is no network for what comes before it.
    """
    stages = list(description["front_end"])
    for number, data in named_files(description, path):
        values = stages[number]["onnx"]
        stages[number] = {
            "onnx": {
                "digest": hashlib.sha256(data).hexdigest(),
                "output_shape": [1],
                **{key: value for key, value in values.items() if key != "file"},
            }
        }
        before = from_description(
            {**description, "front_end": stages[:number], "layers": [{"dense": description.get("classes")}]},
            where=str(path),
        )
        where = f"{path}, front end, stage {number} onnx"
        stages[number]["onnx"]["output_shape"] = list(
            OnnxFeatures(where, data, before.feature_shape).output_shape
        )
    return {**description, "front_end": stages}


class OnnxFeatures:
    """What the network makes of a record.

    Args:
        where: what the text of an error begins with.
        model: the file's bytes: one input and one output, float32, channels last, the first axis
            of both for records.
        input_shape: of one record.
        output_shape: of one record; without it, what the network makes of it.

    Raises:
        ConfigurationError: the file is no such network, or holds an operator that ONNX Runtime lacks.
    """

    def __init__(
        self, where: str, model: bytes, input_shape: Shape, output_shape: Shape | None = None
    ) -> None:
        try:
            self._session = quiet_session(model)
        except LOAD_ERRORS as error:
            raise ConfigurationError(f"{where}: its network cannot be loaded: {first_line(error)}") from error
        ends = [self._session.get_inputs(), self._session.get_outputs()]
        if any(len(values) != 1 or values[0].type != "tensor(float)" for values in ends):
            raise ConfigurationError(
                f"{where}: its network has {len(ends[0])} inputs and {len(ends[1])} outputs; expected one of"
                " each, of float32."
            )
        self._input = ends[0][0].name
        try:
            after = self._run(np.zeros(input_shape, np.float32)).shape
        except _RUN_ERRORS as error:
            raise ConfigurationError(f"{where}: its network cannot be run: {first_line(error)}") from error
        if after[:1] != (1,) or output_shape not in (None, after[1:]):
            raise ConfigurationError(
                f"{where}: its network makes {after[1:]} of a record; the model says {output_shape}."
            )
        self.output_shape: Shape = after[1:]

    def __call__(self, values: Floats) -> Floats:
        """The features of one record; NaN where the network fails on it, or makes another shape of it."""
        try:
            features = self._run(values)
        except _RUN_ERRORS:
            features = np.empty(0, np.float32)
        if features.shape != (1, *self.output_shape):
            return np.full(self.output_shape, np.nan, np.float32)
        return np.asarray(features[0])

    def _run(self, values: Floats) -> Floats:
        (result,) = self._session.run(None, {self._input: values[np.newaxis]})
        return np.asarray(result, np.float32)
