"""The form of every message, version 1.

A plan is one CBOR map (RFC 8949); the fields of :class:`Plan` are its keys. A receiver accepts exactly these
keys, types and ranges and rejects every other plan as a whole. The ranges of a plan's parameters are those
that a device accepts from any signer. What is sent often or is large has a fixed layout (:class:`Layout`):
fields in order, without names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dpagent.privacy.clipping import MAX_NORM, MIN_NORM
from dpagent.privacy.mechanisms.wire import MAX_STEP
from dpagent.protocol.packing import least_payload_bytes
from dpagent.protocol.topics import FleetName
from dpagent.protocol.weights import Precision, weights_bytes

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

MIN_EXPECTED_LOT = 1e-6
"""No noisy sum that is divided by so much leaves floating point: a device that failed then would tell, by its
silence, of a sum for which it charged nothing."""
MIN_SLOT_S = 1e-3
"""Slots of that length can be counted."""

_Probability = Annotated[float, Field(gt=0, le=1)]
_JobId = Annotated[bytes, Field(min_length=16, max_length=16)]
_Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,63}$")]
_Round = Annotated[int, Field(ge=1, le=100_000)]


class Message(BaseModel):
    """Base of all maps on the wire: strict types, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelTerms(Message):
    """The model, with digests of its architecture and weights."""

    description: Annotated[bytes, Field(min_length=1, max_length=8_192)]
    """Name and architecture as canonical CBOR of a map; see ``dpagent.learning.models.description``."""
    parameters: Annotated[int, Field(ge=1, le=MAX_WHOLE_BYTES // 4)]
    architecture: Annotated[bytes, Field(min_length=32, max_length=32)]
    digest: Annotated[bytes, Field(min_length=32, max_length=32)]
    """SHA-256 of the weights as they are sent."""
    precision: Precision
    """How they are sent; see ``dpagent.protocol.weights``."""

    @property
    def size(self) -> int:
        """Bytes of the weights as they are sent."""
        return weights_bytes(self.parameters, self.precision)


class AssetTerms(Message):
    """A large input of the round besides the weights."""

    role: Literal["training-graph", "frozen-network", "projection"]
    digest: Annotated[bytes, Field(min_length=32, max_length=32)]
    size: Annotated[int, Field(ge=1, le=MAX_WHOLE_BYTES)]
    """In bytes."""


class ClippingTerms(Message):
    """The norm that each record's gradient is clipped to; see ``dpagent.privacy.clipping``.

    A norm that follows a quantile changes from round to round; the noise is proportional to it, so the
    price does not change.
    """

    norms: Annotated[
        list[Annotated[float, Field(ge=MIN_NORM, le=MAX_NORM)]], Field(min_length=1, max_length=512)
    ]
    """One for the whole gradient, or one for each layer with parameters."""
    shares: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1, max_length=512)]
    """Of the budget, one for each norm."""
    count_weight: Annotated[float, Field(ge=0, le=1)]
    """Weight of the coordinate that counts the records within the norm; 0 without one."""
    accumulation_slack: Annotated[float, Field(ge=0, le=0.01)]
    """The most that summing in floating point adds to a record's influence, relative to the norm."""

    @model_validator(mode="after")
    def _fits_together(self) -> ClippingTerms:
        if len(self.norms) != len(self.shares):
            raise ValueError(f"there are {len(self.norms)} norms and {len(self.shares)} shares")
        if self.count_weight and len(self.norms) > 1:
            raise ValueError("records are counted with a single norm only")
        return self


class MechanismTerms(Message):
    """The mechanism of the job, by name, and its public parameters.

    Names and ranges of the parameters are the mechanism's own
    (:class:`dpagent.privacy.mechanisms.mechanism.PlannedMechanism`). The noise multipliers of all rounds are
    announced with the first and pinned by the device, so that the coordinator cannot choose later ones after
    seeing earlier results.
    """

    name: _Name
    noise_multipliers: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1, max_length=5_000)]
    """One for each round."""
    parameters: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], int | float], Field(max_length=16)
    ]


class SamplingTerms(Message):
    """The lots of a round."""

    rate: _Probability
    """Probability that a record enters a lot."""
    expected_lot: Annotated[float, Field(ge=MIN_EXPECTED_LOT, le=1e7)]
    """Public expectation of a lot's size; the divisor of sums."""
    local_steps: Annotated[int, Field(ge=1, le=64)]
    """Noisy steps in a round, each with a fresh lot."""
    local_learning_rate: Annotated[float, Field(ge=0, le=1e3)]


class ProjectionTerms(Message):
    """A first round that sums second moments, for the directions on which the other rounds project."""

    values: Annotated[int, Field(ge=1, le=4_096)]
    """Numbers in a record before the projection."""
    record_norm: Annotated[float, Field(ge=1e-4, le=1e4)]
    """L2 norm that a record is scaled down to."""


class AugmentationTerms(Message):
    """Views of each record, whose gradients are averaged before clipping."""

    views: Annotated[int, Field(ge=2, le=64)]
    shift: Annotated[int, Field(ge=0, le=1024)]
    flip: bool


class CapTerms(Message):
    """The ``clamp`` noise cap (post-processing), and where it is applied."""

    kind: Literal["none", "clamp"]
    where: Literal["device", "coordinator"]
    regularisation: Annotated[float, Field(gt=0, le=1e6)]
    floor: Annotated[float, Field(gt=0, le=1e6)]


class WireTerms(Message):
    """How an update is cut and packed; see :mod:`dpagent.protocol.packing`."""

    block: Annotated[int, Field(ge=1, le=400_000)]
    """Coordinates of a fragment."""
    bytes: Annotated[int, Field(ge=1, le=MAX_PAYLOAD_BYTES)]
    """Of a fragment's payload."""
    step: Annotated[int, Field(ge=1, le=MAX_STEP)]
    """Grid units to a unit of a coordinate; odd."""

    @model_validator(mode="after")
    def _holds_any_values(self) -> WireTerms:
        if self.bytes < (least := least_payload_bytes(self.block)):
            raise ValueError(f"a fragment of {self.block} values has {self.bytes} bytes; it needs {least}")
        if self.step % 2 == 0:
            raise ValueError(f"step is {self.step}; expected an odd number")
        return self


class Plan(Message):
    """One round, or the end of the job. Signed, retained."""

    fleet: FleetName
    job: _JobId
    round: _Round
    state: Literal["open", "finished"]
    method: _Name
    """How the fleet trains; see ``dpagent.privacy.methods``."""
    model: ModelTerms
    assets: Annotated[list[AssetTerms], Field(max_length=3)]
    mechanism: MechanismTerms
    clipping: ClippingTerms
    sampling: SamplingTerms
    delta: Annotated[float, Field(gt=0, lt=1)]
    """δ of the job."""
    projection: ProjectionTerms | None
    augmentation: AugmentationTerms | None
    cap: CapTerms
    wire: WireTerms
    sealing_key: Annotated[bytes, Field(min_length=32, max_length=32)]
    deadline: Annotated[float, Field(ge=0)]
    """Unix time at which the coordinator closes the round if it is not complete."""
    compute_slot_s: Annotated[float, Field(ge=MIN_SLOT_S, le=86_400)]
    """Publication starts a whole number of slots after the plan's arrival."""
    jitter_window_s: Annotated[float, Field(ge=0, le=86_400)]

    @model_validator(mode="after")
    def _round_is_scheduled(self) -> Plan:
        if self.round > self.rounds:
            raise ValueError(f"round {self.round} is beyond the {self.rounds} rounds of the schedule")
        return self

    @property
    def rounds(self) -> int:
        """Number of rounds of the job."""
        return len(self.mechanism.noise_multipliers)


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
    bytes each, big-endian), id, payload.

    All fragments of a round have one length. Nothing identifies the device, or links two fragments of one
    device. The job is bound by the seal.
    """

    DUMMY: ClassVar[bytes] = b"\xff"
    """First byte of a dummy's payload, where others have their level."""
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
    """Fragments that are durably counted, and dummies: concatenated 16-byte digests of their ids. Signed."""

    digests: bytes

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
