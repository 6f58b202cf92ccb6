"""What an exported model does on held-out data, measured on the exported file itself.

The coordinator evaluates the ONNX bytes it would hand out, through ONNX Runtime, and not its
own copy of the weights: an error of the export then shows in the figures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as _runtime

from dpagent.errors import DataError, require_count
from dpagent.learning.data.dataset import Dataset, to_float32

# The runtime's errors share no base class but Exception, and differ between versions.
RUNTIME_ERRORS: tuple[type[Exception], ...] = tuple(
    kind
    for name in (
        "EPFail",
        "EngineError",
        "Fail",
        "InvalidArgument",
        "InvalidGraph",
        "InvalidProtobuf",
        "ModelLoadCanceled",
        "ModelLoaded",
        "ModelRequiresCompilation",
        "NoModel",
        "NoSuchFile",
        "NotFound",
        "NotImplemented",
        "RuntimeException",
    )
    if isinstance(kind := getattr(_runtime, name, None), type) and issubclass(kind, Exception)
)
LOAD_ERRORS: tuple[type[Exception], ...] = (*RUNTIME_ERRORS, ValueError, TypeError)


class OnnxEvaluator:
    """Runs one model of :func:`~dpagent.learning.inference.export.export_onnx` on the CPU.

    Args:
        model: the file's bytes.
        threads: how many threads one call may use.

    Raises:
        DataError: the bytes are not a model with an input ``input`` and an output ``logits``.
    """

    def __init__(self, model: bytes, *, threads: int = 1) -> None:
        try:
            self._session = quiet_session(model, threads=threads)
        except LOAD_ERRORS as error:
            raise DataError(
                f"The model of {len(model)} bytes cannot be loaded: {first_line(error)}"
            ) from error
        inputs = {value.name: value for value in self._session.get_inputs()}
        outputs = {value.name: value for value in self._session.get_outputs()}
        if set(inputs) != {"input"} or "logits" not in outputs or not 2 <= len(inputs["input"].shape) <= 4:
            raise DataError(
                f"The model has the inputs {sorted(inputs)} and the outputs {sorted(outputs)}; expected one"
                " input 'input' of two to four dimensions, and 'logits'. Export it with dpagent."
            )
        self._shape = tuple(inputs["input"].shape[1:])
        self._classes = outputs["logits"].shape[-1]

    def logits(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """The ``(n, classes)`` scores of float32 inputs ``(n, *shape)`` in [0, 1]."""
        if inputs.dtype != np.float32 or inputs.shape[1:] != self._shape:
            raise DataError(
                f"The inputs are {inputs.dtype} of shape {inputs.shape}; the model takes float32 of shape"
                f" (n, {', '.join(map(str, self._shape))})."
            )
        if len(inputs) == 0:
            return np.empty((0, self._classes), np.float32)
        try:
            result: Any = self._session.run(["logits"], {"input": inputs})
        except RUNTIME_ERRORS as error:
            raise DataError(f"The model cannot be run: {first_line(error)}") from error
        return np.asarray(result[0], np.float32)

    def accuracy(self, dataset: Dataset, batch: int = 512) -> float:
        """The fraction of ``dataset`` whose largest logit is that of its label."""
        require_count("batch", batch)
        right = 0
        for start in range(0, len(dataset), batch):
            inputs, labels = dataset.batch(np.arange(start, min(start + batch, len(dataset))))
            right += int(np.count_nonzero(self.logits(to_float32(inputs)).argmax(axis=1) == labels))
        return right / len(dataset)


def quiet_session(model: bytes, *, threads: int = 1, sizes: Mapping[str, int] | None = None) -> Any:
    """A session on the CPU that prints nothing; raises one of :data:`LOAD_ERRORS`.

    A model is the bytes alone: one whose constants lie in other files is refused.

    Args:
        model: the file's bytes.
        threads: how many threads one call may use.
        sizes: what free dimensions are fixed to, by their names.
    """
    options = onnxruntime.SessionOptions()
    for name, size in (sizes or {}).items():
        options.add_free_dimension_override_by_name(name, size)
    # Below it nothing can lie. Otherwise a model could name files of this directory as its constants.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    # Not the runtime's own format: as that, a file could hold another network than the one looked at.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.intra_op_num_threads = require_count("threads", threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # What goes wrong is raised; nothing is printed besides.
    # The fallback would print that it tries the same again.
    return onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], enable_fallback=False
    )


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
