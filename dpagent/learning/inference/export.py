"""A trained model as an ONNX file: what leaves the project.

The graph takes records with the channels last, images in [0, 1], and holds the preprocessing and
the front end of the :class:`ModelSpec`, so whoever runs it needs to know nothing else. It follows
the specification's order of layers. ONNX convolves with the channels first, so records are
transposed before the layers, and back before they are flattened: the weights of the first dense
layer stay in the order of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dpagent.errors import ParameterError
from dpagent.learning.front_end.export import FrontEndNodes
from dpagent.learning.models.layers import (
    GROUP_NORM_EPSILON,
    AveragePool1d,
    AveragePool2d,
    Conv1d,
    Conv2d,
    Dense,
    GroupNorm,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Residual,
    Shape,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec, Node

OPSET = 21
IR_VERSION = 10


def export_onnx(
    spec: ModelSpec,
    weights: NDArray[np.float32],
    *,
    metadata: Mapping[str, str],
    assets: Mapping[str, bytes] | None = None,
) -> bytes:
    """The model as a serialised, checked ONNX file.

    Args:
        spec: the architecture.
        weights: flat ``(d,)`` float32, all finite.
        metadata: stored as the model's metadata properties, for instance the privacy statement.

        assets: bytes by role, of the stages of the front end that need any.

    Returns:
        The file. Input ``input`` is float32 ``(N, *input_shape)``, output ``logits`` float32
        ``(N, classes)``; N is free. The same arguments give the same bytes.

    Raises:
        ParameterError: the weights do not fit the model or are not finite.
        ConfigurationError: a frozen network cannot be part of the file.
    """
    if weights.dtype != np.float32 or weights.shape != (spec.parameter_count,):
        raise ParameterError(
            f"The weights are {weights.dtype} of shape {weights.shape}; model {spec.name!r}"
            f" takes float32 of shape ({spec.parameter_count},)."
        )
    if not np.isfinite(weights).all():
        raise ParameterError(
            f"{np.count_nonzero(~np.isfinite(weights))} of the weights are not finite; expected none."
            " The training diverged: export an earlier round."
        )
    graph = _Graph(spec, weights)
    features = graph.front_end(graph.preprocessed("input"), assets or {})
    logits = graph.sequence(spec.nodes, features)
    model = helper.make_model(
        graph.finish(logits, "logits", (spec.classes,)),
        producer_name="dpagent",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    helper.set_model_props(model, dict(sorted(metadata.items())))
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def export_features(spec: ModelSpec, weights: NDArray[np.float32]) -> bytes:
    """All layers but the last: what they make of a record.

    Args:
        spec: without a front end.
        weights: flat ``(d,)`` float32; the last layer's are left out.

    Returns:
        An ONNX file with the input ``input``, float32 ``(N, *input_shape)``, and the output ``features``,
        float32 ``(N, *shape)`` with the channels last.
    """
    *nodes, last = spec.nodes
    graph = _Graph(spec, weights)
    features = graph.sequence(nodes, graph.front_end("input", {}))
    axes = len(last.input_shape)
    features = graph.transposed(features, "channels_last", (*range(2, axes + 1), 1))
    model = helper.make_model(
        graph.finish(features, "features", last.input_shape),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


class _Graph:
    """Appends operators, and hands back the names of their results."""

    def __init__(self, spec: ModelSpec, weights: NDArray[np.float32]) -> None:
        self._spec = spec
        self._tensors = {
            block.name: weights[block.offset : block.offset + block.size].reshape(block.shape)
            for block in spec.parameter_shapes
        }
        self._operators: list[Any] = []
        self._constants: list[Any] = []

    def preprocessed(self, x: str) -> str:
        """Offset and scale."""
        for operator, name in (("Sub", "input_offset"), ("Div", "input_scale")):
            x = self._add(operator, f"{name}.applied", x, self._constant(name, getattr(self._spec, name)))
        return x

    def front_end(self, x: str, assets: Mapping[str, bytes]) -> str:
        """The frozen stages, if there are any, and the channels first."""
        if self._spec.front_end:
            frozen = FrontEndNodes(self._spec, assets, x, OPSET)
            self._operators += frozen.nodes
            self._constants += frozen.constants
            x = frozen.output
        axes = len(self._spec.feature_shape)
        return self.transposed(x, "channels_first", (axes, *range(1, axes)))

    def sequence(self, nodes: Sequence[Node], x: str) -> str:
        """The layers in turn."""
        for node in nodes:
            x = self._layer(node, x)
        return x

    def finish(self, result: str, name: str, shape: Shape) -> Any:
        """The graph, with ``result`` as its output ``name``."""
        float32 = TensorProto.FLOAT
        self._add("Identity", name, result)
        return helper.make_graph(
            self._operators,
            self._spec.name,
            [helper.make_tensor_value_info("input", float32, ["N", *self._spec.input_shape])],
            [helper.make_tensor_value_info(name, float32, ["N", *shape])],
            initializer=self._constants,
        )

    def _layer(self, node: Node, x: str) -> str:
        axes = len(node.input_shape) - 1
        match node.layer:
            case Conv1d() | Conv2d():
                weight, bias = self._parameters(node)
                return self._add("Conv", node.path, x, weight, bias, **_window(node.layer, axes, padded=True))
            case MaxPool1d() | MaxPool2d():
                return self._add("MaxPool", node.path, x, **_window(node.layer, axes))
            case AveragePool1d() | AveragePool2d():
                return self._add("AveragePool", node.path, x, **_window(node.layer, axes))
            case Tanh():
                return self._add("Tanh", node.path, x)
            case Relu():
                return self._add("Relu", node.path, x)
            case GroupNorm():
                return self._group_norm(node, node.layer.groups, x)
            case Residual():
                branches = [self.sequence(branch, x) for branch in (node.body, node.shortcut)]
                return self._add("Add", node.path, *branches)
            case Dense():
                x = self.transposed(x, f"{node.path}.channels_last", (*range(2, axes + 2), 1))
                flat = self._add("Flatten", f"{node.path}.flat", x, axis=1)
                return self._add("Gemm", node.path, flat, *self._parameters(node))

    def _group_norm(self, node: Node, groups: int, x: str) -> str:
        """With the channels first, a group is a run of numbers: as if it were one channel of an instance."""
        ones, zeros = (
            self._constant(f"{node.path}.{name}", np.full(groups, number))
            for name, number in (("scale", 1.0), ("shift", 0.0))
        )
        grouped = self._reshaped(x, f"{node.path}.groups", (groups, -1))
        normed = self._add(
            "InstanceNormalization",
            f"{node.path}.normalised",
            grouped,
            ones,
            zeros,
            epsilon=GROUP_NORM_EPSILON,
        )
        return self._reshaped(normed, node.path, (node.input_shape[-1], *node.input_shape[:-1]))

    def _parameters(self, node: Node) -> tuple[str, str]:
        weight, bias = (block.name for block in node.blocks)
        values = self._tensors[weight]
        if not isinstance(node.layer, Dense):
            values = np.moveaxis(values, (-1, -2), (0, 1))  # filters and channels before the window
        return self._constant(weight, values), self._constant(bias, self._tensors[bias])

    def transposed(self, x: str, name: str, axes: tuple[int, ...]) -> str:
        """With the axes of a record in this order; they count from 1."""
        return self._add("Transpose", name, x, perm=[0, *axes]) if len(axes) > 1 else x

    def _reshaped(self, x: str, name: str, shape: Shape) -> str:
        self._constants.append(numpy_helper.from_array(np.array([0, *shape]), f"{name}.shape"))
        return self._add("Reshape", name, x, f"{name}.shape")

    def _constant(self, name: str, values: Any) -> str:
        array = np.asarray(values, np.float32)
        self._constants.append(
            numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        )
        return name

    def _add(self, operator: str, result: str, *inputs: str, **attributes: Any) -> str:
        self._operators.append(helper.make_node(operator, inputs, [result], result, **attributes))
        return result


def _window(layer: Any, axes: int, *, padded: bool = False) -> dict[str, Any]:
    window = {"kernel_shape": [layer.kernel] * axes, "strides": [layer.stride] * axes}
    return {**window, "pads": [layer.padding] * (2 * axes)} if padded else window
