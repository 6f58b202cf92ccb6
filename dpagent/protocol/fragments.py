"""An update cut into fragments of one size, and weights into chunks.

An update is ``dimension`` integers. Block *p* holds coordinates ``p·block … (p+1)·block − 1``; the last one
is filled up with zeros. :mod:`dpagent.protocol.packing` makes a block the payload of a fragment.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.privacy.noise.entropy import Entropy
from dpagent.protocol.bit_packing import pack_bits
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import (
    MAX_WHOLE_BYTES,
    MODEL_CHUNK_BYTES,
    AssetTerms,
    Fragment,
    ModelChunk,
    Plan,
    WireTerms,
)
from dpagent.protocol.packing import pack, unpack
from dpagent.protocol.report_packing import read_reports, report_width
from dpagent.protocol.terms import NoisySumTerms, ReportTerms, UpdateTerms
from dpagent.protocol.update_packing import pack_update


def block_count(dimension: int, block: int) -> int:
    """Number of fragments of an update: ⌈dimension / block⌉."""
    return -(-dimension // block)


def cut(update: NDArray[np.int64], plan: Plan, *, entropy: Entropy = os.urandom) -> Iterator[Fragment]:
    """The fragments of ``update`` (values,), each with a fresh random id: wire units of a noisy sum,
    reports, or grid units of an update without noise.

    Args:
        update: of a device.
        plan: of the round.
        entropy: of ids and of rounding; to be replaced in tests and simulations only.
    """
    wire = plan.wire
    for position in range(block_count(len(update), wire.block)):
        block = np.zeros(wire.block, np.int64)
        part = update[position * wire.block : (position + 1) * wire.block]
        block[: len(part)] = part
        match plan.release:
            case NoisySumTerms():
                payload = pack(block, wire.bytes, entropy=entropy)
            case ReportTerms(coordinates=coordinates):
                payload = pack_bits(block, report_width(plan.model.parameters, coordinates))
            case UpdateTerms(largest=largest):
                payload = pack_update(block, largest)
        yield Fragment(plan.round, position, entropy(16), payload)


def read_block(fragment: Fragment, wire: WireTerms, blocks: int) -> tuple[NDArray[np.int64], int]:
    """The ``wire.block`` integers of a noisy sum's fragment, which is no dummy, and their level.

    Raises:
        MessageError: The position is none of the ``blocks``, or the payload is not one of such integers.
    """
    require_place(fragment, wire, blocks)
    try:
        return unpack(fragment.payload, wire.block, wire.bytes)
    except ValueError as error:
        raise MessageError("bad values", str(error)) from error


def read_tally(fragment: Fragment, plan: Plan, terms: ReportTerms, blocks: int) -> NDArray[np.int64]:
    """What a fragment of reports, which is no dummy, adds to the tally of its block; see
    :func:`~dpagent.protocol.report_packing.read_reports`.

    Raises:
        MessageError: The position is none of the ``blocks``, or the payload is not one of such reports.
    """
    require_place(fragment, plan.wire, blocks)
    try:
        return read_reports(
            fragment.payload, fragment.position, plan.wire.block,
            dimension=plan.model.parameters, coordinates=terms.coordinates,
        )  # fmt: skip
    except ValueError as error:
        raise MessageError("bad values", str(error)) from error


def require_place(fragment: Fragment, wire: WireTerms, blocks: int) -> None:
    """Refuse a fragment, or a dummy, without a place in the update or of another length.

    Raises:
        MessageError: It is one.
    """
    if fragment.position >= blocks:
        raise MessageError("bad position", f"block {fragment.position} of {blocks}")
    if len(fragment.payload) != wire.bytes:
        raise MessageError("wrong size", f"payload of {len(fragment.payload)} bytes; expected {wire.bytes}")


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
