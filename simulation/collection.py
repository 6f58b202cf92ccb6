"""Reads what a run left on disk, as an auditor with access to every machine could."""

from __future__ import annotations

import math
import sqlite3
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.charges import BudgetChange
from agent.ledger import VerifiedLedger, audit, open_ledger
from coordinator.store import RoundRecord, StoreReader
from dpagent.errors import LedgerError, StorageError
from dpagent.privacy.mechanisms.registry import DEFAULT_MECHANISM, mechanism_named
from dpagent.protocol.fragments import receipt_digest
from simulation.layout import Layout
from simulation.record import Arrival, DemoRecord, DeviceBudget, FragmentTally

_TRANSIT_S = 2.0
"""A fragment that left this long before its round closed should have arrived in time."""


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The state of a run while it goes on."""

    rounds: list[RoundRecord]
    epsilon_spent: float
    """Largest ε any device has charged."""
    in_flight: int
    """Fragments charged and neither counted nor expired."""
    declined: int
    """Devices that declined to take part, ever."""
    reason: str | None
    """Why one of them did."""


class Observer:
    """Looks at the databases of a run from outside, while their owners write them.

    Args:
        layout: Where they are.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._coordinator: StoreReader | None = None
        self._devices: dict[int, sqlite3.Connection] = {}

    def close(self) -> None:
        """Close what is open."""
        if self._coordinator is not None:
            self._coordinator.close()
        for connection in self._devices.values():
            connection.close()

    def glimpse(self) -> Glimpse:
        """The state now; empty while the programs are starting."""
        rounds: list[RoundRecord] = []
        try:
            if self._coordinator is None:
                self._coordinator = StoreReader(self._layout.coordinator_state)
            rounds = self._coordinator.rounds()
        except (StorageError, sqlite3.Error):
            pass  # Not there yet.
        epsilon, in_flight, declined = 0.0, 0, 0
        why: str | None = None
        for number in range(1, self._layout.devices + 1):
            try:
                if number not in self._devices:
                    self._devices[number], _ = open_ledger(self._layout.agent_state(number))
                connection = self._devices[number]
                spent = connection.execute(
                    "SELECT json_extract(body, '$.cumulative_epsilon') FROM entries WHERE kind = 'charge' "
                    "ORDER BY number DESC LIMIT 1"
                ).fetchone()
                epsilon = max(epsilon, spent[0] if spent else 0.0)
                in_flight += connection.execute(
                    "SELECT count(*) FROM fragments WHERE message IS NOT NULL"
                ).fetchone()[0]
                reason = connection.execute(
                    "SELECT reason FROM declined ORDER BY declined_at LIMIT 1"
                ).fetchone()
                if reason is not None:
                    declined += 1
                    why = why or f"device {number}: {reason[0]}"
            except (LedgerError, sqlite3.Error):
                continue  # Not there yet.
        return Glimpse(rounds, epsilon, in_flight, declined, why)


def closed_rounds(layout: Layout) -> int:
    """How many rounds are done; 0 where none has begun."""
    observer = Observer(layout)
    try:
        return sum(record.closed_at is not None for record in observer.glimpse().rounds)
    finally:
        observer.close()


@dataclass(frozen=True, slots=True)
class ChargedFragment:
    """A row of a device's spool: a charge and its fragments' rows are one transaction."""

    digest: bytes
    round: int
    first_sent_at: float | None
    """Unix time; None if it never left, or the note of it was lost in a crash."""
    receipted: bool
    """Whether the coordinator told the device that it is counted."""


@dataclass(frozen=True, slots=True)
class _Device:
    budget: DeviceBudget
    fragments: list[ChargedFragment]
    counters: dict[str, int]


def _read_device(number: int, state_dir: Path) -> _Device:
    try:
        spent: VerifiedLedger | None = audit(state_dir)
    except LedgerError:
        spent = None
    connection, _ = open_ledger(state_dir)
    try:
        rows = connection.execute("SELECT digest, round, first_sent_at, state FROM fragments").fetchall()
        counters = dict(connection.execute("SELECT name, value FROM counters").fetchall())
    finally:
        connection.close()
    last = spent.charges[-1] if spent is not None and spent.charges else None
    changes = [e.record.epsilon for e in spent.entries if isinstance(e.record, BudgetChange)] if spent else []
    return _Device(
        DeviceBudget(
            number,
            last.cumulative_epsilon if last is not None else 0.0,
            changes[-1] if changes else 0.0,
            len(spent.charges) if spent is not None else 0,
            spent is not None,
        ),
        [
            ChargedFragment(row["digest"], row["round"], row["first_sent_at"], row["state"] == "counted")
            for row in rows
        ],
        counters,
    )


def tally_fragments(
    fragments: Iterable[ChargedFragment],
    counted: Set[bytes],
    closed_at: Mapping[int, float],
    *,
    duplicates: int,
    rejected: int,
) -> FragmentTally:
    """What became of the fragments of all devices, as :class:`FragmentTally` defines it.

    Args:
        fragments: The rows of all spools.
        counted: Digests of what the coordinator has counted.
        closed_at: Unix times at which rounds closed, by number, of those that did.
        duplicates: Messages that the coordinator had counted before.
        rejected: Messages that failed a check.
    """
    sent = ours = lost = total = 0
    for fragment in fragments:
        total += 1
        is_counted = fragment.digest in counted
        ours += is_counted
        sent += is_counted or fragment.first_sent_at is not None
        was_in_time = (
            fragment.first_sent_at is not None
            and fragment.round in closed_at
            and fragment.first_sent_at < closed_at[fragment.round] - _TRANSIT_S
        )
        lost += not is_counted and (fragment.receipted or was_in_time)
    return FragmentTally(
        charged=total, sent=sent, counted=ours, expired=total - ours - lost, duplicates=duplicates,
        rejected=rejected, lost=lost,
    )  # fmt: skip


def collect(layout: Layout, facts: dict[str, Any]) -> DemoRecord:
    """Make the record of a finished run.

    Args:
        layout: Where its files are.
        facts: The fields of the record that are not on disk, or that the caller knows.
    """
    devices = [_read_device(n, layout.agent_state(n)) for n in range(1, layout.devices + 1)]
    reader = StoreReader(layout.coordinator_state)
    try:
        rounds = [r for r in reader.rounds() if r.closed_at is not None]
        counted = {receipt_digest(identity): place for identity, place in reader.fragments().items()}
        counters = reader.counters()
    finally:
        reader.close()
    arrivals = [
        Arrival(device.budget.device, fragment.round, fragment.first_sent_at, counted[fragment.digest][1])
        for device in devices
        for fragment in device.fragments
        if fragment.digest in counted and fragment.first_sent_at is not None
    ]
    tally = tally_fragments(
        (fragment for device in devices for fragment in device.fragments),
        counted.keys(),
        {r.number: r.closed_at for r in rounds if r.closed_at is not None},
        duplicates=counters.get("duplicates", 0),
        rejected=sum(value for name, value in counters.items() if name.startswith("rejected: "))
        + sum(device.counters.get("rejected", 0) for device in devices),
    )
    device_rounds = max(1, sum(device.budget.charges for device in devices))
    return DemoRecord(
        noise_multipliers=tuple(r.noise_multiplier or 0.0 for r in rounds),
        epsilon_spent=tuple(r.epsilon or 0.0 for r in rounds),
        accuracy_history=tuple(math.nan if r.accuracy is None else r.accuracy for r in rounds),
        clamped=tuple(r.clamped or 0 for r in rounds),
        kept=tuple(1.0 if r.kept is None else r.kept for r in rounds),
        budgets=tuple(device.budget for device in devices),
        fragments=tally,
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.arrived_at)),
        bytes_up=sum(device.counters.get("bytes_up", 0) for device in devices) / device_rounds,
        bytes_down=sum(device.counters.get("bytes_down", 0) for device in devices) / device_rounds,
        seconds_by_round=tuple((r.closed_at or r.opened_at) - r.opened_at for r in rounds),
        **facts,
    )


def as_json(record: DemoRecord) -> dict[str, Any]:
    """The run as a script reads it; the summary on the terminal shows the same figures."""
    statement = mechanism_named(DEFAULT_MECHANISM).job_statement(record.epsilon_target, record.delta)
    return {
        "dataset": record.dataset,
        "data": {
            "records_per_device": record.records_per_device,
            "test_records": record.test_records,
            "shape": list(record.shape),
            "classes": list(record.classes),
            "split": record.split,
        },
        "outlook": {
            "signal_to_noise": record.signal_to_noise,
            "verdict": record.outlook,
            "warning": record.warning,
        },
        "broker": record.broker,
        "minds": list(record.minds),
        "guessing_accuracy": record.guessing,
        "accuracy": _last(record.accuracy_history),
        "accuracy_history": _plain(record.accuracy_history),
        "baseline_accuracy": _last(record.baseline_history),
        "baseline_accuracy_history": _plain(record.baseline_history),
        "devices": record.devices,
        "rounds": record.rounds,
        "model": {"name": record.model, "parameters": record.parameters, "file": record.model_file},
        "privacy": {
            "unit": str(statement.unit),
            "adjacency": str(statement.adjacency),
            "trust": str(statement.trust),
            "statement": statement.as_dict(),
            "schedule": record.schedule,
            "sampling_rate": record.sampling_rate,
            "clip_norm": record.clip_norm,
            "clipping": record.clipping,
            "epsilon_target": record.epsilon_target,
            "delta": record.delta,
            "epsilon_spent": list(record.epsilon_spent),
            "noise_multipliers": list(record.noise_multipliers),
            "ledgers": [
                {
                    "device": budget.device,
                    "epsilon_spent": budget.epsilon_spent,
                    "epsilon_budget": budget.epsilon_total,
                    "charges": budget.charges,
                    "verified": budget.verified,
                }
                for budget in record.budgets
            ],
        },
        "noise_cap": {
            "kind": record.cap,
            "coordinates_clamped": list(record.clamped),
            "norm_kept": list(record.kept),
        },
        "fragments": {
            "charged": record.fragments.charged,
            "sent": record.fragments.sent,
            "counted": record.fragments.counted,
            "expired": record.fragments.expired,
            "duplicates": record.fragments.duplicates,
            "rejected": record.fragments.rejected,
            "lost": record.fragments.lost,
        },
        "bytes_per_device_round": {"up": round(record.bytes_up), "down": round(record.bytes_down)},
        "seconds": {
            "total": record.seconds_total,
            "per_round_median": statistics.median(record.seconds_by_round)
            if record.seconds_by_round
            else None,
        },
        "peak_memory_mib": {"agent_max": record.agent_peak_mib, "coordinator": record.coordinator_peak_mib},
        "restarts": record.restarts,
        "state_dir": record.state_dir,
        "test_file": record.test_file,
        "predict": list(record.predict),
    }


def _plain(history: Sequence[float]) -> list[float | None]:
    """With None, as JSON has it, where nothing was measured."""
    return [None if math.isnan(value) else value for value in history]


def _last(history: Sequence[float]) -> float | None:
    return _plain(history)[-1] if history else None
