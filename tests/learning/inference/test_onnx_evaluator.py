"""The evaluation of an exported model, against its definition, record by record."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fleets import DIGITS, digits

from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.onnx_evaluator import OnnxEvaluator, _cross_entropy


def test_answers_by_class_and_loss_are_those_of_single_records() -> None:
    weights = DIGITS.initial_weights(3)
    evaluator, data = OnnxEvaluator(export_onnx(DIGITS, weights, metadata={})), digits(1_500, 1_650)
    found = evaluator.evaluate(data, batch=64)
    confusion, loss = np.zeros((10, 10), int), 0.0
    for number in range(len(data)):
        inputs, labels = data.batch(np.array([number]))
        scores = [float(score) for score in evaluator.logits(inputs)[0]]
        confusion[labels[0], scores.index(max(scores))] += 1
        loss += math.log(sum(math.exp(score) for score in scores)) - scores[labels[0]]
    assert found.confusion.tolist() == confusion.tolist()
    assert found.loss == pytest.approx(loss / len(data), rel=1e-6)
    assert found.accuracy == evaluator.accuracy(data) == np.trace(confusion) / len(data)


def test_scores_that_overflow_or_are_none_make_no_error() -> None:
    labels = np.array([0, 1])
    assert _cross_entropy(np.array([[3e38, 0.0], [0.0, 3e38]], np.float32), labels) == 0.0
    assert not math.isfinite(_cross_entropy(np.array([[np.nan, 0.0], [np.inf, 0.0]], np.float32), labels))
