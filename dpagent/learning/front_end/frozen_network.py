"""A frozen network from an ONNX file, run by ONNX Runtime on one record at a time.

Its operators are checked when the model file is read, before a network is shipped or trusted
(:mod:`dpagent.learning.front_end.network_check`); a device runs a network that its owner trusts by digest.
A record that the network fails on nevertheless has features that are not finite, and is excluded like any
other such record: a failed round must not tell that a device has such a record.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError
from dpagent.learning.models.part import Shape
from dpagent.learning.onnx_session import LOAD_ERRORS, RUNTIME_ERRORS, first_line, quiet_session

Floats = NDArray[np.float32]

# A failure costs its own record only, also a failure to allocate memory for the shape it asks for.
_RUN_ERRORS: tuple[type[Exception], ...] = (
    *RUNTIME_ERRORS, RuntimeError, ValueError, TypeError, MemoryError, ArithmeticError
)  # fmt: skip


class OnnxFeatures:
    """The network as a function of one record.

    Args:
        where: the beginning of every error text.
        model: the file's bytes: one input and one output, float32, channels last, the first axis
            of both for records.
        input_shape: of one record.
        output_shape: of one record; without it, that of the network's output.

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
