"""Whether a frozen network is a function of one record's values. Needs the ``onnx`` package.

A frozen network sees private records one at a time, and its features take their place. So it may read no
other file, keep no state from record to record, draw nothing at random, neither fail nor crash for records
with some property, and do the same work for each. It is checked here before it is shipped or trusted; a
device runs it by its digest alone (:mod:`agent.training`).

A list of ONNX's own operators passes, under two rules. Values that decide shapes or places, such as
the shape of a Reshape or the indices of a Gather, depend on constants and shapes, never on a record. And
values that depend on a record are float32 or truth values, never integers, which can be divided by zero, nor
numbers of 16 or 64 bits, whose functions have no vector code.

What takes another way for other numbers is not on the list, be it in its library, such as sines and most
powers, or by a branch for each number, which a processor guesses wrongly where signs alternate: ONNX Runtime
takes twelve times as long for a PRelu of them. It has been measured for each operator, with numbers of one
sign and of both, small, large, in order, and zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import AttributeProto, TensorProto, numpy_helper, shape_inference

from dpagent.errors import ConfigurationError
from dpagent.learning.operators import FIXED_INPUTS, FREE, POWERS

_RUNTIME_FORMAT: Final = b"ORTM"
_OF_SHAPES: Final = ("Shape", "Size")
_TYPES: Final = (TensorProto.FLOAT, TensorProto.BOOL)
_FLOATS: Final = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16
)  # fmt: skip
_KINDS: Final = {
    "value": AttributeProto.TENSOR, "value_float": AttributeProto.FLOAT,
    "value_floats": AttributeProto.FLOATS, "value_int": AttributeProto.INT,
    "value_ints": AttributeProto.INTS, "value_string": AttributeProto.STRING,
    "value_strings": AttributeProto.STRINGS,
}  # fmt: skip
"""Of a constant's value, by its name."""


def check_network(where: str, model: bytes) -> None:
    """Raise unless the network is the same function of one record on every machine and in every batch.

    Args:
        where: the file, the beginning of every error text.
        model: the file's bytes.

    Raises:
        ConfigurationError: it is no ONNX file, or an operator is not on the list; the text names the node.
    """
    if model[4:8] == _RUNTIME_FORMAT:
        raise ConfigurationError(f"{where} is in ONNX Runtime's own format; expected plain ONNX.")
    try:
        network = onnx.load_model_from_string(model)
        _check(where, network)
    except (DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where} is no ONNX file, or a damaged one.") from error


def _check(where: str, network: Any) -> None:
    if not network.HasField("graph"):
        raise ConfigurationError(f"{where} is no ONNX file, or a damaged one.")
    if network.functions or network.training_info:
        raise ConfigurationError(
            f"{where} holds functions or training steps of its own; expected one plain graph. Export it for"
            " inference, functions inlined."
        )
    graph = network.graph
    if graph.sparse_initializer:
        raise ConfigurationError(f"{where} holds sparse constants; expected dense ones.")
    for tensor in graph.initializer:
        _check_constant(f"{where}, constant {_shown(tensor.name)}", tensor)
    for number, node in enumerate(graph.node):
        _check_node(_named(where, number, node), node)
    _check_flow(where, network)


def _check_node(where: str, node: Any) -> None:
    if node.domain not in ("", "ai.onnx"):
        raise ConfigurationError(
            f"{where} is of the domain {_shown(node.domain)}; expected operators of ONNX itself."
        )
    for attribute in node.attribute:
        if attribute.HasField("g") or attribute.graphs:
            raise ConfigurationError(
                f"{where} runs a graph of its own; expected no control flow, whose time depends on a record."
            )
        if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
            raise ConfigurationError(f"{where} holds sparse constants; expected dense ones.")
        for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
            _check_constant(where, tensor)
    if node.op_type not in FREE and node.op_type not in FIXED_INPUTS:
        raise ConfigurationError(
            f"{where} is not among the operators known to do the same work for each record. Put the network"
            " together without it; docs/models.md lists them."
        )
    if node.op_type == "Constant" and any(each.type != _KINDS.get(each.name) for each in node.attribute):
        raise ConfigurationError(
            f"{where} says that its value is of another kind than its name says; ONNX Runtime takes what is"
            " of that kind."
        )
    if node.op_type == "MaxPool" and (_integer(node, "storage_order") or not _is_dense(node)):
        raise ConfigurationError(
            f"{where} has dilations, or an order by columns: it compares number by number then. Expected"
            " neither."
        )
    if node.op_type == "BatchNormalization" and (
        _integer(node, "training_mode") or len([name for name in node.output if name]) > 1
    ):
        raise ConfigurationError(f"{where} is in training mode. Export the network for inference.")


def _check_constant(where: str, tensor: Any) -> None:
    if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
        raise ConfigurationError(
            f"{where} lies in another file; expected all of the network in one (onnx.save_model with"
            " save_as_external_data=False)."
        )


def _check_flow(where: str, network: Any) -> None:
    """Follow the values that depend on the record through the graph."""
    graph, types = network.graph, _types(where, network)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    fixed = {*constants, ""}
    known = fixed | {value.name for value in graph.input}
    for number, node in enumerate(graph.node):
        at = _named(where, number, node)
        for name in (*(set(node.input) - known), *((set(node.output) - {""}) & known)):
            raise ConfigurationError(
                f"{at}: {_shown(name)} is made after it is used, or twice; expected nodes in their order."
            )
        for place in FIXED_INPUTS.get(node.op_type, ()):
            if place < len(node.input) and node.input[place] not in fixed:
                raise ConfigurationError(
                    f"{at} takes {_shown(node.input[place])} for its shapes or places, which depends on the"
                    " record; expected constants."
                )
        if node.op_type == "Pow" and not _is_product(node, constants):
            raise ConfigurationError(
                f"{at} is a power that takes another time for other numbers; expected one constant exponent,"
                " 2 or 3. Take Sqrt, Reciprocal or products in its place."
            )
        if node.op_type == "Div" and types.get(node.output[0]) not in _FLOATS:
            raise ConfigurationError(f"{at} divides integers, which can crash; expected floating point.")
        if node.op_type == "Constant" and len(node.attribute) != 1:
            raise ConfigurationError(f"{at} has {len(node.attribute)} attributes; expected its value alone.")
        if node.op_type == "Dropout" and not _is_inactive(node, constants):
            raise ConfigurationError(f"{at} may be in training mode. Export the network for inference.")
        known.update(node.output)
        if node.op_type == "Constant" and (tensor := _value(node)) is not None:
            constants[node.output[0]] = tensor
        if node.op_type in _OF_SHAPES or fixed.issuperset(node.input):
            fixed.update(node.output)
            continue
        for name in node.output:
            if name and types.get(name) not in _TYPES:
                kind = TensorProto.DataType.Name(types.get(name, TensorProto.UNDEFINED)).lower()
                raise ConfigurationError(
                    f"{at} makes {_shown(name)} of type {kind} of a record; expected float32 (export a"
                    " quantised network, or one of other floating-point numbers, in that)."
                )


def _types(where: str, network: Any) -> dict[str, int]:
    """The type of every tensor, inferred from the operators and not from the file's claims."""
    bare = onnx.ModelProto()
    bare.CopyFrom(network)
    del bare.graph.value_info[:]
    try:
        graph = shape_inference.infer_shapes(bare, check_type=True, strict_mode=True).graph
    except (shape_inference.InferenceError, RuntimeError, ValueError, TypeError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigurationError(f"{where} does not fit together: {said}") from error
    return {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}


def _is_inactive(node: Any, constants: dict[str, Any]) -> bool:
    mode = node.input[2] if len(node.input) > 2 else ""
    return not mode or (mode in constants and not numpy_helper.to_array(constants[mode]).any())


def _is_product(node: Any, constants: dict[str, Any]) -> bool:
    exponent = constants.get(node.input[1])
    values = [] if exponent is None else numpy_helper.to_array(exponent).ravel().tolist()
    return len(values) == 1 and values[0] in POWERS


def _integer(node: Any, name: str) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), 0)


def _is_dense(node: Any) -> bool:
    steps = (size for attribute in node.attribute if attribute.name == "dilations" for size in attribute.ints)
    return all(size == 1 for size in steps)


def _value(node: Any) -> Any:
    return next(
        (attribute.t for attribute in node.attribute if attribute.type == AttributeProto.TENSOR), None
    )


def _named(where: str, number: int, node: Any) -> str:
    name = f" {_shown(node.name)}" if node.name else ""
    return f"{where}, node {number}{name} ({_shown(node.op_type)[1:-1]})"


def _shown(name: str) -> str:
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:77]}...{text[-1]}"


def operators() -> Iterator[str]:
    """The operators that pass, in order, for the page on models."""
    yield from sorted({*FREE, *FIXED_INPUTS})
