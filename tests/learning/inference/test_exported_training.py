"""The exported model computes the trained one, and training learns."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
from learning.small_models import SPECS, logits_of, records

from dpagent.errors import DataError, ParameterError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.onnx_evaluator import OnnxEvaluator
from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.onnx_engine import OnnxEngine
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.learning.training.optimiser import Sgd


@pytest.mark.parametrize(
    "spec", [*SPECS, *(spec.head for spec in BUILT_IN.values())], ids=lambda spec: spec.name
)
def test_the_operators_of_onnx_agree_with_the_definition(spec: ModelSpec) -> None:
    """An implementation of every layer that is not ours: what all gradients are held against is held here."""
    weights, inputs, _ = records(spec, 3)
    evaluator = OnnxEvaluator(export_onnx(spec, weights, metadata={}))
    expected = [logits_of(spec, weights, record) for record in inputs]
    np.testing.assert_allclose(evaluator.logits(inputs), expected, atol=1e-4)
    assert evaluator.logits(inputs[:0]).shape == (0, spec.classes)


def test_a_front_end_is_part_of_the_file() -> None:
    spec = built_in("scattering")
    weights, _, _ = records(spec, 0)
    inputs = np.random.default_rng(0).random((3, *spec.input_shape), dtype=np.float32)
    logits = OnnxEvaluator(export_onnx(spec, weights, metadata={})).logits(inputs)
    expected = [logits_of(spec.head, weights, features) for features in FrontEnd(spec)(inputs)]
    np.testing.assert_allclose(logits, expected, atol=1e-3)


def test_the_file_carries_its_metadata_and_is_reproducible() -> None:
    spec = built_in("digits")
    weights, _, _ = records(spec, 0)
    metadata = {"privacy": "ε = 2, δ = 1e-5", "adjacency": "add or remove one record"}
    content = export_onnx(spec, weights, metadata=metadata)
    model = onnx.load_from_string(content)
    assert {entry.key: entry.value for entry in model.metadata_props} == metadata
    assert model.ir_version == 10
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 21)]
    assert content == export_onnx(spec, weights, metadata=dict(reversed(metadata.items())))


def test_weights_that_do_not_fit_or_are_not_finite_are_not_exported() -> None:
    spec = built_in("digits")
    with pytest.raises(ParameterError, match=r"float64 of shape \(9930,\)"):
        export_onnx(spec, np.zeros(9930), metadata={})  # type: ignore[arg-type]
    weights, _, _ = records(spec, 0)
    weights[[3, 4]] = np.nan, np.inf
    with pytest.raises(ParameterError, match="2 of the weights are not finite"):
        export_onnx(spec, weights, metadata={})


def test_bytes_that_are_no_model_are_refused() -> None:
    content = export_onnx(built_in("digits"), built_in("digits").initial_weights(0), metadata={})
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
    evaluator = OnnxEvaluator(export_onnx(spec, spec.initial_weights(0), metadata={}))
    with pytest.raises(DataError, match=r"uint8 of shape \(1, 8, 8, 1\).*float32"):
        evaluator.logits(np.zeros((1, 8, 8, 1), np.uint8))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"\(1, 9, 8, 1\); the model takes float32 of shape \(n, 8, 8, 1\)"):
        evaluator.logits(np.zeros((1, 9, 8, 1), np.float32))


@cache
def handwritten_digits() -> tuple[ArrayDataset, ArrayDataset]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    inputs = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    return ArrayDataset(inputs[train], labels[train], 10), ArrayDataset(inputs[test], labels[test], 10)


def test_digits_are_learnt_without_noise() -> None:
    train, test = handwritten_digits()
    spec = built_in("digits")
    engine = OnnxEngine(spec, build_training_graph(spec))
    optimiser = Sgd(momentum=0.9)
    weights, state = spec.initial_weights(0), np.zeros((optimiser.rows, spec.parameter_count))
    generator = np.random.default_rng(0)
    for number in range(1, 61):
        inputs, labels = train.batch(generator.choice(len(train), 256, replace=False))
        mean = engine.clipped_sum(weights, inputs, labels, [1e9]).total / 256
        weights, state = optimiser.step(weights, state, mean, number=number, learning_rate=0.1)
    evaluator = OnnxEvaluator(export_onnx(spec, weights, metadata={}))
    assert evaluator.accuracy(test, batch=100) > 0.93
