"""Small architectures with every kind of layer, and their losses and gradients by the layers' definition.

The one oracle for both engines: :func:`~dpagent.learning.models.forward.forward` in float64, and differences
of it. That definition is held against ONNX Runtime's own operators in ``inference/test_exported_training``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpagent.learning.models.forward import forward
from dpagent.learning.models.layers import (
    AveragePool1d,
    AveragePool2d,
    Conv1d,
    Conv2d,
    Dense,
    GroupNorm,
    Layer,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Residual,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec


def small(
    name: str, shape: tuple[int, ...], *layers: Layer, offset: Any = 0.0, scale: Any = 1.0
) -> ModelSpec:
    return ModelSpec(name, shape, 3, (*layers, Dense(3)), offset, scale)


SPECS = [
    small("dense", (5,), Dense(4), Tanh(), offset=0.4, scale=0.5),
    small("padded", (7, 6, 3), Conv2d(4, 3, 1, 1), Tanh(), Conv2d(5, 3, 2, 1), Relu()),
    small(
        "grey", (9, 8, 1), Conv2d(4, 4, 2, 1), Tanh(), MaxPool2d(2, 1), Conv2d(5, 2), Tanh(), MaxPool2d(2, 2),
        offset=0.1, scale=0.3,
    ),
    small(
        "pools", (9, 9, 2), Conv2d(4, 2), MaxPool2d(3, 2), Tanh(), Conv2d(3, 2), AveragePool2d(2, 1),
        offset=(0.1, 0.2), scale=(0.3, 0.4),
    ),
    small("tiles", (8, 8, 5), Conv2d(4, 3, 3, 2), AveragePool2d(2, 2)),
    small(
        "series", (12, 3), Conv1d(4, 3, 1, 1), MaxPool1d(2, 2), Tanh(), Conv1d(5, 3, 2, 1), Relu(),
        AveragePool1d(2, 1),
    ),
    small(
        "residual", (6, 6, 3), Conv2d(4, 3, 1, 1), GroupNorm(2), Relu(),
        Residual((Conv2d(6, 3, 2, 1), GroupNorm(3), Relu(), Conv2d(6, 3, 1, 1)), (Conv2d(6, 1, 2),)),
        Relu(), Residual((Conv2d(6, 3, 1, 1),)), AveragePool2d(3, 3),
    ),
    small("frozen first", (6, 6, 4), MaxPool2d(2, 2), GroupNorm(2), Tanh(), Conv2d(4, 1), MaxPool2d(2, 1)),
    small(
        "residual first", (5, 5, 2), Residual((Conv2d(2, 3, 1, 1), Tanh())),
        Residual((Tanh(),), (Conv2d(2, 1),)),
    ),
    small("windows in the padding", (9, 9, 2), Conv2d(4, 1, 3), Tanh(), Conv2d(4, 2, 3, 2), MaxPool2d(1, 2)),
    small(
        "long series", (38, 2), Conv1d(3, 2), Tanh(), Conv1d(4, 3, 1, 1), MaxPool1d(2, 2), Tanh(),
        Conv1d(3, 2, 2),
    ),
    small(
        "pooled branches", (6, 6, 2),
        Residual((Conv2d(2, 3, 1, 1), Relu(), MaxPool2d(2, 2)), (MaxPool2d(2, 2),)),
        Conv2d(2, 1), Residual((Relu(), MaxPool2d(2, 1)), (Conv2d(2, 2),)),
    ),
    small("only padding is read", (3, 3, 2), Conv2d(2, 1), Conv2d(2, 1, 1, 1), MaxPool2d(1, 5)),
    small("only padding of a series is read", (6, 2), Conv1d(2, 1), Conv1d(2, 2, 1, 2), AveragePool1d(1, 9)),
]  # fmt: skip


def loss_of(spec: ModelSpec, weights: Any, record: Any, label: int) -> float:
    """The softmax cross-entropy of one record."""
    logits = logits_of(spec, weights, record)
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[label])


def logits_of(spec: ModelSpec, weights: Any, record: Any) -> Any:
    """The scores of one record, after a front end if the model has one."""
    x = (record.astype(np.float64) - np.array(spec.input_offset)) / np.array(spec.input_scale)
    return forward(spec.nodes, weights.astype(np.float64), x)


def differences(spec: ModelSpec, weights: Any, record: Any, label: int) -> Any:
    """The gradient of the plain loss by central differences."""
    step, exact = 1e-6, weights.astype(np.float64)
    gradient = np.empty(len(weights))
    for index in range(len(weights)):
        moved = [exact.copy(), exact.copy()]
        moved[0][index] -= step
        moved[1][index] += step
        below, above = (loss_of(spec, each, record, label) for each in moved)
        gradient[index] = (above - below) / (2 * step)
    return gradient


def records(spec: ModelSpec, count: int, seed: int = 1) -> tuple[Any, Any, Any]:
    """Weights with noise on all of them, inputs in [0, 1) and labels."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(0, 0.1, spec.parameter_count).astype(np.float32)
    inputs = generator.random((count, *spec.feature_shape), dtype=np.float32)
    return spec.initial_weights(seed) + noise, inputs, generator.integers(0, spec.classes, count)


def close(found: Any, expected: Any, relative: float = 1e-5) -> None:
    """Fail unless all numbers agree, relative to the largest of them."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=relative * max(np.abs(expected).max(), 1e-9))
