"""Reads the files of a finished run, as an auditor with access to every machine could."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from agent.audit import VerifiedLedger, audit, open_ledger
from agent.charges import BudgetChange
from agent.columns import account_name
from coordinator.columns import spent_in
from coordinator.reader import StoreReader
from dpagent.errors import LedgerError
from dpagent.learning.data.formats.npz import open_npz
from dpagent.learning.models.spec import ModelSpec
from dpagent.protocol.receipts import receipt_digest
from simulation.layout import Layout
from simulation.notes import RunNotes
from simulation.outlook import Outlook
from simulation.programs.baseline import read_baseline
from simulation.record import Arrival, DeviceBudget, FragmentTally, RunRecord
from simulation.settings import RunSettings

_TRANSIT_S = 2.0
"""A fragment that left this long before its round closed should have arrived in time."""


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


def read_budget(number: int, state_dir: Path, account: str) -> DeviceBudget:
    """What a device has spent, by its ledger.

    Args:
        number: Of the device.
        state_dir: With its ledger.
        account: Of the run.
    """
    try:
        spent: VerifiedLedger | None = audit(state_dir)
    except LedgerError:
        spent = None
    charges = [] if spent is None else [each for each in spent.charges if each.dataset == account]
    budgets = [] if spent is None else [entry.record for entry in spent.entries]
    changes = [each.epsilon for each in budgets if isinstance(each, BudgetChange) and each.dataset == account]
    return DeviceBudget(
        number,
        charges[-1].cumulative_epsilon if charges else 0.0,
        changes[-1] if changes else 0.0,
        len(charges),
        spent is not None,
    )


def _read_device(number: int, state_dir: Path, account: str) -> _Device:
    budget = read_budget(number, state_dir, account)
    connection, _ = open_ledger(state_dir)
    try:
        rows = connection.execute("SELECT digest, round, first_sent_at, state FROM fragments").fetchall()
        counters = dict(connection.execute("SELECT name, value FROM counters").fetchall())
    finally:
        connection.close()
    return _Device(
        budget,
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
    """The fate of the fragments of all devices, as :class:`FragmentTally` defines it.

    Args:
        fragments: The rows of all spools.
        counted: Digests of the fragments that the coordinator has counted.
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


def collect(
    settings: RunSettings, notes: RunNotes, outlook: Outlook, layout: Layout, spec: ModelSpec
) -> RunRecord:
    """Make the record of a finished run.

    Args:
        settings, notes, outlook: Of the run.
        layout: Where its files are.
        spec: Its model.
    """
    account = account_name(settings.data.name, settings.mechanism.trust)
    devices = [_read_device(n, layout.agent_state(n), account) for n in range(1, settings.devices + 1)]
    reader = StoreReader(layout.coordinator_state)
    try:
        rounds = [r for r in reader.rounds() if r.closed_at is not None]
        counted = {receipt_digest(identity): place for identity, place in reader.fragments().items()}
        counters, job = reader.counters(), reader.job()
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
    test = open_npz(layout.test_file)
    return RunRecord(
        settings=settings,
        notes=notes,
        outlook=outlook,
        layout=layout,
        model=spec.name,
        parameters=spec.parameter_count,
        numbers=tuple(r.number for r in rounds),
        noise_multipliers=tuple(r.noise_multiplier or 0.0 for r in rounds),
        clip_norms=tuple(r.clip_norm for r in rounds if r.clip_norm is not None),
        epsilon_spent=tuple(r.epsilon or 0.0 for r in rounds),
        accuracy_history=tuple(math.nan if r.accuracy is None else r.accuracy for r in rounds),
        baseline_history=read_baseline(layout.baseline_file),
        majority_class_accuracy=int(test.class_counts().max()) / len(test),
        clamped=tuple(r.clamped or 0 for r in rounds),
        out_of_range=tuple(dict.fromkeys(layer for r in rounds for layer in r.out_of_range)),
        kept=tuple(1.0 if r.kept is None else r.kept for r in rounds),
        columns=() if job is None else spent_in(job, rounds),
        budgets=tuple(device.budget for device in devices),
        fragments=tally,
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.arrived_at)),
        bytes_up=sum(device.counters.get("bytes_up", 0) for device in devices) / device_rounds,
        bytes_down=sum(device.counters.get("bytes_down", 0) for device in devices) / device_rounds,
        seconds_by_round=tuple((r.closed_at or r.opened_at) - r.opened_at for r in rounds),
    )
