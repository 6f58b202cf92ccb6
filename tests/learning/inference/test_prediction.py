"""What reads model files and inputs for prediction, alone: damage, lies and edges."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported_models import answers, write_model
from onnx import TensorProto, helper

from dpagent.errors import DataError
from dpagent.learning.data.inputs import Input
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.learning.inference.prediction.outcome import Tally, predict


def test_probabilities_are_those_of_numpy_whatever_the_batch(tmp_path: Path) -> None:
    model = ExportedModel(write_model(tmp_path / "m.onnx", (5,), 4))
    values = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    inputs = [Input("x", number, row) for number, row in enumerate(values)]
    for batch in (1, 4, 9, 100):
        outcomes = list(predict(model, iter(inputs), batch=batch))
        shares = np.array([outcome.probabilities for outcome in outcomes])
        np.testing.assert_allclose(shares, answers((5,), 4, values), rtol=2e-5)
        assert [outcome.input.record for outcome in outcomes] == list(range(9))
    assert model.probabilities(values[:0]).shape == (0, 4)
    assert list(predict(model, iter([]))) == []


def test_scores_that_overflow_have_no_answer(tmp_path: Path) -> None:
    model = ExportedModel(write_model(tmp_path / "m.onnx", (2,), 3))
    values = [np.array(row, np.float32) for row in ([1, 1], [3e38, 3e38], [np.nan, 0], [0, 1e4])]
    outcomes = list(predict(model, [Input("x", number, row) for number, row in enumerate(values)]))
    assert [outcome.probabilities is None for outcome in outcomes] == [False, True, True, False]
    assert outcomes[3].probabilities is not None
    assert outcomes[3].probabilities.sum() == pytest.approx(1)
    assert "NaN or infinity" in outcomes[1].problem


def test_bytes_and_floats_may_come_in_one_batch(tmp_path: Path) -> None:
    model = ExportedModel(write_model(tmp_path / "m.onnx", (2,), 3))
    pixels, same = np.array([51, 255], np.uint8), np.array([0.2, 1.0], np.float32)
    first, second = predict(model, [Input("a", None, pixels), Input("b", None, same)])
    assert first.probabilities is not None
    assert second.probabilities is not None
    np.testing.assert_allclose(first.probabilities, second.probabilities, rtol=1e-6)


def test_a_tally_counts_what_has_a_label_and_an_answer(tmp_path: Path) -> None:
    model = ExportedModel(write_model(tmp_path / "m.onnx", (2,), 3))
    values = np.random.default_rng(3).normal(size=(6, 2)).astype(np.float32)
    said = answers((2,), 3, values).argmax(axis=1)
    labels: list[int | None] = [int(said[0]), int(said[1] + 1) % 3, None, int(said[3]), int(said[4]), None]
    inputs = [Input("x", n, row, label) for n, (row, label) in enumerate(zip(values, labels, strict=True))]
    tally = Tally()
    for outcome in predict(model, [*inputs, Input("y", problem="gone", label=1)]):
        tally.add(outcome)
    assert (tally.inputs, tally.unanswered, tally.labelled, tally.right) == (7, 1, 4, 3)
    assert tally.accuracy == 0.75
    assert Tally().accuracy is None


def hostile(path: Path, kind: str) -> Path:
    """Files that are not what they should be."""
    good = write_model(path.with_name("good.onnx"), (2,), 3, ["cat", "fox", "owl"])
    data = good.read_bytes()
    if kind in ("empty", "text", "truncated"):
        path.write_bytes({"empty": b"", "text": b"hello\n" * 50, "truncated": data[: len(data) // 2]}[kind])
        return path
    if kind == "letters":
        path.write_bytes(data.replace(b"dpagent.round", b"dpagent.\xff\xfe\xfd\xfc\xfb"))
        return path
    loaded = onnx.load_from_string(data)
    if kind == "stranger":
        loaded.producer_name = "pytorch\x1b[2J"
    elif kind == "operator":
        loaded.graph.node[0].op_type = "Teleport"
    elif kind == "names":
        del loaded.metadata_props[:]
        helper.set_model_props(loaded, {"dpagent.classes": '["a", "a", "b"]'})
    elif kind == "huge":
        loaded = helper.make_model(
            helper.make_graph(
                [helper.make_node("Identity", ["input"], ["logits"])], "x",
                [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 1 << 40])],
                [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 1 << 40])],
            ),
            producer_name="dpagent", opset_imports=[helper.make_opsetid("", 21)], ir_version=10,
        )  # fmt: skip
    path.write_bytes(loaded.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("empty", "has 0 bytes"),
        ("text", "is not an ONNX file, or a truncated one"),
        ("truncated", "is not an ONNX file, or a truncated one"),
        ("stranger", "an ONNX file of 'pytorch"),
        ("operator", "Teleport"),
        ("names", "expected a list of 3 different names"),
        ("huge", "expected at most 16,777,216 values"),
        ("letters", "names that are not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_model_of_ours_is_refused(tmp_path: Path, kind: str, text: str) -> None:
    file = hostile(tmp_path / "bad.onnx", kind)
    with pytest.raises(DataError, match=re.escape(text)) as caught:
        ExportedModel(file)
    assert str(file) in str(caught.value)
    assert str(caught.value).isprintable()
