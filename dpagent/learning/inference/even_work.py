"""Whether a model's graph does the same work for every input, seen without the ``onnx`` package.

A coordinator makes the model that a board keeps, and the board's programs ask it about what is as private as
the records; ``dpagent personalise`` asks it about these. With a branch, or a loop, it would compute for
seconds where an input is as the coordinator likes, and training, which gives way to the board's other
programs, would end slots later. The rules are those for frozen networks (:mod:`dpagent.learning.operators`):
known operators alone, no graphs within, and no shapes, whole numbers or other types that hang on an input.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import Final, TypeAlias

from dpagent.errors import DataError
from dpagent.learning.inference.model_bytes import BYTES, fields_of
from dpagent.learning.operators import FIXED_INPUTS, FREE, POWERS

_Value: TypeAlias = memoryview | int
_Parts: TypeAlias = dict[int, list[_Value]]
_FLOAT, _BOOL = 1, 9  # TensorProto.DataType
_GRAPH, _TRAINING, _FUNCTIONS = 7, 20, 25  # of ModelProto
_NODE, _INITIALIZER, _ENTRY, _SPARSE = 1, 5, 11, 15  # of GraphProto
_INPUT, _OUTPUT, _OPERATOR, _ATTRIBUTE, _DOMAIN = 1, 2, 4, 5, 7  # of NodeProto
_NAME, _NUMBER, _TENSOR, _INTEGERS, _KIND = (
    1,
    3,
    5,
    8,
    20,
)  # of AttributeProto; the first of ValueInfoProto, too
_IS_TENSOR: Final = 4
_WITHIN: Final = (6, 11, 22, 23)  # of AttributeProto: graphs, and sparse tensors
_TYPE, _FLOATS, _TENSOR_NAME, _RAW = 2, 4, 8, 9  # of TensorProto
_NONE: Final[_Parts] = defaultdict(list)


def require_even_work(where: str, model: bytes) -> None:
    """See that a model's graph does the same work for every input.

    Args:
        where: the file, the beginning of every error text.
        model: the file, whoever wrote it.

    Raises:
        DataError: it may not, or is no such file.
    """
    parts = _parts(memoryview(model))
    graph = _whole(parts, _GRAPH)
    if parts[_TRAINING] or parts[_FUNCTIONS] or graph[_SPARSE]:
        raise DataError(f"{where} holds functions, training or sparse constants; expected a plain graph.")
    constants = {_text(each, _TENSOR_NAME): each for each in map(_parts, graph[_INITIALIZER])}
    if len(constants) < len(graph[_INITIALIZER]):
        raise DataError(f"{where} has two constants of one name; expected a model that dpagent exported.")
    # Names of what hangs on no input, and whether that is of a type that inputs may be mixed with.
    fixed = {"": True} | {name: _is_plain(each) for name, each in constants.items()}
    known = {*fixed, *(_text(each, _NAME) for each in map(_parts, graph[_ENTRY]))}
    for node in map(_parts, graph[_NODE]):
        operator, inputs, outputs = _text(node, _OPERATOR), _texts(node, _INPUT), _texts(node, _OUTPUT)
        attributes = {_text(each, _NAME): each for each in map(_parts, node[_ATTRIBUTE])}
        tensor, to = (attributes.get(name, _NONE) for name in ("value", "to"))
        if _text(node, _DOMAIN) not in ("", "ai.onnx") or operator not in FREE | FIXED_INPUTS.keys():
            raise _odd(where, operator, "is not among those known to do the same work for every input")
        is_odd = any(each[number] for each in attributes.values() for number in _WITHIN)
        if is_odd or len(attributes) < len(node[_ATTRIBUTE]):
            raise _odd(where, operator, "holds a graph, sparse constants, or two attributes of one name")
        if operator == "Constant" and len(attributes) > 1:  # ONNX Runtime takes the first.
            raise _odd(where, operator, "has several values")
        names = set(outputs) - {""}
        if names & known or not known.issuperset(inputs):
            raise _odd(where, operator, "makes what is there already, or takes what is not")
        known |= names
        places = FIXED_INPUTS.get(operator, ())
        mixed = [name for place, name in enumerate(inputs) if place not in places]
        is_plain = all(fixed.get(name, True) for name in mixed)
        # Of an attribute, ONNX Runtime takes the part of its kind, whatever else there is.
        tensor = _whole(tensor, _TENSOR) if tensor[_KIND][-1:] == [_IS_TENSOR] else _NONE
        if operator == "Cast":
            is_plain = to[_NUMBER][-1:] in ([_FLOAT], [_BOOL])
        elif operator in ("Constant", "ConstantOfShape"):
            is_plain = _is_plain(tensor) if attributes else operator == "ConstantOfShape"
        if operator in ("Shape", "Size") or fixed.keys() >= set(inputs):
            fixed |= dict.fromkeys(names, is_plain and operator not in ("Shape", "Size", "Range"))
            constants |= {name: tensor for name in names if operator == "Constant"}
        elif not is_plain or (operator == "MaxPool" and any(outputs[1:])):
            raise _odd(where, operator, "makes or takes other numbers than float32 beside an input")
        elif any(name not in fixed for place, name in enumerate(inputs) if place in places):
            raise _odd(where, operator, "takes its shapes or places of an input")
        elif operator == "MaxPool" and _compares_one_by_one(attributes):
            raise _odd(where, operator, "has dilations, or an order by columns")
        elif operator == "Dropout" and not fixed.keys() >= set(inputs[1:]):
            raise _odd(where, operator, "draws at random for some inputs")
        elif operator == "Pow" and _value(constants.get((*inputs, "", "")[1], _NONE)) not in POWERS:
            raise _odd(where, operator, "is a power that takes another time for other numbers")


def _odd(where: str, operator: str, what: str) -> DataError:
    return DataError(f"{where}: {ascii(operator)[:80]} {what}. Expected a model that dpagent exported.")


def _parts(message: _Value) -> _Parts:
    """What stands in a message, by the numbers of its fields."""
    found: _Parts = defaultdict(list)
    if isinstance(message, memoryview):
        for field in fields_of(message, 0, len(message)):
            is_number = field.kind != BYTES
            found[field.number].append(field.value if is_number else message[field.begin : field.end])
    return found


def _whole(parts: _Parts, number: int) -> _Parts:
    """A message that stands there once; of several, what any reader makes of them."""
    some = [each for each in parts[number] if isinstance(each, memoryview)]
    return _parts(some[0] if len(some) == 1 else memoryview(b"".join(some)))


def _texts(parts: _Parts, number: int) -> list[str]:
    """Texts, in their order. What has their number and is none, any reader passes over."""
    found = (each for each in parts[number] if isinstance(each, memoryview))
    return [bytes(each).decode(errors="surrogateescape") for each in found]


def _text(parts: _Parts, number: int) -> str:
    """A text; of several, the last, as any reader has it."""
    return (_texts(parts, number) or [""])[-1]


def _is_plain(tensor: _Parts) -> bool:
    return tensor[_TYPE][-1:] in ([_FLOAT], [_BOOL])


def _compares_one_by_one(attributes: dict[str, _Parts]) -> bool:
    """Whether ONNX Runtime takes a maximum by a branch for each number."""
    order, steps = attributes.get("storage_order", _NONE), attributes.get("dilations", _NONE)
    # Integers stand one by one, or packed: then each of a byte.
    return any(order[_NUMBER]) or any(
        each != 1 if isinstance(each, int) else set(each) != {1} for each in steps[_INTEGERS]
    )


def _value(tensor: _Parts) -> float | None:
    """The one number of a constant; None of one that has several, also where they stand one by one."""
    some = [*tensor[_RAW], *tensor[_FLOATS]]
    data = b"".join(each for each in some if isinstance(each, memoryview))
    is_one = len(some) == 1 and len(data) == 4
    return float(struct.unpack("<f", data)[0]) if _is_plain(tensor) and is_one else None
