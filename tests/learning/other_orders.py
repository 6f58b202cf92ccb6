"""Training graphs in which a product adds up the last record in another order, as a library might."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_PRODUCTS = ("Gemm", "MatMul", "FusedMatMul")
_FAR = 2**62


def products(graph: bytes) -> list[str]:
    """The names of the products of a graph that have rows of several records.

    Not of those that copy numbers, by a matrix of zeros and ones, nor of those that add records up.
    """
    model = onnx.load_from_string(graph)
    constants = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    return [
        node.name
        for node in model.graph.node
        if is_of_rows(node) and not _copies(constants.get(node.input[1]))
    ]


def is_of_rows(node: Any) -> bool:
    """Whether an operator is a product, and none that adds records up."""
    return node.op_type in _PRODUCTS and not node.output[0].endswith(".sum")


def in_another_order(graph: bytes, name: str, records: int) -> bytes:
    """The graph for that many records, in which a product runs from the last term to the first in the rows
    of the last one."""
    model = onnx.load_from_string(graph)
    nodes = model.graph.node
    (place,) = (index for index, node in enumerate(nodes) if node.name == name)
    honest, added = nodes[place], []
    attributes = {each.name: helper.get_attribute_value(each) for each in honest.attribute}

    def add(
        operator: str, inputs: list[str], outputs: int = 1, domain: str = "", **options: Any
    ) -> list[str]:
        names = [f"other/{operator}_{len(added)}_{number}" for number in range(outputs)]
        added.append(helper.make_node(operator, inputs, names, domain=domain, **options))
        return names

    def number(value: int) -> str:
        constant = numpy_helper.from_array(np.array([value]), f"other/{len(model.graph.initializer)}")
        model.graph.initializer.append(constant)
        return str(constant.name)

    def backwards(values: str, axis: int) -> str:
        return add("Slice", [values, *map(number, (_FAR, -_FAR, axis, -1))])[0]

    left = backwards(honest.input[0], -2 if attributes.get("transA") else -1)
    right = backwards(honest.input[1], -1 if attributes.get("transB") else -2)
    (other,) = add(honest.op_type, [left, right, *honest.input[2:]], domain=honest.domain, **attributes)
    result, honest.output[0] = honest.output[0], "other/honest"
    parts = add("Split", ["other/honest"], records, axis=0, num_outputs=records)
    parts[-1] = add("Split", [other], records, axis=0, num_outputs=records)[-1]
    added.append(helper.make_node("Concat", parts, [result], axis=0))
    for node in reversed(added):
        nodes.insert(place + 1, node)
    return bytes(model.SerializeToString())


def _copies(matrix: Any) -> bool:
    return matrix is not None and matrix.ndim == 2 and bool(np.count_nonzero(matrix, axis=0).max() <= 1)
