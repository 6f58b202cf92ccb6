"""Weights and assets on their way down: cut into chunks that any broker takes, and put together again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from dpagent.errors import ParameterError
from dpagent.protocol.messages import (
    MAX_WHOLE_BYTES,
    MODEL_CHUNK_BYTES,
    AssetTerms,
    ModelChunk,
    Plan,
)


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
        ModelChunk(digest, index, data[start : start + MODEL_CHUNK_BYTES])
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
        self._false: set[bytes] = set()
        """Digests of the plan whose chunks came, and did not make what they name."""

    def keep_for(self, plan: Plan, beside: AssetTerms | None = None) -> None:
        """Keep the data that ``plan`` names, and forget those that only the previous plan named.

        Args:
            plan: the one that holds now.
            beside: what an earlier one named, and is still to come.
        """
        named = {asset.digest: asset.size for asset in plan.assets}
        if beside is not None:
            named[beside.digest] = beside.size
        named[plan.model.digest] = plan.model.size
        for digest in self._named.keys() - named.keys():
            self._forget(digest)
            self._complete.pop(digest, None)
        self._named = named
        self._false &= named.keys()
        for digest, size in named.items():
            self._foreign_total -= self._foreign.pop(digest, 0)
            for index in [index for index in self._chunks.get(digest, {}) if index >= _chunk_count(size)]:
                del self._chunks[digest][index]

    def add(self, chunk: ModelChunk) -> bool:
        """Take one chunk; return whether it is one of the plan's that was missing."""
        digest, size = chunk.digest, self._named.get(chunk.digest)
        if digest in self._complete or (size is not None and chunk.index >= _chunk_count(size)):
            return False
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
        return size is not None and before is None

    def missing(self, digest: bytes, size: int) -> Iterator[int]:
        """The indices of the chunks to fetch, of ``size`` bytes of that SHA-256.

        None of those that came and were false, until :meth:`fetch_again`: a broker sends
        the same again.
        """
        if digest not in self._complete and digest not in self._false:
            parts = self._chunks.get(digest, {})
            yield from (index for index in range(_chunk_count(size)) if index not in parts)

    def fetch_again(self) -> None:
        """Fetch what was false once more."""
        self._false.clear()

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
            self._false.add(digest)
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
