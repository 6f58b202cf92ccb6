"""Frozen networks for tests: some that may see private records, and some that may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

VALUES = 4
"""Of a record."""


def network(
    nodes: Sequence[Any],
    *,
    constants: dict[str, NDArray[Any]] | None = None,
    tensors: Sequence[Any] = (),
    shape: Sequence[int] = (VALUES,),
    output: Sequence[int | str] | None = None,
    opset: int = 18,
) -> bytes:
    """Nodes from ``x``, of ``shape`` a record, to ``y``, of the same shape unless another is given."""
    after = shape if output is None else output
    graph = helper.make_graph(
        list(nodes), "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", *after])],
        [*(numpy_helper.from_array(value, name) for name, value in (constants or {}).items()), *tensors],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return bytes(model.SerializeToString())


def node(operator: str, inputs: str, output: str, **attributes: Any) -> Any:
    """With its inputs in one word each."""
    return helper.make_node(operator, inputs.split(), output.split(), f"the {operator}", **attributes)


def external(location: str) -> Any:
    """A constant ``w`` of four by four numbers that lie in another file."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[VALUES, VALUES])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "64")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def tanh() -> bytes:
    """A network that may see private records."""
    return network([node("Tanh", "x", "y")])


def of_a_file(location: str) -> bytes:
    """A product with what lies in a file of the device."""
    return network([node("MatMul", "x w", "y")], tensors=[external(location)])


def of_chance() -> bytes:
    """A record plus random numbers, of which a seed says where they begin."""
    nodes = [node("RandomUniformLike", "x", "r", seed=1.0), node("Add", "x r", "y")]
    return network(nodes)


def choosy(shape: Sequence[int] = (VALUES,)) -> bytes:
    """Fails on records with a value outside of 0..3: a look-up in a table of four."""
    nodes = [node("Cast", "x", "i", to=TensorProto.INT64), node("Gather", "table i", "y")]
    return network(nodes, constants={"table": np.array([1, 2, 4, 8], np.float32)}, shape=shape)


def selective() -> bytes:
    """Drops values that are not positive: how many are left depends on the record."""
    nodes = [
        node("Greater", "x zero", "c"), node("Reshape", "c flat", "f"), node("Compress", "x f", "y", axis=1),
    ]  # fmt: skip
    constants = {"zero": np.array(-1, np.float32), "flat": np.array([-1])}
    return network(nodes, constants=constants, output=("m",))
