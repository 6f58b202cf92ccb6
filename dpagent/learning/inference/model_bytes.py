"""A model's file read and changed without the ``onnx`` package, which no board has: metadata and weights.

A file is one message of Protocol Buffers, `ModelProto <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>`_:
fields one after the other, each a number and a kind, and of the kinds used here a number in groups of seven
bits or a length with as many bytes (the encoding: https://protobuf.dev/programming-guides/encoding). What is
not asked for is passed over unread, so a file may hold anything. Weights have one size whatever they are, so
others are written in their place; what the graph computes stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.models.spec import ModelSpec, ParameterBlock

# Fields by their numbers: of ModelProto, GraphProto and StringStringEntryProto.
_GRAPH: Final = 7
_METADATA: Final = 14
_INITIALIZER: Final = 5
_KEY, _VALUE = 1, 2
_FLOAT: Final = 1  # TensorProto.DataType
_NUMBER: Final = 0
BYTES: Final = 2
_WHOLE_BYTES: Final = {1: 8, 5: 4}

_MOST_ENTRIES: Final = 1_024
_MOST_AXES: Final = 8
_MOST_SHIFT: Final = 63
_KEY_BITS: Final = 32


class Field(NamedTuple):
    """A field of a message, and where its bytes are."""

    number: int
    kind: int
    value: int
    """Of a number; 0 of any other kind."""
    start: int
    """Where the field begins."""
    begin: int
    end: int
    """Of the bytes; of all but bytes, where the field ends."""


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    begin: int
    end: int


def metadata_of(model: bytes) -> dict[str, str]:
    """The metadata of a model's file; of a key that stands twice, the first.

    Args:
        model: The file, whoever wrote it.

    Raises:
        DataError: It is no such file, or is damaged.
    """
    found: dict[str, str] = {}
    for entry in fields_of(model, 0, len(model)):
        if entry.number != _METADATA:
            continue
        parts = {
            part.number: model[part.begin : part.end] for part in fields_of(model, entry.begin, entry.end)
        }
        try:
            found.setdefault(parts.get(_KEY, b"").decode(), parts.get(_VALUE, b"").decode())
        except UnicodeDecodeError as error:
            raise DataError("The model has metadata that are not UTF-8 text.") from error
        if len(found) > _MOST_ENTRIES:
            raise DataError(f"The model has more than {_MOST_ENTRIES:,} entries of metadata.")
    return found


def with_metadata(model: bytes, metadata: Mapping[str, str]) -> bytes:
    """The same file with other metadata.

    Raises:
        DataError: It is no such file, or is damaged.
    """
    fields = (field for field in fields_of(model, 0, len(model)) if field.number != _METADATA)
    kept = [model[field.start : field.end] for field in fields]
    entries = (
        _length_delimited(_KEY, key.encode()) + _length_delimited(_VALUE, value.encode())
        for key, value in sorted(metadata.items())
    )
    return b"".join([*kept, *(_length_delimited(_METADATA, entry) for entry in entries)])


def weights_of(model: bytes, spec: ModelSpec) -> NDArray[np.float32]:
    """The weights ``(d,)`` of a file that :func:`~dpagent.learning.inference.export.model.export_onnx` wrote.

    Args:
        model: The file, whoever wrote it.
        spec: The architecture that it is said to have.

    Raises:
        DataError: It is damaged, or has no weights of that architecture.
    """
    tensors = _tensors(model, spec)
    weights = np.empty(spec.parameter_count, np.float32)
    for block in spec.parameter_shapes:
        tensor = tensors[block.name]
        values = np.frombuffer(model, "<f4", block.size, tensor.begin).reshape(tensor.shape)
        if values.ndim > 2:
            values = np.moveaxis(values, (0, 1), (-1, -2))
        weights[block.offset : block.offset + block.size] = values.reshape(-1)
    return weights


def with_weights(model: bytes, spec: ModelSpec, weights: NDArray[np.float32]) -> bytes:
    """The same file with other weights ``(d,)``.

    Raises:
        DataError: as of :func:`weights_of`.
        ParameterError: The weights do not fit the architecture.
    """
    spec.require_weights(weights)
    tensors, changed = _tensors(model, spec), bytearray(model)
    for block in spec.parameter_shapes:
        values = weights[block.offset : block.offset + block.size].reshape(block.shape)
        if values.ndim > 2:
            values = np.moveaxis(values, (-1, -2), (0, 1))
        tensor = tensors[block.name]
        changed[tensor.begin : tensor.end] = values.astype("<f4").tobytes()
    return bytes(changed)


def _tensors(model: bytes, spec: ModelSpec) -> dict[str, _Tensor]:
    """Where the weights of each block are."""
    wanted = {block.name: _shape_in_file(block) for block in spec.parameter_shapes}
    found: dict[str, _Tensor] = {}
    for graph in fields_of(model, 0, len(model)):
        if graph.number != _GRAPH:
            continue
        for field in fields_of(model, graph.begin, graph.end):
            if field.number != _INITIALIZER:
                continue
            name, tensor = _tensor(model, field)
            if name in wanted and tensor is not None and tensor.shape == wanted[name]:
                found[name] = tensor
    if missing := [name for name in wanted if name not in found]:
        raise DataError(
            f"The model's file has no weights {missing[0]!r} of shape {wanted[missing[0]]}, which its "
            "architecture has. Export it anew."
        )
    return found


def _shape_in_file(block: ParameterBlock) -> tuple[int, ...]:
    """Of a convolution, filters and channels stand before the window."""
    shape = tuple(block.shape)
    return shape if len(shape) <= 2 else (shape[-1], shape[-2], *shape[:-2])


def _tensor(model: bytes, field: Field) -> tuple[str, _Tensor | None]:
    """Name and place of a tensor; None of one that is not float32, or whose values lie elsewhere."""
    shape: list[int] = []
    kind, name, place = 0, b"", None
    for part in fields_of(model, field.begin, field.end):
        match part.number, part.kind:  # of TensorProto
            case 1, 0:  # dims, one by one
                shape.append(part.value)
            case 1, 2:  # dims, packed
                at = part.begin
                while at < part.end and len(shape) <= _MOST_AXES:
                    size, at = _number(model, at, part.end)
                    shape.append(size)
            case 2, 0:  # data_type
                kind = part.value
            case 8, 2:  # name
                name = model[part.begin : part.end]
            case 9, 2:  # raw_data
                place = part.begin, part.end
            case _:
                pass
        if len(shape) > _MOST_AXES:
            return "", None
    if kind != _FLOAT or place is None or place[1] - place[0] != 4 * math.prod(shape):
        return "", None
    return name.decode(errors="replace"), _Tensor(tuple(shape), *place)


def _length_delimited(number: int, data: bytes) -> bytes:
    return _written(number << 3 | BYTES) + _written(len(data)) + data


def _written(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def fields_of(data: bytes | memoryview, begin: int, end: int) -> Iterator[Field]:
    """The fields of the message that ``data[begin:end]`` is.

    Raises:
        DataError: It is none.
    """
    at = begin
    while at < end:
        start = at
        key, at = _number(data, at, end)
        if key >> _KEY_BITS:  # Other readers take its lower bits alone for the key.
            raise DataError(f"The model is no ONNX file: no field has the key {key:,}.")
        kind = key & 7
        value, first = 0, at
        if kind == _NUMBER:
            value, at = _number(data, at, end)
            first = at
        elif kind == BYTES:
            length, first = _number(data, at, end)
            at = first + length
        elif kind in _WHOLE_BYTES:
            at = first = at + _WHOLE_BYTES[kind]
        else:
            raise DataError(f"The model is no ONNX file: a field of kind {kind} at byte {at:,}.")
        if at > end:
            raise DataError(f"The model ends within a field, at byte {end:,}.")
        yield Field(key >> 3, kind, value, start, first, at)


def _number(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """A number at a place, and the place behind it."""
    value = 0
    for shift in range(0, _MOST_SHIFT + 1, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DataError(f"The model is no ONNX file: no number ends before byte {at:,}.")
