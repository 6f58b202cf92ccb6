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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.budget_export import BudgetsDigest
from coordinator.budget_file import Column, Device, Entry, Export, Price, SaidTotal
from coordinator.devices import DeviceState
from coordinator.participation import Total, totals
from coordinator.registry import Spent, spent_of
from dpagent.errors import DataError
from dpagent.notation import upwards
from dpagent.protocol import device_signing
from dpagent.protocol.codec import MessageError
from dpagent.protocol.issuing import Statement
from dpagent.protocol.signing import Verifier
from dpagent.schema.problems import SchemaError
from dpagent.storage import disk_errors
from dpagent.wording import counted

MOST_BYTES: Final = 1 << 30
"""Of a file that is read: some 800 bytes a board and round."""
_SAME: Final = 1e-9
"""Relative, of sums that are added in another order."""
_LESS: Final = 1e-6
"""Relative: an error of rounding, by which the price of a round may be below that of one before."""


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
        untold: the jobs without tokens, of which the file does not tell who took part: name, id, and the
            most that each cost a board.
        problems: what does not fit, in sentences; none in a sound export.
    """

    fleet: str
    coordinator_key: str
    exported_at: str
    granted: tuple[Granted, ...]
    statements: int
    untold: tuple[str, ...]
    problems: tuple[str, ...]


def read_export(file: Path) -> dict[str, Any]:
    """The values in a file, which may be anything.

    Raises:
        DataError: It is no JSON object.
        StorageError: It cannot be read.
    """
    with disk_errors(file), file.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise DataError(f"{file} has more than {MOST_BYTES:,} bytes, which no export has.")
    try:
        values = json.loads(data, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} is no JSON ({error}); expected what `dpagent coordinator budgets export` wrote."
        ) from error
    if not isinstance(values, dict):
        raise DataError(f"{file} holds no object; expected what `dpagent coordinator budgets export` wrote.")
    return values


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of two values for one key, another program could take the other one."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise ValueError(f"two values for one key: {twice!r}")
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
        export = Export.checked(values)
    except SchemaError as error:
        where = error.first.key or "the whole"
        said = error.first.complaint(shows_value=False)
        raise DataError(
            f"{source} is no export of budgets that this program knows: {where}: {said}. Expected "
            "what `dpagent coordinator budgets export` of this version wrote."
        ) from error
    key = coordinator_key or export.coordinator_key
    problems = [*_signature_problems(export, values, key), *_problems(export)]
    spent = _spent(export)
    problems += _differences(export, spent)
    granted = tuple(
        Granted(
            each.device,
            each.state,
            sum({of_job.job: of_job.rounds for of_job in spent[each.device]}.values()),
            tuple(totals(spent[each.device])),
        )
        for each in export.devices
    )
    statements = sum(len(each.statements) for each in export.devices)
    untold = tuple(
        f"{each.name} ({each.job[:8]}), {'; '.join(map(_most, each.columns))}"
        for each in export.without_tokens
    )
    return AuditedBudgets(export.fleet, key, export.exported_at, granted, statements, untold, tuple(problems))


def _most(column: Column) -> str:
    """What a job cost a board in a column at most, in words."""
    cost = "nothing guaranteed" if column.epsilon is None else f"ε = {upwards(column.epsilon)} at most"
    return f"{cost} for each {column.unit}, trusts {column.trust}"


def _signature_problems(export: Export, values: Mapping[str, Any], key: str) -> Iterator[str]:
    if export.coordinator_key != key:
        yield f"It names the coordinator key {export.coordinator_key}; expected {key}."
    try:
        signed = Verifier(key, export.fleet).open(bytes.fromhex(export.signature), BudgetsDigest, "budgets")
        is_whole = signed == BudgetsDigest.of(values)
    except (MessageError, ValueError):
        is_whole = False
    if not is_whole:
        yield f"It is not as the coordinator with the key {key} signed it: something was changed, or added."


def _problems(export: Export) -> Iterator[str]:
    """What is wrong with single statements, and with them together."""
    by_id = {each.device: each for each in export.devices}
    yield from _doubles("Device {} is", (each.device for each in export.devices))
    successors = Counter(each.replaces for each in export.devices)
    for each in export.devices:
        in_its_place = successors[each.device]
        if in_its_place != (each.state is DeviceState.REPLACED):
            yield (
                f"Device {each.device} is {each.state}, and {counted(in_its_place, 'device')} took its "
                "place: what it was granted counts for the one that did."
            )
        if each.replaces is not None and each.replaces not in by_id:
            yield f"Device {each.device} took the place of {each.replaces}, which is not there."
        if any(other.replaces == each.device for other in _line(each, by_id)):
            yield f"Device {each.device} took its own place."
        yield from _of_device(each)
    yield from _of_rounds(export)
    yield from _of_untold(export)


def _of_device(device: Device) -> Iterator[str]:
    rounds = (f"{entry.round} of job {entry.job[:8]}" for entry in device.statements)
    yield from _doubles(f"Device {device.device}: the statement for round {{}} is", rounds)
    certificate = _certificate(device.certificate)
    if certificate is None:
        yield f"Device {device.device}: what is there for its certificate is none of a device."
        return
    if device_signing.device_id_of(certificate) != device.device:
        yield f"Device {device.device}: its certificate names another."
    for entry in device.statements:
        if (problem := _of_statement(device, entry, certificate)) is not None:
            yield f"Device {device.device}, round {entry.round} of job {entry.job[:8]}: {problem}."


def _certificate(pem: str) -> x509.Certificate | None:
    """The certificate of a device; None if these bytes are none, or its key is none of a device's."""
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        is_of_device = isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
        device_signing.device_id_of(certificate)  # It reads the subject, which was not read so far.
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        return None
    return certificate if is_of_device else None


def _of_rounds(export: Export) -> Iterator[str]:
    """What is wrong with keys and prices: boards are shown one key, and a job only grows dearer."""
    yield from _doubles("The key of round {} is", (f"{e.round} of job {e.job[:8]}" for e in export.keys))
    yield from _doubles("The price of round {} is", (f"{e.round} of job {e.job[:8]}" for e in export.prices))
    known = {(each.job, each.round): each.digest(export.fleet) for each in export.keys}
    for (job, number), digest in known.items():
        if digest is None:
            yield f"Round {number} of job {job[:8]}: what is there for its key is none."
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
        if (job, number) not in known:
            yield f"Round {number} of job {job[:8]}: boards asked for its tokens, and its key is not there."
        elif (digest := known[job, number]) is not None and digest not in digests:
            yield (
                f"Round {number} of job {job[:8]}: the key that is there is not the one that boards were "
                "shown, by their own statements."
            )
    before: dict[str, Price] = {}
    for price in sorted(export.prices, key=lambda each: (each.job, each.round)):
        if (earlier := before.get(price.job)) is not None and not _bounds(price, earlier):
            yield (
                f"Round {price.round} of job {price.job[:8]} brings it to less than round {earlier.round} "
                "does, or to other columns: what was spent becomes no less."
            )
        before[price.job] = price


def _of_untold(export: Export) -> Iterator[str]:
    """What is wrong with jobs without tokens: no board asks for tokens of one."""
    yield from _doubles("Job {} without tokens is", (each.job[:8] for each in export.without_tokens))
    told = {each.job for each in export.keys} | {each.job for each in export.prices}
    told.update(entry.job for each in export.devices for entry in each.statements)
    for each in export.without_tokens:
        if each.job in told:
            yield (
                f"Job {each.name} ({each.job[:8]}) is said to be without tokens, and keys, prices or "
                "statements of it are there."
            )


def _bounds(later: Price, earlier: Price) -> bool:
    """Whether each figure of a price is at least that of a round before, in the same columns."""
    if [each.scope for each in later.columns] != [each.scope for each in earlier.columns]:
        return False
    return all(
        _bound(more.epsilon) >= _bound(less.epsilon) * (1 - _LESS)
        and (1.0 if more.delta is None else more.delta)
        >= (1.0 if less.delta is None else less.delta) * (1 - _LESS)
        for more, less in zip(later.columns, earlier.columns, strict=True)
    )


def _doubles(sentence: str, names: Iterable[str]) -> Iterator[str]:
    """Says what is there more than once."""
    for name, number in Counter(names).items():
        if number > 1:
            yield f"{sentence.format(name)} there {number} times."


def _of_statement(device: Device, entry: Entry, certificate: x509.Certificate) -> str | None:
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
    if not entry.fits_the_wish:
        return f"its wish was {entry.wish!r}, and the verdict is {entry.verdict!r}"
    return None


def _spent(export: Export) -> dict[str, list[Spent]]:
    """What each device was granted: of each job the last round that it, or one before it in its place, was
    granted, whose price bounds all before it."""
    by_id = {each.device: each for each in export.devices}
    prices = {(each.job, each.round): [column.as_dict() for column in each.columns] for each in export.prices}
    found: dict[str, list[Spent]] = {}
    for each in export.devices:
        found[each.device] = spent_of(
            (
                (entry.job, entry.round)
                for one in _line(each, by_id)
                for entry in one.statements
                if entry.is_granted
            ),
            prices,
        )
    return found


def _line(device: Device, by_id: Mapping[str, Device]) -> Iterator[Device]:
    """A device, and before it those whose places it took."""
    seen: set[str] = set()
    at: Device | None = device
    while at is not None and at.device not in seen:
        seen.add(at.device)
        yield at
        at = None if at.replaces is None else by_id.get(at.replaces)


def _differences(export: Export, made_anew: Mapping[str, Sequence[Spent]]) -> Iterator[str]:
    priced = {(each.job, each.round) for each in export.prices if each.columns}
    unpriced = {
        (entry.job, entry.round)
        for each in export.devices
        for entry in each.statements
        if entry.is_granted and (entry.job, entry.round) not in priced
    }
    for job, number in sorted(unpriced):
        yield f"Round {number} of job {job[:8]} was granted, and what it costs is not there."
    for each in export.devices:
        own, shown = totals(made_anew[each.device]), each.granted
        if len(own) != len(shown) or not all(map(_is_alike, own, sorted(shown, key=_scope))):
            yield (
                f"Device {each.device}: the figures shown are not those that follow from its statements and "
                "the prices of rounds."
            )
        if made_anew[each.device] != [
            Spent(of.job, of.rounds, of.as_dict(exclude={"job", "rounds"})) for of in each.jobs
        ]:
            yield (
                f"Device {each.device}: its jobs are not shown as they follow from its statements and the "
                "prices of rounds."
            )


def _scope(total: Total | SaidTotal) -> tuple[str, str, str]:
    return total.unit, total.adjacency, total.trust


def _is_alike(own: Total, shown: SaidTotal) -> bool:
    epsilon = _bound(shown.epsilon)
    return (
        _scope(own) == _scope(shown)
        and (own.epsilon == epsilon or math.isclose(own.epsilon, epsilon, rel_tol=_SAME))
        and math.isclose(own.delta, shown.delta, rel_tol=_SAME)
        and own.left_out == shown.jobs_left_out
    )


def _bound(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon
