"""What a file of exported budgets holds, which a stranger may have written: each field is checked before its
use. :mod:`coordinator.budget_export` writes it, and :mod:`coordinator.budget_audit` asks whether it is true.
"""

from __future__ import annotations

from typing import Annotated, Literal

from coordinator.devices import DeviceState
from coordinator.queue import JobName
from dpagent.protocol.device_signing import DEVICE_PATTERN
from dpagent.protocol.issuing import Verdict, Wish
from dpagent.protocol.signing import CoordinatorKey
from dpagent.protocol.tokens import MAX_TOKENS, TokenKeys, key_digest
from dpagent.protocol.topics import FleetName
from dpagent.schema.base import Schema
from dpagent.schema.limits import After, Limits
from dpagent.schema.problems import SchemaError

_DeviceId = Annotated[str, Limits(pattern=DEVICE_PATTERN)]
_JobId = Annotated[str, Limits(pattern=r"^[0-9a-f]{32}$")]
_Hex = Annotated[str, Limits(pattern=r"^([0-9a-f]{2})*$", max_length=4_096)]
_Round = Annotated[int, Limits(ge=0, lt=1 << 32)]
_Epsilon = Annotated[float, Limits(ge=0, le=1e12)]
"""Or None, without a guarantee."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it has characters that are none of a text")
    return text


_Text = Annotated[str, Limits(max_length=1_000), After(_printable)]


class _Said(Schema):
    """What an export says."""


class Column(_Said):
    """What a round costs one unit, or a job."""

    version: int
    unit: _Text
    adjacency: _Text
    trust: _Text
    mechanism: _Text
    guarantee: _Text
    epsilon: _Epsilon | None
    delta: Annotated[float, Limits(ge=0, le=1)] | None
    assumptions: tuple[_Text, ...]

    @property
    def scope(self) -> tuple[str, str, str]:
        return self.unit, self.adjacency, self.trust


class Price(_Said):
    """The price of a round, in columns."""

    job: _JobId
    round: _Round
    columns: tuple[Column, ...]


class Key(_Said):
    """The key of a round's tokens."""

    job: _JobId
    round: _Round
    linkability: Literal["fragment", "round"]
    tokens: Annotated[int, Limits(ge=1, le=MAX_TOKENS)]
    sealing_key: Annotated[str, Limits(pattern=r"^[0-9a-f]{64}$")]
    modulus: Annotated[str, Limits(pattern=r"^[0-9a-f]{512}$")]

    def digest(self, fleet: str) -> str | None:
        """What a board signs of it; None if no coordinator announces such a key."""
        try:
            keys = TokenKeys(
                job=bytes.fromhex(self.job), linkability=self.linkability, tokens=self.tokens,
                sealing_key=bytes.fromhex(self.sealing_key), first_round=self.round,
                moduli=[bytes.fromhex(self.modulus)],
            )  # fmt: skip
        except SchemaError:
            return None
        return key_digest(keys, self.round, fleet).hex()


class Untold(_Said):
    """A job whose fragments carried no tokens, so that nobody knows who took part."""

    job: _JobId
    name: JobName
    columns: Annotated[tuple[Column, ...], Limits(min_length=1)]


class SaidTotal(_Said):
    """What a device was granted, as the coordinator adds it up."""

    unit: _Text
    adjacency: _Text
    trust: _Text
    epsilon: float | None
    delta: float
    jobs_left_out: _Round


class SaidJob(Column):
    """What one job costs a device, as the coordinator adds it up."""

    job: _JobId
    rounds: _Round


class Entry(_Said):
    """A statement of a device, and what the coordinator did with it."""

    job: _JobId
    round: _Round
    at: float
    wish: str
    verdict: Literal["granted", "noted", "over_limit", "asked_otherwise", "excluded"]
    """Names of :class:`Verdict`: those that are kept."""
    ledger_entries: int
    ledger_head: _Hex
    key_digest: _Hex
    statement: _Hex
    signature: _Hex

    @property
    def is_granted(self) -> bool:
        return self.verdict == Verdict.GRANTED.name.lower()

    @property
    def fits_the_wish(self) -> bool:
        """Whether who declines was not granted anything, and nobody else was taken for declining."""
        return (self.verdict == Verdict.NOTED.name.lower()) is (self.wish != Wish.TAKES_PART.name.lower())


class Device(_Said):
    """A device, and all that it asked for."""

    device: _DeviceId
    state: DeviceState
    replaces: _DeviceId | None
    certificate: Annotated[str, Limits(max_length=16_384)]
    granted: tuple[SaidTotal, ...]
    jobs: tuple[SaidJob, ...]
    statements: tuple[Entry, ...]


class Export(_Said):
    """The file."""

    version: Literal[2]
    fleet: FleetName
    coordinator_key: CoordinatorKey
    exported_at: Annotated[str, Limits(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$")]
    keys: tuple[Key, ...]
    prices: tuple[Price, ...]
    devices: tuple[Device, ...]
    without_tokens: tuple[Untold, ...]
    signature: _Hex
