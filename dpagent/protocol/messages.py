"""The form of every message, version 1.

A plan is one CBOR map (RFC 8949); the fields of :class:`Plan` are its keys. A receiver accepts exactly these
keys, types and ranges and rejects every other plan as a whole. The ranges of a plan's parameters are those
that a device accepts from any signer. What is sent often or is large has a fixed layout (:class:`Layout`):
fields in order, without names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, Self

from dpagent.protocol.sizes import (
    Precision,
    least_payload_bytes,
    packed_bytes,
    report_width,
    update_width,
    weights_bytes,
)
from dpagent.protocol.terms import Message, Name, NoisySumTerms, ReleaseTerms, ReportTerms, UpdateTerms
from dpagent.protocol.topics import FleetName
from dpagent.schema.base import rule
from dpagent.schema.limits import Limits

VERSION: Final = 1
"""The first byte of every envelope."""

MAX_MESSAGE_BYTES = 60_000
"""Maximum size of a message: the smallest limit of common hosted brokers, less headers."""

MAX_PAYLOAD_BYTES = MAX_MESSAGE_BYTES - 512
"""Payload of one fragment: a message less its envelopes, with room to spare."""

MODEL_CHUNK_BYTES = 48_000
MAX_WHOLE_BYTES = 200_000_000
"""Weights and assets are no larger: as many as 50 million parameters."""
MAX_CHUNKS = -(-MAX_WHOLE_BYTES // MODEL_CHUNK_BYTES)
RECEIPT_DIGEST_BYTES = 16
RECEIPTS_PER_MESSAGE = 2_048

MIN_SLOT_S = 1e-3
"""Slots of that length can be counted."""

JobId = Annotated[bytes, Limits(min_length=16, max_length=16)]
RoundNumber = Annotated[int, Limits(ge=1, le=100_000)]

Linkability = Literal["fragment", "round", "none"]
"""What tokens of members let the coordinator link: with ``fragment`` each fragment has one of its own, which
links nothing; with ``round`` all of a device's in a round have the same, which shows that they belong
together, and not whose they are; with ``none`` there are none, and nobody's membership is checked."""

ReceiptTopics = Literal["fleet", "fragment"]
"""Where receipts go: with ``fleet`` all of them to one topic, which all devices read; with ``fragment`` each
to a topic of its own, which its device reads; see :mod:`dpagent.protocol.receipts`."""


class ModelTerms(Message):
    """The model, with digests of its architecture and weights."""

    description: Annotated[bytes, Limits(min_length=1, max_length=8_192)]
    """Name and architecture as canonical CBOR of a map; see ``dpagent.learning.models.description``."""
    parameters: Annotated[int, Limits(ge=1, le=MAX_WHOLE_BYTES // 4)]
    architecture: Annotated[bytes, Limits(min_length=32, max_length=32)]
    digest: Annotated[bytes, Limits(min_length=32, max_length=32)]
    """SHA-256 of the weights as they are sent."""
    precision: Precision
    """How they are sent; see ``dpagent.protocol.weights``."""

    @property
    def size(self) -> int:
        """Bytes of the weights as they are sent."""
        return weights_bytes(self.parameters, self.precision)


class AssetTerms(Message):
    """A large input of the round besides the weights; at the end of a job, what came of it."""

    role: Literal["training-graph", "frozen-network", "projection", "export", "model"]
    digest: Annotated[bytes, Limits(min_length=32, max_length=32)]
    size: Annotated[int, Limits(ge=1, le=MAX_WHOLE_BYTES)]
    """In bytes."""


class WireTerms(Message):
    """How an update is cut into fragments of one size."""

    block: Annotated[int, Limits(ge=1, le=400_000)]
    """Values of a fragment."""
    bytes: Annotated[int, Limits(ge=1, le=MAX_PAYLOAD_BYTES)]
    """Of a fragment's payload."""


class Plan(Message):
    """One round, or the end of the job. Signed, retained."""

    fleet: FleetName
    job: JobId
    round: RoundNumber
    state: Literal["open", "finished"]
    method: Name
    """How the fleet trains; see ``dpagent.privacy.methods``."""
    model: ModelTerms
    assets: Annotated[list[AssetTerms], Limits(max_length=4)]
    release: ReleaseTerms
    """What a device makes of its records and sends."""
    delta: Annotated[float, Limits(gt=0, lt=1)]
    """δ of the job."""
    wire: WireTerms
    sealing_key: Annotated[bytes, Limits(min_length=32, max_length=32)]
    linkability: Linkability
    """Whether each fragment carries a token of a member; see ``dpagent.protocol.tokens``."""
    mixer: Annotated[bytes, Limits(min_length=32, max_length=32)] | None
    """The key of the mixer that sealed fragments pass through, if any; see ``dpagent.protocol.mixing``."""
    receipts: ReceiptTopics
    """Where receipts go; see ``dpagent.protocol.receipts``."""
    deadline: Annotated[float, Limits(ge=0)]
    """Unix time at which the coordinator closes the round if it is not complete."""
    compute_slot_s: Annotated[float, Limits(ge=MIN_SLOT_S, le=86_400)]
    """Publication starts a whole number of slots after the plan's arrival."""
    jitter_window_s: Annotated[float, Limits(ge=0, le=86_400)]

    @rule
    def _payloads_hold_any_values(self) -> None:
        block, size = self.wire.block, self.wire.bytes
        match self.release:
            case NoisySumTerms():
                if size < (least := least_payload_bytes(block)):
                    raise ValueError(f"a fragment of {block} values has {size} bytes; it needs {least}")
            case ReportTerms(coordinates=coordinates):
                if coordinates > self.model.parameters:
                    raise ValueError(f"{coordinates} bits are asked of {self.model.parameters} weights")
                exact = packed_bytes(block, report_width(self.model.parameters, coordinates))
                if size != exact:
                    raise ValueError(f"a fragment of {block} reports has {size} bytes; expected {exact}")
            case UpdateTerms(largest=largest):
                exact = packed_bytes(block, update_width(largest))
                if size != exact:
                    raise ValueError(f"a fragment of an update has {size} bytes; expected {exact}")

    @rule
    def _receipts_show_no_sender_behind_a_mixer(self) -> None:
        if self.mixer is not None and self.receipts == "fragment":
            raise ValueError("receipts on topics of their own tell who sent what passes through a mixer")

    @rule
    def _model_comes_at_the_end(self) -> None:
        if self.state == "open" and any(asset.role == "model" for asset in self.assets):
            raise ValueError("a finished model goes with a plan whose state is finished")

    @property
    def finished_model(self) -> AssetTerms | None:
        """The model that came of a job, as an ONNX file, in the plan that ends it."""
        return next((asset for asset in self.assets if asset.role == "model"), None)

    @property
    def export(self) -> AssetTerms | None:
        """The model's file for users, as an ONNX file with other weights; no round needs it."""
        return next((asset for asset in self.assets if asset.role == "export"), None)

    @rule
    def _round_is_scheduled(self) -> None:
        if self.round > self.rounds:
            raise ValueError(f"round {self.round} is beyond the {self.rounds} rounds of the schedule")

    @property
    def rounds(self) -> int:
        """Number of rounds of the job."""
        return self.release.rounds


class Layout:
    """Base of all messages without names. (No ``ABC``: asking whether a type is one takes microseconds.)"""

    __slots__ = ()

    def to_bytes(self) -> bytes:
        """The message as it is sent."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of :meth:`to_bytes`.

        Raises:
            ValueError: ``data`` are no such message.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ModelChunk(Layout):
    """Part of the weights or of an asset: digest of the whole, index (4 bytes, big-endian), data. Signed,
    retained."""

    digest: bytes
    """32 bytes: SHA-256 of the whole."""
    index: int
    data: bytes

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return self.digest + self.index.to_bytes(4, "big") + self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """See :class:`Layout`."""
        chunk = cls(data[:32], int.from_bytes(data[32:36], "big"), data[36:])
        if not 36 <= len(data) <= 36 + MODEL_CHUNK_BYTES or chunk.index >= MAX_CHUNKS:
            raise ValueError(f"{len(data)} bytes are no chunk, or its index is {MAX_CHUNKS} or more")
        return chunk


@dataclass(frozen=True, slots=True)
class Fragment(Layout):
    """One block of one device's noisy update, or a dummy in its place, inside the seal: round and position (4
    bytes each, big-endian), id, payload. Where the plan asks for tokens, one precedes the payload
    (:mod:`dpagent.protocol.tokens`).

    All fragments of a round have one length. Nothing identifies the device, or links two fragments of one
    device. The job is bound by the seal.
    """

    DUMMY: ClassVar[bytes] = b"\xff"
    """First byte of a dummy's payload, where others have their level."""
    PROBE: ClassVar[bytes] = b"\xfe"
    """The same of a probe, by whose receipt a device learns that what it publishes arrives."""
    HEADER_BYTES: ClassVar[int] = 24

    round: int
    position: int
    """Block index."""
    id: bytes
    """16 random bytes."""
    payload: bytes

    @property
    def dummy(self) -> bool:
        """Whether it comes from a device that sits the round out, and counts for nothing."""
        return self.payload.startswith(self.DUMMY)

    @property
    def probe(self) -> bool:
        """Whether it is there for its receipt alone, and counts for nothing."""
        return self.payload.startswith(self.PROBE)

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return self.round.to_bytes(4, "big") + self.position.to_bytes(4, "big") + self.id + self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """See :class:`Layout`."""
        if len(data) < cls.HEADER_BYTES:
            raise ValueError(f"{len(data)} bytes are no fragment")
        at, place = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:8], "big")
        return cls(at, place, data[8:24], data[24:])


@dataclass(frozen=True, slots=True)
class Receipts(Layout):
    """Fragments that are durably counted, dummies and probes: 16-byte digests of their ids, one after the
    other. Signed where they go to all devices; on its own topic one digest stands alone."""

    digests: bytes

    @property
    def each(self) -> list[bytes]:
        """The digests, one by one."""
        size = RECEIPT_DIGEST_BYTES
        return [self.digests[start : start + size] for start in range(0, len(self.digests), size)]

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return self.digests

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """See :class:`Layout`."""
        if len(data) % RECEIPT_DIGEST_BYTES or len(data) > RECEIPT_DIGEST_BYTES * RECEIPTS_PER_MESSAGE:
            raise ValueError(f"{len(data)} bytes are not up to {RECEIPTS_PER_MESSAGE} digests")
        return cls(data)


@dataclass(frozen=True, slots=True)
class Signed(Layout):
    """The envelope of the coordinator's messages: version (1 byte), Ed25519 signature, the body's bytes."""

    signature: bytes
    """64 bytes."""
    body: bytes

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return bytes([VERSION]) + self.signature + self.body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """See :class:`Layout`."""
        if len(data) < 65:
            raise ValueError(f"{len(data)} bytes hold no signature")
        return cls(data[1:65], data[65:])


@dataclass(frozen=True, slots=True)
class Sealed(Layout):
    """The envelope of a device's messages: version (1 byte), an HPKE ciphertext to the coordinator."""

    ciphertext: bytes

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return bytes([VERSION]) + self.ciphertext

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """See :class:`Layout`."""
        if not data:
            raise ValueError("it is empty")
        return cls(data[1:])
