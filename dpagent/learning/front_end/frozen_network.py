"""A frozen network from an ONNX file, run by ONNX Runtime on one record at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError
from dpagent.learning.evaluation import LOAD_ERRORS, RUNTIME_ERRORS, first_line, quiet_session
from dpagent.learning.layers import Shape

Floats = NDArray[np.float32]


class OnnxFeatures:
    """What the network makes of a record.

    Args:
        where: what the text of an error begins with.
        model: the file's bytes: one input and one output, float32, channels last, the first axis
            of both for records.
        input_shape, output_shape: of one record.

    Raises:
        ConfigurationError: the file is no such network, or holds an operator that ONNX Runtime lacks.
    """

    def __init__(self, where: str, model: bytes, input_shape: Shape, output_shape: Shape) -> None:
        self._where, self._output_shape = where, output_shape
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
        self(np.zeros(input_shape, np.float32))

    def __call__(self, values: Floats) -> Floats:
        """The features of one record."""
        try:
            (result,) = self._session.run(None, {self._input: values[np.newaxis]})
        except RUNTIME_ERRORS as error:
            raise ConfigurationError(
                f"{self._where}: its network cannot be run: {first_line(error)}"
            ) from error
        features: NDArray[Any] = np.asarray(result)
        if features.shape != (1, *self._output_shape):
            raise ConfigurationError(
                f"{self._where}: its network makes {features.shape[1:]} of a record; the model says"
                f" {self._output_shape}."
            )
        return np.asarray(features[0], np.float32)
