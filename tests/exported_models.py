"""Model files for tests, whose answers a few lines of numpy can give as well."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpagent.learning.data.input_form import InputForm
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.models.layers import Dense
from dpagent.learning.models.spec import ModelSpec

SENTENCE = "ε = 2, δ = 1e-5 (record-level)"


def linear(shape: tuple[int, ...], classes: int) -> tuple[ModelSpec, np.ndarray]:
    """A model that is one product, and its weights: a row a value, and the bias."""
    spec = ModelSpec("linear", shape, classes, (Dense(classes),), input_offset=0.5, input_scale=0.25)
    return spec, spec.initial_weights(1) + np.linspace(-0.1, 0.1, spec.parameter_count, dtype=np.float32)


def answers(shape: tuple[int, ...], classes: int, inputs: np.ndarray) -> np.ndarray:
    """The probabilities ``(n, classes)`` that :func:`linear` gives."""
    _, weights = linear(shape, classes)
    matrix = weights.reshape(-1, classes).astype(np.float64)
    values = inputs / 255 if inputs.dtype == np.uint8 else inputs.astype(np.float64)
    rows = (values.reshape(len(inputs), -1) - 0.5) / 0.25
    powers = np.exp(rows @ matrix[:-1] + matrix[-1])
    return powers / powers.sum(axis=1, keepdims=True)


def write_model(
    path: Path,
    shape: tuple[int, ...],
    classes: int,
    names: Sequence[str] | None = None,
    inputs: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """The file that a coordinator would write of :func:`linear`, with ``model.inputs`` as given."""
    metadata = {
        "dpagent.model": "linear",
        "dpagent.round": "7",
        "dpagent.privacy": SENTENCE,
        "dpagent.privacy_statement": json.dumps({"epsilon": 2.0}),
        "dpagent.epsilon_spent": "1.5000004",
        "dpagent.spent": json.dumps([{"epsilon": 1.5}]),
        **({} if names is None else {"dpagent.classes": json.dumps(list(names))}),
        **({} if inputs is None else {"dpagent.inputs": InputForm.checked(inputs).text()}),
        **changes,
    }
    spec, weights = linear(shape, classes)
    path.write_bytes(export_onnx(spec, weights, metadata=metadata))
    return path
