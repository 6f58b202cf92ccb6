"""A growing ONNX graph: operators are appended in order of computation, constants are kept once.

Values are referred to by name. A name begins with the layer it belongs to, so that the profile of
ONNX Runtime reads like the architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dpagent.learning.training.onnx_graph.signature import Signature, Tensor

OPSET = 21
IR_VERSION = 10

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
INT64, BOOL = TensorProto.INT64, TensorProto.BOOL

# Operators that ONNX itself does not have; ONNX Runtime does on every platform.
_RUNTIME_OPERATORS = {"FusedMatMul": "com.microsoft"}


class Graph:
    """Appends operators and hands back the names of their results.

    Attributes:
        scope: prefix of the names of the next operators.
    """

    def __init__(self) -> None:
        self.scope = ""
        self._operators: list[Any] = []
        self._constants: dict[bytes, Any] = {}
        self._results = 0

    def add(self, operator: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """Append an operator with one result; ``result`` names it where the name is part of the contract."""
        return self.add_several(operator, inputs, [result or self.new_name(operator)], **attributes)[0]

    def add_several(
        self, operator: str, inputs: Sequence[str], results: Sequence[str], **attributes: Any
    ) -> Sequence[str]:
        """Append an operator with the given results."""
        domain = _RUNTIME_OPERATORS.get(operator, "")
        self._operators.append(
            helper.make_node(operator, inputs, results, results[0], domain=domain, **attributes)
        )
        return results

    def new_name(self, what: str) -> str:
        """A name that no other value has."""
        self._results += 1
        return f"{self.scope}/{what}_{self._results}".lstrip("/")

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        """The name of an array that is part of the graph; equal arrays are kept once."""
        array = np.ascontiguousarray(np.asarray(values, dtype)).reshape(np.shape(values))
        key = hashlib.sha256(repr((array.dtype.str, array.shape)).encode() + array.tobytes()).digest()
        if key not in self._constants:
            self._constants[key] = numpy_helper.from_array(array, f"constant_{len(self._constants)}")
        name: str = self._constants[key].name
        return name

    def reshape(self, values: str, *shape: int) -> str:
        """The same numbers in another shape; -1 stands for the axis that follows from the others."""
        return self.add("Reshape", values, self.constant(shape, np.int64))

    def slice(self, values: str, axis: int, start: int, stop: int, *, result: str = "") -> str:
        """``values[start:stop]`` along ``axis``."""
        bounds = (self.constant([number], np.int64) for number in (start, stop, axis))
        return self.add("Slice", values, *bounds, result=result)

    def product(
        self,
        rows: str,
        matrix: str,
        columns: int,
        *,
        bias: str | None = None,
        is_transposed: bool = False,
        result: str = "",
    ) -> str:
        """``rows @ matrix + bias``, where the rows are of several records; never a product of one column.

        For those ONNX Runtime 1.31 has a kernel on x86-64 that adds up the last rows in another order. A
        second column, of zeros, has them take the general one, which adds up each element from the first
        term to the last in every row; it is cut off again.

        Args:
            rows: ``(…, k)``.
            matrix: ``(k, columns)``, or ``(columns, k)`` if it is transposed.
            columns: how many.
            bias: ``(columns,)``; only of two-dimensional rows, and not if the matrix is transposed.
            is_transposed: whether the matrix is.
            result: the name to give to the result.
        """
        name = "" if columns == 1 else result
        if columns == 1:
            ends = [0, 0, 1, 0] if is_transposed else [0, 0, 0, 1]
            matrix = self.add("Pad", matrix, self.constant(ends, np.int64))
            bias = bias and self.add("Pad", bias, self.constant([0, 1], np.int64))
        if bias is not None:
            product = self.add("Gemm", rows, matrix, bias, result=name)
        elif is_transposed:
            product = self.add("FusedMatMul", rows, matrix, transB=1, result=name)
        else:
            product = self.add("MatMul", rows, matrix, result=name)
        return self.slice(product, -1, 0, 1, result=result) if columns == 1 else product

    def gather(self, values: str, axis: int, places: NDArray[np.int64]) -> str:
        """``take(values, places, axis)``."""
        return self.add("Gather", values, self.constant(places, np.int32), axis=axis)

    def model(self, name: str, ends: Signature) -> bytes:
        """The whole as a checked ONNX file: the same calls give the same bytes."""
        inputs, outputs = ([_declared(*each) for each in tensors.items()] for tensors in ends)
        constants = list(self._constants.values())
        graph = helper.make_graph(self._operators, name, inputs, outputs, initializer=constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, producer_name="dpagent", opset_imports=opsets, ir_version=IR_VERSION)
        onnx.checker.check_model(model)
        return bytes(model.SerializeToString(deterministic=True))


def _declared(name: str, tensor: Tensor) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
    return helper.make_tensor_value_info(name, kind, tensor.shape)
