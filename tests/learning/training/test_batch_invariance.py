"""The check that a record is computed alike at every place: what it finds, and how surely.

Fixed seeds: what is found once is found each time.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import onnxruntime
import pytest
from learning.engines import onnx_engine
from learning.other_orders import in_another_order, is_of_rows, products
from learning.small_models import SPECS, small
from onnx import helper, load_from_string, shape_inference

from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    GroupNorm,
    MaxPool2d,
    Relu,
    Residual,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.batch_invariance import TRIALS, Computed, is_invariant
from dpagent.learning.training.onnx_engine import OnnxEngine
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.learning.training.onnx_graph.graph import Graph
from dpagent.learning.training.onnx_graph.signature import graph_digest

ROWS = 4
NARROW = small("narrow", (5,), Dense(1), Tanh(), Dense(5))
NETWORKS = [
    NARROW,
    small("one channel", (6, 6, 3), Conv2d(1, 3), Tanh()),
    small(
        "layers", (9, 8, 3), Conv2d(6, 3, 1, 1), GroupNorm(2), Tanh(), Conv2d(5, 3, 2, 1), Relu(),
        AveragePool2d(2, 1), Dense(7), Tanh(),
    ),
    small(
        "pools", (9, 9, 1), Conv2d(4, 3, 1, 1), Tanh(), MaxPool2d(2, 2),
        Residual((Conv2d(4, 3, 1, 1), Relu())), Dense(5),
    ),
]  # fmt: skip


def engine_of(spec: ModelSpec, graph: bytes, microbatch: int = ROWS) -> OnnxEngine:
    return OnnxEngine(spec, graph, microbatch=microbatch, trusted={graph_digest(graph)})


def is_found(subject: OnnxEngine, wanted: int, microbatches: int) -> bool:
    """Whether as many as are wanted of so many single microbatches show that the engine is no good."""
    shape = subject._buffers.inputs.shape[1:]
    found = (
        seed
        for seed in range(microbatches)
        if not is_invariant(subject.spec, shape, subject.rows, subject._computed, seed, trials=1)
    )
    return len([*islice(found, wanted)]) == wanted


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("spec", NETWORKS, ids=lambda spec: spec.name)
def test_another_order_in_any_product_is_found(spec: ModelSpec, views: int) -> None:
    graph = build_training_graph(spec, views=views)
    assert engine_of(spec, graph).is_batch_invariant(0)
    # Before the norms, where a difference could be magnified.
    magnified = [name for name in products(graph) if not name.startswith("clip")]
    assert len(magnified) >= 4
    missed = [
        name
        for name in magnified
        if not is_found(engine_of(spec, in_another_order(graph, name, ROWS)), wanted=6, microbatches=24)
    ]
    # Sums of one and of two terms have one order.
    allowed = {"narrow": ["2.dense/Gemm"]}.get(spec.name, [])
    assert not [name for name in missed if not any(name.startswith(each) for each in allowed)], missed


def test_orders_of_squares_are_found() -> None:
    graph = build_training_graph(NETWORKS[2])
    squares = [name for name in products(graph) if name.startswith("clip/FusedMatMul")]
    assert len(squares) >= 6
    for name in squares:
        assert not engine_of(NETWORKS[2], in_another_order(graph, name, ROWS)).is_batch_invariant(0), name


def unpadded(
    self: Graph, rows: str, matrix: str, columns: int, *, bias: Any = None, is_transposed: bool = False,
    result: str = "",
) -> str:  # fmt: skip
    """As graphs were before: products of one column."""
    del columns
    if bias is not None:
        return self.add("Gemm", rows, matrix, bias, result=result)
    if is_transposed:
        return self.add("FusedMatMul", rows, matrix, transB=1, result=result)
    return self.add("MatMul", rows, matrix, result=result)


def last_row_differs(rows: int, terms: int) -> bool:
    """Whether ONNX Runtime adds up the last row of a product of one column in another order here."""
    ends = [
        helper.make_tensor_value_info(name, 1, shape)
        for name, shape in (("x", (rows, terms)), ("w", (terms, 1)), ("y", (rows, 1)))
    ]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:2], ends[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    generator = np.random.default_rng(0)
    for _ in range(200):
        x = np.tile(generator.standard_normal(terms, np.float32), (rows, 1))
        y = session.run(None, {"x": x, "w": generator.standard_normal((terms, 1), np.float32)})[0]
        if (y != y[0]).any():
            return True
    return False


@pytest.mark.parametrize("terms", [4, 5, 12])
@pytest.mark.parametrize("microbatch", [5, 6, 7, 10, 30])
def test_graphs_of_before_are_found_out(monkeypatch: pytest.MonkeyPatch, microbatch: int, terms: int) -> None:
    if not last_row_differs(microbatch, terms):
        pytest.skip("products of one column are sound here")
    spec = small("one unit", (terms,), Dense(1))
    assert all(onnx_engine(spec, microbatch=microbatch).is_batch_invariant(seed) for seed in range(4))
    monkeypatch.setattr(Graph, "product", unpadded)
    subject = onnx_engine(spec, microbatch=microbatch)
    assert not any(subject.is_batch_invariant(seed) for seed in range(4))
    assert is_found(subject, wanted=20, microbatches=100)
    assert (1 - 20 / 100) ** TRIALS <= 1e-3


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize(
    "spec", [*SPECS, *NETWORKS, *(built_in(name).head for name in sorted(BUILT_IN))], ids=lambda s: s.name
)
def test_no_product_of_several_records_has_one_column(spec: ModelSpec, per_layer: bool) -> None:
    for views in (1, 2):
        model = load_from_string(build_training_graph(spec, views=views, per_layer=per_layer))
        inferred = shape_inference.infer_shapes(model).graph
        shapes = {
            each.name: [axis.dim_value for axis in each.type.tensor_type.shape.dim]
            for each in (*inferred.value_info, *inferred.input)
        }
        shapes |= {each.name: list(each.dims) for each in inferred.initializer}
        looked_at = 0
        for node in inferred.node:
            matrix = shapes.get(node.input[1]) if is_of_rows(node) else None
            if matrix is not None and len(matrix) == 2:
                transposed = any(each.name == "transB" and each.i for each in node.attribute)
                assert matrix[0 if transposed else 1] > 1, node.name
                looked_at += 1
        assert looked_at >= 2


@pytest.mark.parametrize("rows", [2, 3, 5, 8, 33])
@pytest.mark.parametrize("leak", ["place", "neighbour", "mean", "not finite", "contribution"])
def test_any_dependence_on_place_or_company_is_found(rows: int, leak: str) -> None:
    """An engine of one sum, whose last bit tells something of place or company."""

    def compute(weights: Any, inputs: Any, labels: Any, counted: int) -> Computed:
        with np.errstate(over="ignore", invalid="ignore"):
            values = inputs.astype(np.float64) @ weights[: inputs.shape[1]].astype(np.float64)
            total = np.array([values[counted]])
            match leak:
                case "place":
                    values[-1] = np.nextafter(values[-1], np.inf)
                case "neighbour":
                    values += np.roll(inputs[:, 0] > 0, 1) * 1e-9
                case "mean":
                    values += inputs.mean(axis=0)[0] * 1e-9
                case "not finite":
                    values += (np.abs(inputs).max() > 1e30) * 1e-9
                case "contribution":
                    total += (counted == rows - 1) * 1e-9
        return Computed(values[:, np.newaxis].view(np.uint8), total)

    assert not is_invariant(NARROW, (5,), rows, compute, 0)
    leak = ""
    assert is_invariant(NARROW, (5,), rows, compute, 0)
