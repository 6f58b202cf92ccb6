"""A trained model as an ONNX file: what leaves the project.

The graph takes NHWC images in [0, 1], as :meth:`Dataset.batch` gives them, and holds the
preprocessing of the :class:`ModelSpec`, so whoever runs it needs to know nothing else. It
follows the specification's order of layers. ONNX convolves NCHW, so the images are transposed
on entry, and back before they are flattened: the weights of the first dense layer stay in the
order of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dpagent.errors import ParameterError
from dpagent.learning.models import Conv2d, Dense, Layer, MaxPool2d, ModelSpec, Tanh

OPSET = 21
IR_VERSION = 10


def export_onnx(spec: ModelSpec, weights: NDArray[np.float32], *, metadata: Mapping[str, str]) -> bytes:
    """The model as a serialised, checked ONNX file.

    Args:
        spec: the architecture.
        weights: flat ``(d,)`` float32, all finite.
        metadata: stored as the model's metadata properties, for instance the privacy statement.

    Returns:
        The file. Input ``input`` is float32 ``(N, height, width, channels)``, output ``logits``
        float32 ``(N, classes)``; N is free. The same arguments give the same bytes.

    Raises:
        ParameterError: the weights do not fit the model or are not finite.
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
    for index, layer in enumerate(spec.layers):
        graph.add(index, layer)
    model = helper.make_model(
        graph.finish(),
        producer_name="dpagent",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    helper.set_model_props(model, dict(sorted(metadata.items())))
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


class _Graph:
    """Grows the list of nodes layer by layer."""

    def __init__(self, spec: ModelSpec, weights: NDArray[np.float32]) -> None:
        self._spec = spec
        self._tensors = {
            block.name: weights[block.offset : block.offset + block.size].reshape(block.shape)
            for block in spec.parameter_shapes
        }
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._last = "input"
        self._flat = False
        self._node("Sub", "centred", self._constant("input_offset", np.array(spec.input_offset, np.float32)))
        self._node("Div", "scaled", self._constant("input_scale", np.array(spec.input_scale, np.float32)))
        self._node("Transpose", "channels_first", perm=[0, 3, 1, 2])

    def add(self, index: int, layer: Layer) -> None:
        match layer:
            case Conv2d():
                weight, bias = self._parameters(index, layer)
                self._node(
                    "Conv",
                    f"{index}.conv2d",
                    self._constant(weight, self._tensors[weight].transpose(3, 2, 0, 1)),
                    self._constant(bias, self._tensors[bias]),
                    kernel_shape=[layer.kernel] * 2,
                    strides=[layer.stride] * 2,
                    pads=[layer.padding] * 4,
                )
            case MaxPool2d():
                self._node(
                    "MaxPool",
                    f"{index}.maxpool2d",
                    kernel_shape=[layer.kernel] * 2,
                    strides=[layer.stride] * 2,
                )
            case Tanh():
                self._node("Tanh", f"{index}.tanh")
            case Dense():
                self._flatten()
                weight, bias = self._parameters(index, layer)
                last = index == len(self._spec.layers) - 1
                self._node(
                    "Gemm",
                    "logits" if last else f"{index}.dense",
                    self._constant(weight, self._tensors[weight]),
                    self._constant(bias, self._tensors[bias]),
                )

    def finish(self) -> Any:
        float32 = TensorProto.FLOAT
        return helper.make_graph(
            self._nodes,
            self._spec.name,
            [helper.make_tensor_value_info("input", float32, ["N", *self._spec.input_shape])],
            [helper.make_tensor_value_info("logits", float32, ["N", self._spec.classes])],
            initializer=self._constants,
        )

    def _flatten(self) -> None:
        if not self._flat:
            self._node("Transpose", "channels_last", perm=[0, 2, 3, 1])
            self._node("Flatten", "flat", axis=1)
            self._flat = True

    def _parameters(self, index: int, layer: Layer) -> tuple[str, str]:
        prefix = f"{index}.{type(layer).__name__.lower()}"
        return f"{prefix}.weight", f"{prefix}.bias"

    def _constant(self, name: str, values: NDArray[np.float32]) -> str:
        self._constants.append(
            numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)
        )
        return name

    def _node(self, operator: str, output: str, *constants: str, **attributes: Any) -> None:
        self._nodes.append(
            helper.make_node(operator, [self._last, *constants], [output], output, **attributes)
        )
        self._last = output
