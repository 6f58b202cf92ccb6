"""Bytes to checked messages and back."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Final, TypeVar

import cbor2

from dpagent.protocol.cbor_form import MAX_DEPTH, CborFormError, require_form
from dpagent.protocol.messages import MAX_MESSAGE_BYTES, VERSION, Layout, Sealed, Signed
from dpagent.protocol.terms import Message
from dpagent.schema.problems import SchemaError

MessageT = TypeVar("MessageT", bound=Message | Layout)

_MOST_SHOWN = 300
_VERSION = bytes([VERSION])


class MessageError(ValueError):
    """A message is not acceptable.

    Attributes:
        reason: One word or two for a counter, such as ``malformed``.
    """

    def __init__(self, reason: str, detail: str) -> None:
        # The value may be as long as a message; a log line should not be.
        shown = detail if len(detail) <= _MOST_SHOWN else f"{detail[:_MOST_SHOWN]}…"
        super().__init__(f"{reason}: {shown}")
        self.reason = reason


def encode(message: Message | Layout) -> bytes:
    """The message as it is sent: a layout as it is, a map deterministically (RFC 8949, 4.2.1 map order).

    Raises:
        MessageError: The message is larger than :data:`MAX_MESSAGE_BYTES`.
    """
    if isinstance(message, Layout):
        data = message.to_bytes()
    else:
        data = cbor2.dumps(message.as_dict(), canonical=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError("oversized", f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES} may be sent")
    return data


def decode(data: bytes, schema: type[MessageT]) -> MessageT:
    """Decode and check ``data`` as ``schema``.

    Raises:
        MessageError: Too large, an envelope of another version, or not the schema.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError("oversized", f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    if issubclass(schema, Layout):
        if issubclass(schema, (Signed, Sealed)) and data[:1] not in (b"", _VERSION):
            raise MessageError(
                "unsupported version", f"version {data[0]}; this program speaks version {VERSION}"
            )
        try:
            return schema.from_bytes(data)
        except ValueError as error:
            raise MessageError("malformed", str(error)) from error
    value = read_cbor(data)
    if not isinstance(value, dict):
        raise MessageError("malformed", f"expected a map, got {type(value).__name__}")
    try:
        return schema.checked(value)
    except SchemaError as error:
        where = error.first.key or "message"
        raise MessageError("malformed", f"{where}: {error.first.complaint(shows_value=False)}") from error


def read_cbor(data: bytes) -> object:
    """The one CBOR item in ``data``, read as strictly as all that comes from outside.

    cbor2 has bounds of its own since 6.2. Before it, the form is looked at first, which takes ten times as
    long.

    Raises:
        MessageError: Not CBOR, tags, indefinite lengths, a key twice, more than 8 levels, trailing bytes.
    """
    try:
        if _IS_BOUNDED:
            return _read_within_bounds(data)
        require_form(data)
        return cbor2.loads(data)
    except (cbor2.CBORError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError("malformed", f"not the CBOR expected: {error}") from error


def _read_within_bounds(data: bytes) -> object:
    stream = io.BytesIO(data)
    # Tags would build other types than the schema has: refuse them all, unread.
    value = cbor2.load(
        stream, tag_hook=_refuse_tag, max_depth=MAX_DEPTH, allow_indefinite=False, allow_duplicate_keys=False,
        strict_hashable_types=True, semantic_decoders=_NO_TAGS,
    )  # fmt: skip
    if stream.tell() != len(data):
        raise CborFormError(f"{len(data) - stream.tell()} bytes follow the item")
    return value


def _refuse_tag(*_: object) -> object:
    raise CborFormError("CBOR tags are not part of the protocol")


def has_bounds(load: Callable[..., object]) -> bool:
    """Whether cbor2's ``load`` knows bounds: asked of itself, for in C it has no signature before 6."""
    try:
        load(io.BytesIO(b"\0"), max_depth=MAX_DEPTH, strict_hashable_types=True)
    except TypeError:
        return False
    return True


_IS_BOUNDED: Final = has_bounds(cbor2.load)
# cbor2 has decoders of its own for these semantic tags; each is replaced by a refusal.
_NO_TAGS: Final = dict.fromkeys(
    [0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 43000, 52, 54, 100, 256, 258, 260, 261, 1004, 55799],
    _refuse_tag,
)
