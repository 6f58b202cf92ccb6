"""The accuracy of an exported model on held-out data, measured on the exported file itself.

The coordinator evaluates the ONNX bytes it would hand out, through ONNX Runtime, and not its
own copy of the weights: an error of the export then shows in the figures.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError, require_count
from dpagent.learning.data.dataset import Dataset, to_float32
from dpagent.learning.inference.evaluation import Evaluation
from dpagent.learning.onnx_session import LOAD_ERRORS, RUNTIME_ERRORS, first_line, quiet_session
from dpagent.wording import counted


class OnnxEvaluator:
    """Runs one model of :func:`~dpagent.learning.inference.export.model.export_onnx` on the CPU.

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
                f"The model of {counted(len(model), 'byte')} cannot be loaded: {first_line(error)}"
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
        return self.evaluate(dataset, batch).accuracy

    def evaluate(self, dataset: Dataset, batch: int = 512) -> Evaluation:
        """The model's answers for ``dataset``, by class, and their loss."""
        require_count("batch", batch)
        confusion = np.zeros((self._classes, self._classes), np.int64)
        loss = 0.0
        for start in range(0, len(dataset), batch):
            inputs, labels = dataset.batch(np.arange(start, min(start + batch, len(dataset))))
            logits = self.logits(to_float32(inputs))
            np.add.at(confusion, (labels, logits.argmax(axis=1)), 1)
            loss += _cross_entropy(logits, labels)
        return Evaluation(confusion, loss / len(dataset))


def _cross_entropy(logits: NDArray[np.float32], labels: NDArray[np.integer[Any]]) -> float:
    """The sum over records of −log softmax at the label."""
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        own = shifted[np.arange(len(labels)), labels]
        return float(np.sum(np.log(np.exp(shifted).sum(axis=1)) - own))
