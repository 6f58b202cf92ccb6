"""The engine on ONNX Runtime: exactness, bad records, bad graphs, memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from learning.engines import engine_of, onnx_engine
from learning.small_models import SPECS, close, records, small
from onnx import helper

from dpagent.errors import ConfigurationError, DataError, ParameterError
from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.layers import Conv2d, Relu
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import accumulation_slack
from dpagent.learning.training.onnx_engine import OnnxEngine
from dpagent.learning.training.onnx_graph.__main__ import digest_table
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.learning.training.onnx_graph.signature import graph_digest, known_digests


def test_bytes_are_taken_as_parts_of_255() -> None:
    spec = built_in("digits")
    weights, inputs, labels = records(spec, 5)
    pixels = (inputs * 255).astype(np.uint8)
    subject = engine_of("onnx", spec)
    from_bytes = subject.clipped_sum(weights, pixels, labels, [0.5]).total
    from_floats = subject.clipped_sum(weights, pixels / np.float32(255), labels, [0.5]).total
    assert from_bytes.tobytes() == from_floats.tobytes()


def test_rows_change_no_more_than_the_order_of_sums() -> None:
    spec = built_in("cifar-cnn")
    weights, inputs, labels = records(spec, 21)
    subject = onnx_engine(spec, microbatch=8)
    assert subject.rows == 4
    one = subject.clipped_sum(weights, inputs, labels, [1.0])
    close(one.total, engine_of("onnx", spec).clipped_sum(weights, inputs, labels, [1.0]).total)
    assert onnx_engine(spec, views=4).rows == 1


def test_sums_are_as_exact_as_the_slack_says() -> None:
    spec, clip_norm, microbatch = built_in("digits"), 0.01, 64
    weights, inputs, labels = records(spec, 256)
    singles = [
        engine_of("onnx", spec).clipped_sum(weights, inputs[i : i + 1], labels[i : i + 1], [clip_norm])
        for i in range(256)
    ]
    norms = np.array([np.linalg.norm(single.total) for single in singles])
    assert np.all(norms <= clip_norm * (1 + accumulation_slack(1)))
    assert norms.min() > clip_norm * 0.999
    total = onnx_engine(spec, microbatch=microbatch).clipped_sum(weights, inputs, labels, [clip_norm]).total
    exact = np.sum([single.total for single in singles], axis=0)
    # A lot of four microbatches is off by four of the errors of which the slack holds four.
    assert np.linalg.norm(total - exact) <= accumulation_slack(microbatch) * clip_norm


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (SPECS[1], (np.nan, np.inf, -np.inf)),
        (SPECS[6], (np.nan, np.inf)),
        (SPECS[7], (np.nan, np.inf)),
        (built_in("digits"), (np.nan, np.inf)),
        # What is finite itself gets out of range on its way.
        (small("overflow", (6, 6, 4), Conv2d(4, 3), Relu()), (np.nan, 3e38, -3e38)),
    ],
)
def test_records_that_are_not_finite_add_exact_zeros(
    spec: ModelSpec, values: tuple[float, ...], per_layer: bool
) -> None:
    weights, inputs, labels = records(spec, 7)
    subject = onnx_engine(spec, per_layer=per_layer, microbatch=4)
    clip_norms = [0.1] * subject.groups
    totals = set()
    for value in values:
        spoilt = inputs.copy()
        spoilt[2] = value
        result = subject.clipped_sum(weights, spoilt, labels, clip_norms)
        assert result.excluded == 1
        totals.add(result.total.tobytes())
        spoilt[:] = value
        result = subject.clipped_sum(weights, spoilt, labels, clip_norms)
        assert (result.excluded, result.within.sum()) == (7, 0)
        assert not result.total.any()
    assert len(totals) == 1
    rest = subject.clipped_sum(weights, np.delete(inputs, 2, 0), np.delete(labels, 2), clip_norms)
    close(np.frombuffer(totals.pop()), rest.total, 1e-6)


def test_a_gradient_too_long_for_float32_is_left_out() -> None:
    spec = small("linear", (4,))
    weights, inputs, labels = records(spec, 3)
    inputs[1] = 1e25  # Finite, and so is the gradient; its square is not.
    result = onnx_engine(spec).clipped_sum(weights, inputs, labels, [1.0])
    assert result.excluded == 1
    close(result.total, onnx_engine(spec).clipped_sum(weights, inputs[::2], labels[::2], [1.0]).total, 1e-6)


def test_weights_that_are_not_finite_release_nothing() -> None:
    spec = built_in("digits")
    weights, inputs, labels = records(spec, 5)
    weights[17] = np.nan
    result = engine_of("onnx", spec).clipped_sum(weights, inputs, labels, [1.0])
    assert (result.excluded, result.within.tolist()) == (5, [0])
    assert not result.total.any()


# The largest has the layers of mnist-cnn, and takes seconds; an engine tries its own model when it is chosen.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "cifar-cnn" else name
        for name in sorted(BUILT_IN)
    ],
)
def test_this_machine_is_batch_invariant(name: str) -> None:
    spec = built_in(name)
    assert OnnxEngine(spec, build_training_graph(spec), microbatch=8).is_batch_invariant()


def test_a_graph_that_mixes_records_is_found_out() -> None:
    spec = built_in("digits")
    model = onnx.load_from_string(build_training_graph(spec))
    (place,) = (index for index, node in enumerate(model.graph.node) if node.op_type == "Softmax")
    logits = model.graph.node[place].input[0]
    model.graph.node[place].input[0] = "mixed"
    axis = helper.make_tensor("axis", onnx.TensorProto.INT64, [1], [0])
    model.graph.initializer.append(axis)
    model.graph.node.insert(place, helper.make_node("Add", [logits, "mean"], ["mixed"]))
    model.graph.node.insert(place, helper.make_node("ReduceMean", [logits, "axis"], ["mean"]))
    graph = model.SerializeToString()
    assert not OnnxEngine(spec, graph, trusted={graph_digest(graph)}).is_batch_invariant()


def test_only_known_graphs_are_run() -> None:
    spec = built_in("digits")
    graph = build_training_graph(spec)
    OnnxEngine(spec, graph)
    model = onnx.load_from_string(graph)
    for node in model.graph.node:  # Every record counts as if it were within the norm.
        if node.op_type == "Min":
            node.op_type = "Max"
    tampered = model.SerializeToString()
    with pytest.raises(ConfigurationError, match=f"SHA-256 {graph_digest(tampered)}.*trusted_graphs"):
        OnnxEngine(spec, tampered)
    with pytest.raises(ConfigurationError, match="trusted_graphs"):  # known, but for another model
        OnnxEngine(spec, build_training_graph(built_in("sensor-cnn")))
    OnnxEngine(SPECS[0], other := build_training_graph(SPECS[0]), trusted=[graph_digest(other)])


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("per_layer", [False, True])
def test_no_number_of_a_record_decides_which_operators_run(name: str, per_layer: bool) -> None:
    """Before, a gradient that is not finite had another branch run: 32 records of digits took 731 µs in place
    of 630. Later, one number took the place of all of such a record, which the runtime wrote in another way
    than it copied those of others: 12,000 instructions of 320,000 more."""
    graph = onnx.load_from_string(build_training_graph(built_in(name), per_layer=per_layer)).graph
    assert {node.op_type for node in graph.node}.isdisjoint({"If", "Loop", "Scan"})
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    chosen = [node.input for node in graph.node if node.op_type == "Where"]
    whole_rows = [each for each in chosen if made_by[each[0]] == "Cast"]
    assert len(whole_rows) == len(chosen) - 1, "but for the factors, which are as many as the conditions"
    assert {made_by.get(zeros) for _, _, zeros in whole_rows} == {"ConstantOfShape"}
    shapes = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "ConstantOfShape"}
    sizes = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    assert min(sizes[shapes[zeros]][1] for _, _, zeros in whole_rows) > 1, "and no single zero"


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (b"", "of 0 bytes for model 'digits' cannot be loaded"),
        (b"not a graph", "cannot be loaded"),
        (build_training_graph(built_in("digits"))[:-2_000], "cannot be loaded"),
        (build_training_graph(built_in("sensor-cnn")), "model 'digits': of its inputs, '0.conv1d.bias'"),
        (build_training_graph(SPECS[0]), "not one for model 'digits'"),
    ],
)  # fmt: skip
def test_trusted_bytes_that_are_no_graph_for_the_model_are_refused(graph: bytes, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        OnnxEngine(built_in("digits"), graph, trusted=[graph_digest(graph)])


def test_what_does_not_fit_the_model_is_refused() -> None:
    spec, subject = built_in("digits"), engine_of("onnx", built_in("digits"))
    weights, inputs, labels = records(spec, 3)
    for wrong, message in (
        ((weights[:-1], inputs, labels, [1.0]), r"weights are float32 of shape \(9929,\)"),
        ((weights.astype(np.float64), inputs, labels, [1.0]), "weights are float64"),
        ((weights, inputs, labels, [1.0, 1.0]), "2 clip norms; the training graph takes 1"),
        ((weights, inputs, labels, [0.0]), "clip norm is 0.0"),
        ((weights, inputs, labels, [np.nan]), "clip norm is nan"),
    ):
        with pytest.raises(ParameterError, match=message):
            subject.clipped_sum(*wrong)
    for data, message in (
        ((inputs[:, 1:], labels), r"float32 of shape \(3, 7, 8, 1\).*\(n, 8, 8, 1\)"),
        ((inputs.astype(np.float64), labels), "inputs are float64"),
        ((inputs, labels[:2]), r"int64 of shape \(2,\)"),
        ((inputs, labels / 2), "labels are float64"),
        ((inputs, np.array([0, 1, 10])), "labels run from 0 to 10; expected 0 to 9"),
    ):
        with pytest.raises(DataError, match=message):
            subject.clipped_sum(weights, *data, [1.0])
    for options in ({"microbatch": 0}, {"microbatch": 65}):
        with pytest.raises(ParameterError):
            onnx_engine(spec, **options)
    with pytest.raises(ParameterError, match="views is 0"):
        build_training_graph(spec, views=0)


def test_the_table_of_digests_is_up_to_date_and_no_accident() -> None:
    command = [
        sys.executable,
        "-c",
        "from dpagent.learning.training.onnx_graph.__main__ import *; print(digest_table(), end='')",
    ]
    elsewhere = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert elsewhere.stdout == digest_table()
    listed = {line.split()[-1] for line in digest_table().splitlines()}
    assert all(graph in listed for _, graph in known_digests()), (
        "run `python -m dpagent.learning.training.onnx_graph`"
    )
    assert len(known_digests()) >= 2 * len(BUILT_IN) - 1


def test_a_device_needs_little_memory_and_no_onnx(tmp_path: Any) -> None:
    spec = built_in("mnist-cnn")
    (tmp_path / "graph").write_bytes(build_training_graph(spec))
    program = """
import sys, numpy as np
from pathlib import Path
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.onnx_engine import OnnxEngine
spec = built_in("mnist-cnn")
engine = OnnxEngine(spec, Path(sys.argv[1]).read_bytes())
inputs = np.random.default_rng(0).integers(0, 256, (256, 28, 28, 1), np.uint8)
for _ in range(3):
    engine.clipped_sum(spec.initial_weights(0), inputs, np.zeros(256, np.int64), [1.0])
assert "onnx" not in sys.modules
lines = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "graph"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= 96 * 1024, f"peak {int(done.stdout) / 1024:.0f} MiB"
