"""Each record's gradient, its norm, its clip factor, and the clipped sum.

The gradient of a layer is kept in one of two forms:

* *written out*, J_i = Uᵢᵀ·Gᵢ for every record i: convolutions, and dense layers with several views of a
  record. The sum Σ c_i·J_i is one product of the factors with all J;
* *as an outer product*, for dense layers: J_i = [a_i 1]ᵀ·g_i has the squared norm (‖a_i‖² + 1)·‖g_i‖²
  (Goodfellow, "Efficient Per-Example Gradient Computations", 2015), and the sum is Aᵀ·(c∘G).

Squares are summed in float32 over runs of at most :data:`~dpagent.learning.training.engine.NORM_RUN` numbers,
each as a product of the run with itself; the rest is done in float64.

A product with a factor of zero does not silence a NaN. So zeros are put for all that comes from a record
whose gradient is not finite, and in every microbatch, whether it has one or not: who chooses the weights may
choose which record is one, and see how long many steps take. That costs `digits` 5 % of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpagent.learning.models.spec import ModelSpec, Node
from dpagent.learning.training.engine import NORM_RUN, UNDERFLOW
from dpagent.learning.training.onnx_graph.graph import BOOL, DOUBLE, FLOAT, Graph
from dpagent.learning.training.onnx_graph.signature import LARGEST_SQUARE, sum_of


@dataclass(frozen=True, slots=True)
class _WrittenOut:
    """A layer's gradients: weights ``(M, size)`` and biases ``(M, units)``."""

    weight: str
    weight_size: int
    bias: str
    units: int


@dataclass(frozen=True, slots=True)
class _OuterProduct:
    """The factors of a dense layer's gradients: ``(M, inputs)`` and ``(M, units)``."""

    inputs: str
    input_size: int
    incoming: str
    units: int


class Gradients:
    """Holds the parameters on the way forward, collects gradients on the way back, and adds up.

    Args:
        graph: is appended to.
        spec: the architecture.
        views: rows of activations for each record.
        per_layer: whether every layer is clipped by a norm of its own.
    """

    def __init__(self, graph: Graph, spec: ModelSpec, *, views: int, per_layer: bool) -> None:
        self._graph, self._views, self._per_layer = graph, views, per_layer
        self._layers = [node for top in spec.nodes for node in top.walk() if node.blocks]
        self._collected: dict[str, _WrittenOut | _OuterProduct] = {}

    def parameters(self, node: Node) -> tuple[str, str]:
        """The weight as a matrix with a column for each unit or filter, and the bias."""
        weight, bias = node.blocks
        return weight.name, bias.name

    def correlation(self, node: Node, inputs: str, incoming: str, places: int) -> None:
        """Collect J_i = [Uᵢ 1]ᵀ·Gᵢ.

        Args:
            node: the layer.
            inputs: ``(rows, places, inputs)``: the factor of the weight.
            incoming: ``(rows, places, units)``: the gradient by their product.
            places: how many of them each row of activations has.
        """
        graph, (weight, bias) = self._graph, node.blocks
        if self._views > 1:
            places *= self._views
            inputs = graph.reshape(inputs, -1, places, weight.size // bias.size)
            incoming = graph.reshape(incoming, -1, places, bias.size)
        written = graph.add("FusedMatMul", inputs, incoming, transA=1)
        ones = graph.constant(np.ones((1, places)))
        self._collected[node.path] = _WrittenOut(
            graph.reshape(written, -1, weight.size),
            weight.size,
            graph.reshape(graph.add("MatMul", ones, incoming), -1, bias.size),
            bias.size,
        )

    def outer_product(self, node: Node, inputs: str, incoming: str) -> None:
        """Collect J_i = [a_i 1]ᵀ·g_i of rows of inputs ``(rows, inputs)`` and gradients ``(rows, units)``."""
        graph, (weight, bias) = self._graph, node.blocks
        size = weight.size // bias.size
        if self._views > 1:
            inputs, incoming = (graph.reshape(inputs, -1, 1, size), graph.reshape(incoming, -1, 1, bias.size))
            self.correlation(node, inputs, incoming, 1)
        else:
            self._collected[node.path] = _OuterProduct(inputs, size, incoming, bias.size)

    def clipped_sum(self, clip_norms: str, present: str, squared_norms: str) -> None:
        """Append the norms, the factors and the sum, once all layers are collected.

        Args:
            clip_norms: name of the ``(groups,)`` float64 clip norms.
            present: name of the ``(M,)`` booleans that say which records belong to the lot.
            squared_norms: name to give to the squared norms, ``(M, groups)`` float64.
        """
        graph = self._graph
        graph.scope = "clip"
        self._add_squared_norms(squared_norms)
        norms = graph.add("Sqrt", squared_norms)
        each = graph.add("LessOrEqual", squared_norms, graph.constant(LARGEST_SQUARE, np.float64))
        whole = graph.add("Cast", each, to=FLOAT)
        if self.groups > 1:
            whole = graph.add("ReduceMin", whole, graph.constant([1], np.int64), keepdims=1)
        finite = graph.add("Cast", whole, to=BOOL)
        bounded = graph.add("Min", graph.add("Div", clip_norms, norms), graph.constant(1.0, np.float64))
        counted = graph.add("And", finite, graph.reshape(present, -1, 1))
        factors = graph.add("Where", counted, bounded, graph.constant(0.0, np.float64))
        factors = graph.add("Cast", factors, to=FLOAT)
        by_layer = [factors] * len(self._layers)
        if self.groups > 1:
            names = [graph.new_name("factors") for _ in by_layer]
            by_layer = list(graph.add_several("Split", [factors], names, axis=1, num_outputs=len(names)))
        self._sum(by_layer, finite)

    @property
    def groups(self) -> int:
        return len(self._layers) if self._per_layer else 1

    def _add_squared_norms(self, result: str) -> None:
        """Append ``result``, ``(M, groups)`` float64: one product adds up each group's sums of squares."""
        graph = self._graph
        columns: list[str] = []
        group_of: list[int] = []
        for index, node in enumerate(self._layers):
            collected = self._collected[node.path]
            if isinstance(collected, _OuterProduct):
                parts = [self._outer_squares(collected)]
            else:
                weight = self._squares(collected.weight, collected.weight_size)
                parts = [weight, self._squares(collected.bias, collected.units)]
            for name, count in parts:
                columns.append(name)
                group_of += [index if self._per_layer else 0] * count
        squares = graph.add("Concat", *columns, axis=1) if len(columns) > 1 else columns[0]
        membership = np.equal.outer(group_of, range(self.groups))
        graph.product(squares, graph.constant(membership, np.float64), self.groups, result=result)

    def _squares(self, rows: str, size: int) -> tuple[str, int]:
        """Sums of squares of runs of each row of ``(M, size)``, and the number of runs.

        The sums are ``(M, runs)`` float64, and allow for underflow.
        """
        graph = self._graph
        run = max(length for length in range(1, min(size, NORM_RUN) + 1) if size % length == 0)
        runs = graph.reshape(rows, -1, 1, run)
        squares = graph.add("FusedMatMul", runs, runs, transB=1)
        doubles = graph.add("Cast", graph.reshape(squares, -1, size // run), to=DOUBLE)
        return graph.add("Add", doubles, graph.constant(run * UNDERFLOW, np.float64)), size // run

    def _outer_squares(self, collected: _OuterProduct) -> tuple[str, int]:
        graph = self._graph
        both = []
        for rows, size in ((collected.inputs, collected.input_size), (collected.incoming, collected.units)):
            squares, runs = self._squares(rows, size)
            if runs > 1:
                squares = graph.product(squares, graph.constant(np.ones((runs, 1)), np.float64), 1)
            both.append(squares)
        with_bias = graph.add("Add", both[0], graph.constant(1.0, np.float64))
        return graph.add("Mul", with_bias, both[1]), 1

    def _sum(self, factors: list[str], finite: str) -> None:
        """Append the clipped sums, with zeros for records that are not ``finite``.

        A row of zeros for each, and not one number for all: the runtime copies a row of one and writes zeros
        over it for the other, whichever a record has.
        """
        graph = self._graph

        def clean(rows: str, size: int) -> str:
            zeros = graph.add("ConstantOfShape", graph.constant([1, size], np.int64))
            return graph.add("Where", finite, rows, zeros)

        for node, factor in zip(self._layers, factors, strict=True):
            collected = self._collected[node.path]
            weight, bias = map(sum_of, node.blocks)
            row = graph.reshape(factor, 1, -1)
            if isinstance(collected, _WrittenOut):
                graph.add("MatMul", row, clean(collected.weight, collected.weight_size), result=weight)
                graph.add("MatMul", row, clean(collected.bias, collected.units), result=bias)
            else:
                incoming = clean(collected.incoming, collected.units)
                clipped = graph.add("Mul", incoming, factor)
                graph.add(
                    "FusedMatMul",
                    clean(collected.inputs, collected.input_size),
                    clipped,
                    result=weight,
                    transA=1,
                )
                graph.add("MatMul", row, incoming, result=bias)
