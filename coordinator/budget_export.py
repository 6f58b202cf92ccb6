"""The budgets of a fleet as one file for an auditor: what each board was granted, and the statements that the
boards signed.

The auditor need not take the coordinator's sums: they follow from the requests that were granted and the
price of each round. Each request is a statement of a board, signed by its own key. The whole is signed by the
coordinator: it cannot tell two auditors two things, and deny one. :mod:`coordinator.budget_audit` checks it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.columns import promised_by
from coordinator.database.opening import finds, is_there
from coordinator.database.schema import Part
from coordinator.database.settings import StorePlace
from coordinator.devices import Device, Devices
from coordinator.participation import total_values, totals
from coordinator.queued_job import QueuedJob
from coordinator.reader import StoreReader
from coordinator.registry import AnnouncedKey, Entry, RegistryReader, Spent, spent_of
from dpagent.errors import NotReadyError
from dpagent.protocol.messages import Layout
from dpagent.protocol.signing import Signer
from dpagent.schema.json_values import json_values
from dpagent.wording import counted

VERSION: Final = 2
SIGNATURE: Final = "signature"


@dataclass(frozen=True, slots=True)
class BudgetsDigest(Layout):
    """What the coordinator signs of an export: SHA-256 of its canonical form."""

    digest: bytes

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """That of an export, without its signature."""
        unsigned = {key: value for key, value in values.items() if key != SIGNATURE}
        text = json.dumps(unsigned, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return cls(hashlib.sha256(text.encode()).digest())

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return self.digest

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """See :class:`Layout`."""
        if len(data) != 32:
            raise ValueError(f"expected a digest of 32 bytes, got {counted(len(data), 'byte')}")
        return cls(data)


def has_export(place: StorePlace) -> bool:
    """Whether there is anything to export: a registry, and a device that ever enrolled.

    Args:
        place: of the members.

    Raises:
        StorageError, ConfigurationError: That cannot be told.
    """
    return is_there(place, Part.REGISTRY) and has_devices(place)


def has_devices(place: StorePlace) -> bool:
    """Whether a device ever enrolled.

    Args:
        place: of the members.

    Raises:
        StorageError, ConfigurationError: That cannot be told.
    """
    return finds(place, Part.MEMBERS, "SELECT 1 FROM devices LIMIT 1")


def without_tokens(place: StorePlace) -> list[QueuedJob]:
    """The jobs that began without tokens: the registry does not know who took part in them.

    Args:
        place: of the queue.

    Raises:
        StorageError, ConfigurationError: They cannot be read.
    """
    if not is_there(place):
        return []
    with closing(StoreReader(place)) as reader:
        return [
            each for each in reader.jobs() if each.begun_at is not None and each.job.linkability == "none"
        ]


def export(
    reader: RegistryReader,
    devices: Devices,
    *,
    fleet: str,
    untold: Sequence[QueuedJob],
    signer: Signer,
    now: float,
) -> dict[str, Any]:
    """All that an auditor needs to check what boards were granted, without trusting the coordinator's sums.

    Each statement is signed by a board's own key, of a certificate that is here too; it names the key of its
    round by digest, which has to be that of the key that is here: so a key that was shown to one board alone
    stands out. Nothing in it tells a fragment.

    Args:
        reader: of the registry.
        devices: of the fleet.
        fleet: its name.
        untold: as of :func:`without_tokens`.
        signer: of the coordinator.
        now: Unix time.

    Raises:
        NotReadyError: No device ever enrolled.
    """
    known = devices.all()
    if not known:
        raise NotReadyError(
            f"No board has enrolled in fleet {fleet!r}, so there is nothing to export. `dpagent coordinator "
            "invite` makes codes for boards (docs/deploy.md)."
        )
    # In this order, while the coordinator goes on: keys and prices come before what is granted of them, and
    # all figures are made of what was read. Read one by one, they would contradict each other.
    entries: dict[str, list[Entry]] = defaultdict(list)
    for entry in reader.entries():
        entries[entry.device].append(entry)
    keys, prices = reader.keys(), reader.prices()
    spent = _spent(known, entries, {(job, number): columns for job, number, columns in prices})
    values: dict[str, Any] = {
        "version": VERSION,
        "fleet": fleet,
        "coordinator_key": signer.public_key,
        "exported_at": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
        "keys": [_key_values(key) for key in keys],
        "prices": [{"job": job, "round": number, "columns": columns} for job, number, columns in prices],
        "devices": [
            {
                "device": device.id,
                "state": str(device.state),
                "replaces": device.replaces,
                "certificate": device.parsed.public_bytes(Encoding.PEM).decode(),
                "granted": [total_values(total) for total in totals(spent[device.id])],
                "jobs": [
                    {"job": each.job, "rounds": each.rounds, **each.statement} for each in spent[device.id]
                ],
                "statements": [_entry_values(entry) for entry in entries[device.id]],
            }
            for device in known
        ],
        "without_tokens": [
            {
                "job": each.job.id.hex(),
                "name": each.name,
                "columns": [column.as_dict() for column in promised_by(each.job)],
            }
            for each in untold
        ],
    }
    values = json_values(values)
    return values | {SIGNATURE: signer.sign(BudgetsDigest.of(values), "budgets").hex()}


def _spent(
    known: Sequence[Device],
    entries: Mapping[str, Sequence[Entry]],
    prices: Mapping[tuple[str, int], Sequence[dict[str, Any]]],
) -> dict[str, list[Spent]]:
    """What each device was granted, with those whose place it took."""
    before = {device.id: device.replaces for device in known}
    found: dict[str, list[Spent]] = {}
    for device in known:
        granted: list[tuple[str, int]] = []
        one: str | None = device.id
        while one is not None:
            granted += [(entry.job.hex(), entry.round) for entry in entries.get(one, ()) if entry.is_granted]
            one = before.get(one)
        found[device.id] = spent_of(granted, prices)
    return found


def _key_values(key: AnnouncedKey) -> dict[str, Any]:
    """All that the digests are of that boards have signed."""
    return {
        "job": key.job, "round": key.round, "linkability": key.linkability, "tokens": key.tokens,
        "sealing_key": key.sealing_key.hex(), "modulus": key.modulus.hex(),
    }  # fmt: skip


def _entry_values(entry: Entry) -> dict[str, Any]:
    statement = entry.statement
    return {
        "job": entry.job.hex(), "round": entry.round, "at": entry.at, "wish": entry.wish.name.lower(),
        "verdict": entry.verdict.name.lower(), "ledger_entries": statement.entries,
        "ledger_head": statement.head.hex(), "key_digest": statement.keys.hex(),
        "statement": statement.to_bytes().hex(), "signature": entry.signature.hex(),
    }  # fmt: skip
