"""A growing ONNX graph of standard operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import TensorProto, compose, helper, numpy_helper, version_converter

from dpagent.learning.models.part import Shape

OPSET: Final = 21
_IR_VERSION: Final = 10


class Graph:
    """Appends operators in order of computation, and hands back the names of their results.

    Attributes:
        scope: prefix of all names that are given.
    """

    def __init__(self) -> None:
        self.scope = ""
        self._numbers = 0
        self._operators: list[Any] = []
        self._constants: list[Any] = []

    def add(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Append an operator with one result, called ``name`` or, without one, by a number."""
        result = self._name(name, operator.lower())
        self._operators.append(helper.make_node(operator, inputs, [result], result, **attributes))
        return result

    def constant(self, values: Any, name: str = "", dtype: DTypeLike = np.float32) -> str:
        """The name of an array that is part of the graph."""
        name = self._name(name, "constant")
        array = np.asarray(values, dtype)
        self._constants.append(
            numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        )
        return name

    def reshape(self, x: str, *shape: int, name: str = "") -> str:
        """The same numbers in another shape; 0 stands for an axis that stays, -1 for one that follows."""
        return self.add(
            "Reshape", x, self.constant(shape, f"{name}.shape" if name else "", np.int64), name=name
        )

    def join(self, network: Any, x: str) -> str:
        """Append the graph of another model, from its one input, which ``x`` becomes, to its one output.

        Raises:
            ValueError, RuntimeError, onnx.checker.ValidationError: it cannot be joined.
        """
        converted = version_converter.convert_version(network, OPSET)
        prefixed = compose.add_prefix(converted, f"{self._name('', 'network')}.").graph
        constants = {tensor.name for tensor in prefixed.initializer}
        (entry,) = (value.name for value in prefixed.input if value.name not in constants)
        self._operators.append(helper.make_node("Identity", [x], [entry]))
        self._operators.extend(prefixed.node)
        self._constants.extend(prefixed.initializer)
        return str(prefixed.output[0].name)

    def model(
        self,
        name: str,
        inputs: Mapping[str, Shape],
        outputs: Mapping[str, Shape],
        metadata: Mapping[str, str],
    ) -> bytes:
        """The whole as a serialised, checked ONNX file; the same calls give the same bytes.

        Args:
            name: of the graph.
            inputs, outputs: shapes of one record by name. All are float32, the first axis for records.
            metadata: its properties.
        """
        graph = helper.make_graph(
            self._operators, name, _declared(inputs), _declared(outputs), initializer=self._constants
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(
            graph, producer_name="dpagent", opset_imports=opsets, ir_version=_IR_VERSION
        )
        helper.set_model_props(model, dict(sorted(metadata.items())))
        onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString(deterministic=True))

    def _name(self, name: str, what: str) -> str:
        if not name:
            self._numbers += 1
            name = f"{what}_{self._numbers}"
        return self.scope + name


def _declared(ends: Mapping[str, Shape]) -> list[Any]:
    return [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape]) for name, shape in ends.items()
    ]
