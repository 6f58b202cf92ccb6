"""An update cut into fragments of one size, and weights into chunks.

An update is ``dimension`` signed integers of ``width`` bits. Block *p* holds coordinates
``p·block … (p+1)·block − 1``; the last one is filled up with zeros. Integers are stored
offset by ``2^(width−1)``, most significant bit first, and padded to whole bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import (
    MAX_WHOLE_BYTES,
    MODEL_CHUNK_BYTES,
    RECEIPT_DIGEST_BYTES,
    Fragment,
    ModelChunk,
    Plan,
    WireTerms,
)


def block_count(dimension: int, block: int) -> int:
    """Number of fragments of an update: ⌈dimension / block⌉."""
    return -(-dimension // block)


def payload_bytes(wire: WireTerms) -> int:
    """Bytes of a fragment's payload: ``block`` integers of ``width`` bits."""
    return _packed_bytes(wire.block, wire.width)


def pack(values: NDArray[np.int64], width: int) -> bytes:
    """Pack signed integers in ``[−2^(width−1), 2^(width−1))`` into bits.

    Raises:
        ValueError: A value does not fit.
    """
    half = 1 << (width - 1)
    if values.size and (values.min() < -half or values.max() >= half):
        raise ValueError(f"values from {values.min()} to {values.max()} do not fit {width} signed bits")
    raw = (values + half).astype(">u4").view(np.uint8).reshape(-1, 4)
    bits = np.unpackbits(raw, axis=1)[:, 32 - width :]
    return np.packbits(bits).tobytes()


def unpack(data: bytes, count: int, width: int) -> NDArray[np.int64]:
    """Inverse of :func:`pack` for ``count`` integers.

    Raises:
        MessageError: The length is not that of ``count`` integers.
    """
    expected = _packed_bytes(count, width)
    if len(data) != expected:
        raise MessageError("wrong size", f"payload of {len(data)} bytes; expected {expected}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count * width).reshape(count, width)
    padded = np.zeros((count, 32), np.uint8)
    padded[:, 32 - width :] = bits
    raw = np.packbits(padded, axis=1).view(">u4").reshape(count)
    return raw.astype(np.int64) - (1 << (width - 1))


def _packed_bytes(count: int, width: int) -> int:
    return (count * width + 7) // 8


def cut(update: NDArray[np.int64], plan: Plan) -> Iterator[Fragment]:
    """The fragments of ``update`` (dimension,), each with a fresh random id."""
    wire = plan.wire
    for position in range(block_count(len(update), wire.block)):
        block = np.zeros(wire.block, np.int64)
        part = update[position * wire.block : (position + 1) * wire.block]
        block[: len(part)] = part
        yield Fragment(
            version=1, kind="fragment", job=plan.job, round=plan.round, id=os.urandom(16),
            position=position.to_bytes(4, "big"), dummy=False, payload=pack(block, wire.width),
        )  # fmt: skip


def read_block(fragment: Fragment, wire: WireTerms, dimension: int) -> tuple[int, NDArray[np.int64]]:
    """Block index and the ``wire.block`` integers of a fragment.

    Raises:
        MessageError: The position is outside the update or the payload has another size.
    """
    position = int.from_bytes(fragment.position, "big")
    if position >= block_count(dimension, wire.block):
        raise MessageError("bad position", f"block {position} of {block_count(dimension, wire.block)}")
    return position, unpack(fragment.payload, wire.block, wire.width)


def receipt_digest(fragment_id: bytes) -> bytes:
    """The digest in a receipt: SHA-256 of the fragment's id, truncated to 16 bytes."""
    return hashlib.sha256(fragment_id).digest()[:RECEIPT_DIGEST_BYTES]


def weights_to_bytes(weights: NDArray[np.float32]) -> bytes:
    """Weights in wire form: float32, little-endian."""
    return weights.astype("<f4", copy=False).tobytes()


def weights_from_bytes(data: bytes) -> NDArray[np.float32]:
    """Inverse of :func:`weights_to_bytes`.

    Raises:
        MessageError: Their number is not a multiple of 4.
    """
    if len(data) % 4:
        raise MessageError("wrong size", f"weights of {len(data)} bytes; expected a multiple of 4")
    return np.frombuffer(data, "<f4").astype(np.float32)


def content_digest(data: bytes) -> bytes:
    """SHA-256 of the bytes of weights, or of an asset."""
    return hashlib.sha256(data).digest()


def chunked(data: bytes) -> list[ModelChunk]:
    """Cut weights or an asset into chunks that any broker takes.

    Raises:
        ParameterError: There are more than ``MAX_WHOLE_BYTES``.
    """
    if len(data) > MAX_WHOLE_BYTES:
        raise ParameterError(
            f"Weights or an asset have {len(data):,} bytes; expected at most {MAX_WHOLE_BYTES:,}."
        )
    digest = content_digest(data)
    return [
        ModelChunk(
            version=1, kind="model", digest=digest, index=index, data=data[start : start + MODEL_CHUNK_BYTES]
        )
        for index, start in enumerate(range(0, len(data), MODEL_CHUNK_BYTES))
    ]


class Assembler:
    """Puts chunks together, in any order, until the digest matches.

    It keeps everything that the current plan names, chunks and assembled. It holds other chunks
    (weights that precede their plan, retained messages of an earlier and larger job) up to
    :attr:`FOREIGN_BYTES`, and drops the least recently used first: a flood of them cannot fill
    the memory, and the broker can send all of them again.
    """

    FOREIGN_BYTES: Final = 1 << 28
    """The largest thing that a plan can name, and some room for the others."""
    _CHUNK_OVERHEAD: Final = 512
    """Approximate memory of a chunk beside its data, so that empty chunks are not free."""

    def __init__(self) -> None:
        self._named: dict[bytes, int] = {}
        """Digests of the plan, and the size in bytes of each."""
        self._chunks: dict[bytes, dict[int, bytes]] = {}
        """By digest, the one touched last at the end."""
        self._foreign: dict[bytes, int] = {}
        """Bytes held of each digest that no plan names, in the same order."""
        self._foreign_total = 0
        self._complete: dict[bytes, bytes] = {}
        """The assembled data, by digest, so that they are hashed only once."""

    def keep_for(self, plan: Plan) -> None:
        """Keep the data that ``plan`` names, and forget those that only the previous plan named."""
        named = {asset.digest: asset.size for asset in plan.assets}
        named[plan.model.digest] = 4 * plan.model.parameters
        for digest in self._named.keys() - named.keys():
            self._forget(digest)
            self._complete.pop(digest, None)
        self._named = named
        for digest, size in named.items():
            self._foreign_total -= self._foreign.pop(digest, 0)
            for index in [index for index in self._chunks.get(digest, {}) if index >= _chunk_count(size)]:
                del self._chunks[digest][index]

    def add(self, chunk: ModelChunk) -> None:
        """Take one chunk."""
        digest, size = chunk.digest, self._named.get(chunk.digest)
        if digest in self._complete or (size is not None and chunk.index >= _chunk_count(size)):
            return
        parts = self._chunks.pop(digest, {})
        before = parts.get(chunk.index)
        parts[chunk.index] = chunk.data
        self._chunks[digest] = parts
        if size is None:
            more = len(chunk.data) + self._CHUNK_OVERHEAD
            if before is not None:
                more -= len(before) + self._CHUNK_OVERHEAD
            self._foreign[digest] = self._foreign.pop(digest, 0) + more
            self._foreign_total += more
            while self._foreign_total > self.FOREIGN_BYTES:
                self._forget(next(iter(self._foreign)))

    def get(self, digest: bytes, size: int) -> bytes | None:
        """The ``size`` bytes of that SHA-256, or ``None`` while chunks are missing."""
        if digest in self._complete:
            return self._complete[digest] if len(self._complete[digest]) == size else None
        parts = self._chunks.get(digest, {})
        chunks = range(_chunk_count(size))
        if any(index not in parts for index in chunks):
            return None
        data = b"".join(parts[index] for index in chunks)
        if len(data) != size or content_digest(data) != digest:
            # A chunk has a false digest: drop all of them; the agent requests them again.
            self._forget(digest)
            return None
        if digest in self._named:
            self._forget(digest)
            self._complete[digest] = data
        return data

    def _forget(self, digest: bytes) -> None:
        self._chunks.pop(digest, None)
        self._foreign_total -= self._foreign.pop(digest, 0)


def _chunk_count(size: int) -> int:
    return -(-size // MODEL_CHUNK_BYTES)
