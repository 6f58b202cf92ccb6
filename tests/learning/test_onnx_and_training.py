"""The exported model computes what was trained, and what is trained learns."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest

from dpagent.errors import DataError, ParameterError
from dpagent.learning import (
    BUILT_IN,
    Conv2d,
    Dataset,
    Dense,
    MaxPool2d,
    ModelSpec,
    MomentumSgd,
    NumpyEngine,
    Tanh,
    built_in,
)
from dpagent.learning.evaluation import OnnxEvaluator
from dpagent.learning.onnx_export import export_onnx

OTHERS = [
    ModelSpec("dense", (2, 3, 2), 3, (Dense(3),), 0.4, 0.5),
    ModelSpec(
        "oblong", (9, 7, 3), 4, (Conv2d(5, 2, padding=1), MaxPool2d(3, 2), Tanh(), Dense(6), Tanh(), Dense(4))
    ),
]


def weights_of(spec: ModelSpec) -> Any:
    noise = np.random.default_rng(0).normal(0, 0.1, spec.parameter_count).astype(np.float32)
    return spec.initial_weights(1) + noise


@pytest.mark.parametrize("spec", [*BUILT_IN.values(), *OTHERS], ids=lambda spec: spec.name)
def test_onnx_logits_agree_with_the_engine(spec: ModelSpec) -> None:
    weights = weights_of(spec)
    inputs = np.random.default_rng(1).random((9, *spec.input_shape), dtype=np.float32)
    evaluator = OnnxEvaluator(export_onnx(spec, weights, metadata={}))
    np.testing.assert_allclose(evaluator.logits(inputs), NumpyEngine(spec).logits(weights, inputs), atol=1e-4)
    assert evaluator.logits(inputs[:0]).shape == (0, spec.classes)


def test_the_file_carries_its_metadata_and_is_reproducible() -> None:
    spec = built_in("digits")
    metadata = {"privacy": "ε = 2, δ = 1e-5", "adjacency": "add or remove one record"}
    content = export_onnx(spec, weights_of(spec), metadata=metadata)
    model = onnx.load_from_string(content)
    assert {entry.key: entry.value for entry in model.metadata_props} == metadata
    assert model.ir_version == 10
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 21)]
    assert content == export_onnx(spec, weights_of(spec), metadata=dict(reversed(metadata.items())))


def test_weights_that_do_not_fit_or_are_not_finite_are_not_exported() -> None:
    spec = built_in("digits")
    with pytest.raises(ParameterError, match=r"float64 of shape \(9930,\)"):
        export_onnx(spec, np.zeros(9930), metadata={})  # type: ignore[arg-type]
    weights = weights_of(spec)
    weights[[3, 4]] = np.nan, np.inf
    with pytest.raises(ParameterError, match="2 of the weights are not finite"):
        export_onnx(spec, weights, metadata={})


def test_bytes_that_are_no_model_are_refused() -> None:
    content = export_onnx(built_in("digits"), weights_of(built_in("digits")), metadata={})
    for broken in (b"", b"not a model", content[: len(content) // 2]):
        with pytest.raises(DataError, match="cannot be loaded"):
            OnnxEvaluator(broken)
    model = onnx.load_from_string(content)
    model.graph.output[0].name = "scores"
    model.graph.node[-1].output[0] = "scores"
    with pytest.raises(DataError, match=r"outputs \['scores'\]; expected one input 'input'"):
        OnnxEvaluator(model.SerializeToString())
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(DataError, match="NoSuchOperator"):
        OnnxEvaluator(model.SerializeToString())


def test_inputs_that_do_not_fit_the_model_are_refused() -> None:
    spec = built_in("digits")
    evaluator = OnnxEvaluator(export_onnx(spec, weights_of(spec), metadata={}))
    with pytest.raises(DataError, match=r"uint8 of shape \(1, 8, 8, 1\).*float32"):
        evaluator.logits(np.zeros((1, 8, 8, 1), np.uint8))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"\(1, 9, 8, 1\); the model takes float32 of shape \(n, 8, 8, 1\)"):
        evaluator.logits(np.zeros((1, 9, 8, 1), np.float32))


@cache
def handwritten_digits() -> tuple[Dataset, Dataset]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    inputs = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    return Dataset(inputs[train], labels[train], 10), Dataset(inputs[test], labels[test], 10)


def test_digits_are_learnt_without_noise() -> None:
    train, test = handwritten_digits()
    spec = built_in("digits")
    engine = NumpyEngine(spec)
    optimiser = MomentumSgd(learning_rate=0.1, momentum=0.9)
    weights, velocity = spec.initial_weights(0), optimiser.initial_velocity(spec.parameter_count)
    generator = np.random.default_rng(0)
    for _ in range(60):
        inputs, labels = train.batch(generator.choice(len(train), 256, replace=False))
        total = np.zeros(spec.parameter_count)
        for part in engine.gradients(weights, inputs, labels):
            total += part.sum(axis=0)
        weights, velocity = optimiser.step(weights, velocity, total / 256)
    accuracy = engine.accuracy(weights, *test.batch(np.arange(len(test))))
    assert accuracy > 0.93
    evaluator = OnnxEvaluator(export_onnx(spec, weights, metadata={}))
    assert evaluator.accuracy(test, batch=100) == pytest.approx(accuracy, abs=1 / len(test))
