"""The page of one run: the values for its template."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Final

from dpagent.notation import upwards
from dpagent.privacy.methods import method_named
from dpagent.privacy.statement import BudgetStatement, Trust, Unit
from dpagent.wording import counted
from simulation.presets import local_training_in_words
from simulation.record import RunRecord
from simulation.report.device_pictures import MAX_ROWS, arrivals_picture, ledgers_picture
from simulation.report.drawing import Picture
from simulation.report.linking import mixing_picture, who_could_link
from simulation.report.notation import duration, factor, mebibytes, percent, plain, size
from simulation.report.rendering import name_of, render, write_page
from simulation.report.round_pictures import accuracy_picture, budget_picture
from simulation.report.trust_picture import trust_picture

_MOST_NAMES: Final = 12
_CLIPPING: Final = {
    "whole": "no record’s gradient counts for more than this",
    "layers": "no record’s gradient counts for more than this, and no layer’s for more than its part",
    "quantile": "at first; then it follows the median of the gradients’ norms, estimated with noise",
}
_UPDATE_CLIPPING: Final = {
    "whole": "no device’s update counts for more than this",
    "quantile": "at first; then it follows the median of the updates’ norms, estimated with noise",
}


@dataclass(frozen=True, slots=True)
class _KeyFigure:
    label: str
    value: str
    detail: str


def write_report(record: RunRecord, directory: Path) -> Path:
    """Write the report of a finished run; see :func:`~simulation.report.rendering.write_page`."""
    return write_page(render_report(record, directory), directory)


def render_report(record: RunRecord, directory: Path) -> str:
    """The page as text. Files beside and below ``directory`` are named relative to it."""
    spent = record.epsilon
    method = method_named(record.settings.method)
    return render(
        "report.html.j2",
        record=record,
        key_figures=_key_figures(record),
        fragments=_fragment_figures(record),
        alarms=_alarms(record),
        pictures=[
            accuracy_picture(record),
            budget_picture(record),
            *([] if record.is_virtual else [arrivals_picture(record)]),
            *([mixing_picture(record)] if record.settings.mixer else []),
            *([] if record.settings.insecure else [ledgers_picture(record)]),
            *([] if record.is_virtual else [_trust(record)]),
        ],
        linking=who_could_link(record),
        round_rows=_round_rows(record),
        shows_cap=_shows_cap(record),
        epsilon=upwards(spent),
        target=plain(record.settings.epsilon),
        delta=plain(record.settings.delta),
        factor=factor(spent),
        unit=str(record.settings.mechanism.unit),
        shuffled=_shuffled(record),
        untrusting=[upwards(each.epsilon) for each in record.columns[1:] if _is_without_trust(each)],
        whole_device=record.settings.mechanism.unit is Unit.DEVICE,
        trusts_coordinator=record.settings.mechanism.trust is Trust.COORDINATOR,
        local_training=local_training_in_words(),
        sampling_rate=percent(record.settings.sampling_rate),
        clip_norm=f"{plain(record.settings.clip_norm)} in {record.settings.norm}",
        parameters=f"{record.parameters:,}",
        devices=counted(record.settings.devices, "device"),
        method=method,
        shape=" × ".join(map(str, record.settings.form.shape)),
        test_records=f"{record.settings.form.test_records:,}",
        classes=_some(record.settings.form.labels),
        learning_rate=plain(record.settings.learning_rate),
        clipping=(_UPDATE_CLIPPING if method.trains_locally else _CLIPPING)[record.settings.clipping],
        signal_to_noise=f"{record.outlook.signal_to_noise:.2g}",
        rounds=counted(record.settings.rounds, "round"),
        accuracy=percent(record.accuracy_history[-1]) if record.accuracy_history else None,
        cap_effect=_cap_effect(record),
        model_file=name_of(record.layout.trained_model, directory),
        state_dir=name_of(record.layout.root, directory),
    )


def _trust(record: RunRecord) -> Picture:
    settings = record.settings
    return trust_picture(
        method_named(settings.method),
        settings.mechanism,
        is_mixed=settings.mixer,
        has_device_noise=settings.device_noise is not None,
    )


@dataclass(frozen=True, slots=True)
class _Shuffled:
    """The figure that holds while nobody links fragments."""

    epsilon: str
    assumption: str


def _shuffled(record: RunRecord) -> list[_Shuffled]:
    return [
        _Shuffled(upwards(each.epsilon), each.assumptions[0])
        for each in record.columns
        if each.trust is Trust.SHUFFLER
    ]


def _is_without_trust(column: BudgetStatement) -> bool:
    return column.unit is Unit.DEVICE and column.trust is Trust.NONE


def _key_figures(record: RunRecord) -> list[_KeyFigure]:
    accuracy, baseline = record.accuracy_history, record.baseline_history
    without_noise = f"without noise {percent(baseline[-1])}" if baseline else "not run without noise"
    pace = f"{duration(median(record.seconds_by_round))} a round (median)" if record.seconds_by_round else ""
    records = f"about {counted(record.settings.records_per_device, 'record')} each"
    restarts = "no restarts" if record.notes.restarts == 0 else counted(record.notes.restarts, "restart")
    return [
        _KeyFigure(
            "Test accuracy",
            percent(accuracy[-1]) if accuracy else "–",
            f"{without_noise}; always answering the commonest class: "
            f"{percent(record.majority_class_accuracy)}",
        ),
        _KeyFigure(
            f"Privacy spent, for each {record.settings.mechanism.unit}",
            f"ε = {upwards(record.epsilon)}",
            f"of {plain(record.settings.epsilon)}, at δ = {plain(record.settings.delta)}",
        )
        if record.is_private
        else _KeyFigure("Privacy", "none", "nothing is guaranteed"),
        _KeyFigure("Devices", f"{record.settings.devices:,}", f"{records}; {restarts}"),
        _KeyFigure("Rounds", f"{record.settings.rounds:,}", f"{record.settings.schedule} schedule"),
        _KeyFigure("Time", duration(record.notes.seconds), pace),
        _KeyFigure(
            "Traffic of a device",
            f"{size(record.bytes_up)} up",
            f"{size(record.bytes_down)} down; mean of a round",
        ),
        *([] if record.is_virtual else _memory(record)),
    ]


def _memory(record: RunRecord) -> list[_KeyFigure]:
    return [
        _KeyFigure(
            "Agent’s peak memory", mebibytes(record.notes.agent_peak_mib), "the largest of all devices"
        ),
        _KeyFigure(
            "Coordinator’s peak memory",
            mebibytes(record.notes.coordinator_peak_mib),
            f"for {counted(record.parameters, 'parameter')}",
        ),
    ]


def _fragment_figures(record: RunRecord) -> list[_KeyFigure]:
    tally = record.fragments
    return [
        _KeyFigure("charged", f"{tally.charged:,}", "paid for first"),
        _KeyFigure("sent", f"{tally.sent:,}", "left a device"),
        _KeyFigure("counted", f"{tally.counted:,}", "in a sum, once"),
        _KeyFigure("expired", f"{tally.expired:,}", "too late, or never sent"),
        _KeyFigure("lost", f"{tally.lost:,}", "in time, not counted"),
        _KeyFigure("duplicates", f"{tally.duplicates:,}", "seen, not counted"),
        _KeyFigure("rejected", f"{tally.rejected:,}", "failed a check"),
    ]


def _alarms(record: RunRecord) -> list[str]:
    """Warnings that a reader must see first."""
    alarms = []
    broken = [str(budget.device) for budget in record.budgets if not budget.verified]
    if broken:
        which = ", ".join(broken[:MAX_ROWS]) + (" and others" if len(broken) > MAX_ROWS else "")
        alarms.append(f"The ledger did not verify on {counted(len(broken), 'device')}: {which}.")
    if record.is_private and record.epsilon > record.settings.epsilon * (1 + 1e-9):
        alarms.append("The run spent more than its target.")
    if record.fragments.lost:
        alarms.append(
            f"{counted(record.fragments.lost, 'fragment')} lost: sent in time or receipted, but not counted."
        )
    return [*alarms, *record.cautions]


def _some(names: Sequence[str]) -> str:
    """As many names as are read at a glance."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _shows_cap(record: RunRecord) -> bool:
    """Whether the coordinator clamps, and knows what that changes."""
    return record.settings.cap == "clamp" and record.settings.cap_at == "coordinator"


def _cap_effect(record: RunRecord) -> str | None:
    if not record.clamped or not record.kept or record.settings.cap != "clamp":
        return None
    if "device" in record.settings.cap_in_words:
        return "its effect is unknown, because devices do not tell"
    return (
        f"it clamped {fmean(record.clamped):,.0f} of {counted(record.parameters, 'coordinate')} and "
        f"shortened the step to {percent(fmean(record.kept))} of its length in a round, on average"
    )


def _round_rows(record: RunRecord) -> list[tuple[str, ...]]:
    """A row for each round; a dash where its value is missing."""
    rows = itertools.zip_longest(
        map(str, range(1, record.settings.rounds + 1)),
        *([map("{:.3g}".format, record.clip_norms)] if record.clip_norms else []),
        map("{:.3f}".format, record.noise_multipliers),
        map(upwards, record.epsilon_spent),
        (percent(share, 2) for share in record.accuracy_history),
        (percent(share, 2) for share in record.baseline_history),
        *([map("{:,.0f}".format, record.clamped), map(percent, record.kept)] if _shows_cap(record) else []),
        map("{:.1f}".format, record.seconds_by_round),
        fillvalue="–",
    )
    return list(itertools.islice(rows, record.settings.rounds))
