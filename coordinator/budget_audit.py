"""Checks the budgets of a fleet that somebody else exported, with nothing but the file and public keys.

It is read as what a stranger wrote: each field is checked before it is used, and what does not fit is said in
a sentence. Sums are made anew from the requests that were granted (:mod:`coordinator.budget_export`).

Which requests were granted is the coordinator's word. Where it calls a granted request refused, the board's
own ledger has the charge (``dpagent budget show``).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cryptography import x509
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from coordinator.budget_export import BudgetsDigest
from coordinator.participation import Total, totals
from coordinator.registry import Spent
from dpagent.errors import DataError
from dpagent.protocol import device_signing
from dpagent.protocol.codec import MessageError
from dpagent.protocol.device_signing import DEVICE_PATTERN
from dpagent.protocol.issuing import Statement
from dpagent.protocol.signing import CoordinatorKey, Verifier
from dpagent.protocol.topics import FleetName
from dpagent.storage import disk_errors
from dpagent.wording import counted

MOST_BYTES: Final = 1 << 30
"""Of a file that is read: some 800 bytes a board and round."""
_SAME: Final = 1e-9
"""Relative, of sums that are added in another order."""

_DeviceId = Annotated[str, StringConstraints(pattern=DEVICE_PATTERN)]
_JobId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
_Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})*$", max_length=4_096)]
_Round = Annotated[int, Field(ge=0, lt=1 << 32)]


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _Column(_Said):
    version: int
    unit: str
    adjacency: str
    trust: str
    mechanism: str
    guarantee: str
    epsilon: Annotated[float, Field(ge=0)] | None
    delta: Annotated[float, Field(ge=0, le=1)] | None
    assumptions: tuple[str, ...] = Field(strict=False)


class _Price(_Said):
    job: _JobId
    round: _Round
    columns: tuple[_Column, ...] = Field(strict=False)


class _Key(_Said):
    job: _JobId
    round: _Round
    modulus: _Hex


class _Total(_Said):
    unit: str
    adjacency: str
    trust: str
    epsilon: float | None
    delta: float


class _Job(_Column):
    job: _JobId
    rounds: _Round


class _Entry(_Said):
    job: _JobId
    round: _Round
    at: float
    wish: str
    verdict: str
    ledger_entries: int
    ledger_head: _Hex
    key_digest: _Hex
    statement: _Hex
    signature: _Hex

    @property
    def is_granted(self) -> bool:
        return self.verdict == "granted"


class _Device(_Said):
    device: _DeviceId
    state: str
    replaces: _DeviceId | None
    certificate: Annotated[str, StringConstraints(max_length=16_384)]
    granted: tuple[_Total, ...] = Field(strict=False)
    jobs: tuple[_Job, ...] = Field(strict=False)
    statements: tuple[_Entry, ...] = Field(strict=False)


class _Export(_Said):
    version: Literal[1]
    fleet: FleetName
    coordinator_key: CoordinatorKey
    exported_at: str
    keys: tuple[_Key, ...] = Field(strict=False)
    prices: tuple[_Price, ...] = Field(strict=False)
    devices: tuple[_Device, ...] = Field(strict=False)
    signature: _Hex


@dataclass(frozen=True, slots=True)
class Granted:
    """What a device was granted, as its own statements and the prices of rounds say. Jobs that it shares with
    those whose place it took count for it, too.

    Attributes:
        device: its id.
        state: what it is to its fleet.
        rounds: for which it, or one before it in its place, has or may have tokens.
        totals: in each column; columns are never added.
    """

    device: str
    state: str
    rounds: int
    totals: tuple[Total, ...]


@dataclass(frozen=True, slots=True)
class AuditedBudgets:
    """An export that was checked.

    Attributes:
        fleet: its name.
        coordinator_key: by which it is signed.
        exported_at: as it says, in UTC.
        granted: by device.
        statements: how many there are, each signed by its device.
        problems: what does not fit, in sentences; none in a sound export.
    """

    fleet: str
    coordinator_key: str
    exported_at: str
    granted: tuple[Granted, ...]
    statements: int
    problems: tuple[str, ...]


def read_export(file: Path) -> dict[str, Any]:
    """The values in a file, which may be anything.

    Raises:
        DataError: It is no JSON object.
        StorageError: It cannot be read.
    """
    with disk_errors(file):
        if (size := file.stat().st_size) > MOST_BYTES:
            raise DataError(
                f"{file} has {counted(size, 'byte')}; expected at most {MOST_BYTES:,} of an export."
            )
        data = file.read_bytes()
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} is no JSON ({error}); expected what `dpagent coordinator budgets export` wrote."
        ) from error
    if not isinstance(values, dict):
        raise DataError(f"{file} holds no object; expected what `dpagent coordinator budgets export` wrote.")
    return values


def audit(values: Mapping[str, Any], source: str, coordinator_key: str | None = None) -> AuditedBudgets:
    """Check an export.

    Args:
        values: as of :func:`read_export`.
        source: where it is from, for errors.
        coordinator_key: that the fleet is known by; None takes the file's word for it.

    Raises:
        DataError: It is no export of this version.
    """
    try:
        export = _Export.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise DataError(
            f"{source} is no export of budgets that this program knows: {where}: {first['msg']}. Expected "
            "what `dpagent coordinator budgets export` of this version wrote."
        ) from error
    key = coordinator_key or export.coordinator_key
    problems = [*_signature_problems(export, values, key), *_problems(export)]
    made_anew = _granted(export)
    problems += _differences(export, made_anew)
    statements = sum(len(each.statements) for each in export.devices)
    return AuditedBudgets(
        export.fleet, key, export.exported_at, tuple(made_anew.values()), statements, tuple(problems)
    )


def _signature_problems(export: _Export, values: Mapping[str, Any], key: str) -> Iterator[str]:
    if export.coordinator_key != key:
        yield f"It names the coordinator key {export.coordinator_key}; expected {key}."
    try:
        signed = Verifier(key, export.fleet).open(bytes.fromhex(export.signature), BudgetsDigest, "budgets")
        is_whole = signed == BudgetsDigest.of(values)
    except (MessageError, ValueError):
        is_whole = False
    if not is_whole:
        yield f"It is not as the coordinator with the key {key} signed it: something was changed, or added."


def _problems(export: _Export) -> Iterator[str]:
    """What is wrong with single statements, and with them together."""
    ids = Counter(each.device for each in export.devices)
    for device, number in ids.items():
        if number > 1:
            yield f"Device {device} is there {number} times."
    for each in export.devices:
        if each.replaces is not None and each.replaces not in ids:
            yield f"Device {each.device} took the place of {each.replaces}, which is not there."
        try:
            certificate = x509.load_pem_x509_certificate(each.certificate.encode())
        except ValueError:
            yield f"Device {each.device}: what is there for its certificate is none."
            continue
        if device_signing.device_id_of(certificate) != each.device:
            yield f"Device {each.device}: its certificate names another."
        for entry in each.statements:
            if (problem := _of_statement(each, entry, certificate)) is not None:
                yield f"Device {each.device}, round {entry.round} of job {entry.job[:8]}: {problem}."
    shown: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for each in export.devices:
        for entry in each.statements:
            shown[entry.job, entry.round][entry.key_digest] += 1
    for (job, number), digests in sorted(shown.items()):
        if len(digests) > 1:
            yield (
                f"Round {number} of job {job[:8]}: boards were shown {len(digests)} different keys, so their "
                "tokens tell them apart."
            )


def _of_statement(device: _Device, entry: _Entry, certificate: x509.Certificate) -> str | None:
    try:
        statement = Statement.from_bytes(bytes.fromhex(entry.statement))
    except ValueError as error:
        return str(error)
    if not device_signing.is_signed(certificate, bytes.fromhex(entry.signature), statement.signed):
        return "the statement is not signed by its key"
    said = (
        statement.device.hex(), statement.job.hex(), statement.round, statement.wish.name.lower(),
        statement.entries, statement.head.hex(), statement.keys.hex(),
    )  # fmt: skip
    shown = (
        device.device, entry.job, entry.round, entry.wish, entry.ledger_entries, entry.ledger_head,
        entry.key_digest,
    )  # fmt: skip
    if said != shown:
        return "what is shown of the statement is not what it says"
    if entry.is_granted and statement.wish.name != "TAKES_PART":
        return "it was granted what it did not ask for"
    return None


def _granted(export: _Export) -> dict[str, Granted]:
    """What each device was granted: of each job the last round that it, or one before it in its place, was
    granted, whose price bounds all before it."""
    by_id = {each.device: each for each in export.devices}
    prices = {(each.job, each.round): each.columns for each in export.prices}
    found: dict[str, Granted] = {}
    for each in export.devices:
        rounds: dict[str, set[int]] = defaultdict(set)
        for ancestor in _line(each, by_id):
            for entry in ancestor.statements:
                if entry.is_granted:
                    rounds[entry.job].add(entry.round)
        spent = [
            Spent(job, len(numbers), column.model_dump())
            for job, numbers in sorted(rounds.items())
            for column in prices.get((job, max(numbers)), ())
        ]
        found[each.device] = Granted(
            each.device, each.state, sum(map(len, rounds.values())), tuple(totals(spent))
        )
    return found


def _line(device: _Device, by_id: Mapping[str, _Device]) -> Iterator[_Device]:
    """A device, and before it those whose places it took."""
    seen: set[str] = set()
    at: _Device | None = device
    while at is not None and at.device not in seen:
        seen.add(at.device)
        yield at
        at = None if at.replaces is None else by_id.get(at.replaces)


def _differences(export: _Export, made_anew: Mapping[str, Granted]) -> Iterator[str]:
    priced = {(each.job, each.round) for each in export.prices}
    unpriced = {
        (entry.job, entry.round)
        for each in export.devices
        for entry in each.statements
        if entry.is_granted and (entry.job, entry.round) not in priced
    }
    for job, number in sorted(unpriced):
        yield f"Round {number} of job {job[:8]} was granted, and what it costs is not there."
    for each in export.devices:
        own = {(t.unit, t.adjacency, t.trust): (t.epsilon, t.delta) for t in made_anew[each.device].totals}
        shown = {(t.unit, t.adjacency, t.trust): (_bound(t.epsilon), t.delta) for t in each.granted}
        if own.keys() != shown.keys() or not all(_alike(own[scope], shown[scope]) for scope in own):
            yield (
                f"Device {each.device}: the figures shown are not those that follow from its statements and "
                "the prices of rounds."
            )


def _bound(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a == b or math.isclose(a, b, rel_tol=_SAME) for a, b in zip(one, other, strict=True))
