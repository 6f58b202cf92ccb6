"""Bytes to checked messages and back."""

from __future__ import annotations

from typing import TypeVar

import cbor2
from pydantic import ValidationError

from dpagent.protocol.cbor_form import CborFormError, require_form
from dpagent.protocol.messages import MAX_MESSAGE_BYTES, VERSION, Layout, Sealed, Signed
from dpagent.protocol.terms import Message

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
        data = cbor2.dumps(message.model_dump(), canonical=True)
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
        return schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise MessageError("malformed", f"{where}: {first['msg']}") from error


def read_cbor(data: bytes) -> object:
    """The one CBOR item in ``data``, read as strictly as all that comes from outside.

    Raises:
        MessageError: Not CBOR, or not of the form that
            :func:`~dpagent.protocol.cbor_form.require_form` requires.
    """
    try:
        require_form(data)
        return cbor2.loads(data)
    except (CborFormError, cbor2.CBORError) as error:
        raise MessageError("malformed", f"not the CBOR expected: {error}") from error
