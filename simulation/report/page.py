"""The page of one run, or of one job of a real fleet: the values for its template."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Final

from dpagent.notation import plain_bound, upwards
from dpagent.privacy.methods import method_named
from dpagent.privacy.statement import BudgetStatement, Trust, Unit
from dpagent.wording import counted
from simulation.fleet_job import FleetJobRecord
from simulation.job_record import JobRecord
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


def write_report(record: JobRecord, directory: Path) -> Path:
    """Write the report of a run, or of a fleet's job; see :func:`~simulation.report.rendering.write_page`."""
    return write_page(render_report(record, directory), directory)


def render_report(record: JobRecord, directory: Path) -> str:
    """The page as text. Files beside and below ``directory`` are named relative to it."""
    spent = record.epsilon
    run = record if isinstance(record, RunRecord) else None
    job = record if isinstance(record, FleetJobRecord) else None
    method = method_named(record.settings.method)
    return render(
        "report.html.j2",
        record=record,
        run=run,
        job=job,
        key_figures=_key_figures(record),
        messages=_message_figures(record),
        alarms=_alarms(record),
        pictures=[
            accuracy_picture(record),
            budget_picture(record),
            *([] if run is None or run.is_virtual else [arrivals_picture(run)]),
            *([mixing_picture(run)] if run is not None and run.settings.mixer else []),
            *([] if run is None or run.settings.insecure else [ledgers_picture(run)]),
            *([] if record.is_virtual else [_trust(record)]),
        ],
        linking=who_could_link(record),
        round_rows=_round_rows(record),
        shows_cap=_shows_cap(record),
        epsilon=upwards(spent, of=record.settings.epsilon),
        target=plain_bound(record.settings.epsilon),
        delta=plain_bound(record.settings.delta),
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
        data=_data_rows(record),
        learning_rate=plain(record.settings.learning_rate),
        clipping=(_UPDATE_CLIPPING if method.trains_locally else _CLIPPING)[record.settings.clipping],
        signal_to_noise=None if run is None else f"{run.outlook.signal_to_noise:.2g}",
        rounds=counted(record.settings.rounds, "round"),
        accuracy=None if math.isnan(record.accuracy) else percent(record.accuracy),
        cap_effect=_cap_effect(record),
        model_file=None if run is None else name_of(run.layout.trained_model, directory),
        state_dir=None if run is None else name_of(run.layout.root, directory),
    )


def _trust(record: JobRecord) -> Picture:
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


def _shuffled(record: JobRecord) -> list[_Shuffled]:
    return [
        _Shuffled(upwards(each.epsilon), each.assumptions[0])
        for each in record.columns
        if each.trust is Trust.SHUFFLER
    ]


def _is_without_trust(column: BudgetStatement) -> bool:
    return column.unit is Unit.DEVICE and column.trust is Trust.NONE


def _key_figures(record: JobRecord) -> list[_KeyFigure]:
    baseline = record.baseline_history
    without_noise = f"without noise {percent(baseline[-1])}; " if baseline else ""
    if isinstance(record, RunRecord) and not baseline:
        without_noise = "not run without noise; "
    majority = f"always answering the commonest class: {percent(record.majority_class_accuracy)}"
    records = f"about {counted(round(record.settings.records_per_device), 'record')} each"
    if isinstance(record, RunRecord):
        restarts = record.notes.restarts
        records += "; no restarts" if restarts == 0 else f"; {counted(restarts, 'restart')}"
    done = len(record.epsilon_spent)
    return [
        _KeyFigure("Test accuracy", "–", "not measured: there are no test data")
        if math.isnan(record.majority_class_accuracy)
        else _KeyFigure("Test accuracy", _share(record.accuracy), f"{without_noise}{majority}"),
        _KeyFigure(
            f"Privacy spent, for each {record.settings.mechanism.unit}",
            f"ε = {upwards(record.epsilon, of=record.settings.epsilon)}",
            f"of {plain_bound(record.settings.epsilon)}, at δ = {plain_bound(record.settings.delta)}",
        )
        if record.is_private
        else _KeyFigure("Privacy", "none", "nothing is guaranteed"),
        _KeyFigure("Devices", f"{record.settings.devices:,}", records),
        _KeyFigure(
            "Rounds",
            f"{record.settings.rounds:,}" if isinstance(record, RunRecord) else f"{done:,}",
            f"{record.settings.schedule} schedule"
            if isinstance(record, RunRecord)
            else f"of {record.settings.rounds:,}{_given_up(record)}; {record.settings.schedule} schedule",
        ),
        *(_figures_of_run(record) if isinstance(record, RunRecord) else []),
        *(_figures_of_job(record) if isinstance(record, FleetJobRecord) else []),
    ]


def _given_up(record: JobRecord) -> str:
    if not isinstance(record, FleetJobRecord) or not record.given_up:
        return ""
    return f", {record.given_up:,} given up"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else percent(value)


def _pace(record: JobRecord) -> str:
    return f"{duration(median(record.seconds_by_round))} a round (median)" if record.seconds_by_round else ""


def _figures_of_run(record: RunRecord) -> list[_KeyFigure]:
    return [
        _KeyFigure("Time", duration(record.notes.seconds), _pace(record)),
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


def _figures_of_job(record: FleetJobRecord) -> list[_KeyFigure]:
    figures = [_KeyFigure("Time", duration(sum(record.seconds_by_round)), _pace(record))]
    if record.least_devices:
        figures.append(
            _KeyFigure(
                "Devices in a round",
                f"{min(record.least_devices):,} or more",
                f"in every block; {median(record.least_devices):,.0f} in the median round",
            )
        )
    if record.received:
        figures.append(
            _KeyFigure(
                "Traffic of the coordinator",
                f"{size(fmean(record.received))} in",
                f"{size(fmean(record.published))} out; mean of a round",
            )
        )
    if record.loss_history and not math.isnan(record.loss_history[-1]):
        figures.append(
            _KeyFigure("Test loss", f"{record.loss_history[-1]:.3g}", "mean cross-entropy, in nats")
        )
    return figures


def _message_figures(record: JobRecord) -> list[_KeyFigure]:
    if isinstance(record, FleetJobRecord):
        names = {
            "counted": "in a sum, once", "late": "their round was over", "duplicates": "seen, not counted",
            "dummies": "of boards that sat out", "rejected": "failed a check",
        }  # fmt: skip
        return [_KeyFigure(name, f"{record.messages[name]:,}", text) for name, text in names.items()]
    return _fragment_figures(record) if isinstance(record, RunRecord) else []


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


def _data_rows(record: JobRecord) -> list[tuple[str, str]]:
    if isinstance(record, RunRecord):
        settings, form = record.settings, record.settings.form
        shape = " × ".join(map(str, form.shape))
        return [
            (
                "Data",
                f"{settings.data.name}: records of {shape}, {form.test_records:,} of them for testing; the "
                f"others were dealt to the devices {settings.data.split_in_words}",
            ),
            ("Classes", f"{len(form.labels)}: {_some(form.labels)}"),
        ]
    if isinstance(record, FleetJobRecord):
        tested = (
            f"tested on {counted(record.test_records, 'record')}" if record.test_records else "not tested"
        )
        return [
            ("Data", f"the boards’ own records, which never leave them; the model is {tested}"),
            *([("Classes", f"{len(record.labels)}: {_some(record.labels)}")] if record.labels else []),
        ]
    return []


def _alarms(record: JobRecord) -> list[str]:
    """Warnings that a reader must see first."""
    alarms = []
    budgets = record.budgets if isinstance(record, RunRecord) else ()
    broken = [str(budget.device) for budget in budgets if not budget.verified]
    if broken:
        which = ", ".join(broken[:MAX_ROWS]) + (" and others" if len(broken) > MAX_ROWS else "")
        alarms.append(f"The ledger did not verify on {counted(len(broken), 'device')}: {which}.")
    if record.is_private and record.epsilon > record.settings.epsilon * (1 + 1e-9):
        alarms.append("The run spent more than its target.")
    if isinstance(record, RunRecord) and record.fragments.lost:
        alarms.append(
            f"{counted(record.fragments.lost, 'fragment')} lost: sent in time or receipted, but not counted."
        )
    return [*alarms, *record.cautions]


def _some(names: Sequence[str]) -> str:
    """As many names as are read at a glance."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _shows_cap(record: JobRecord) -> bool:
    """Whether the coordinator clamps, and knows what that changes."""
    return record.settings.cap == "clamp" and record.settings.cap_at == "coordinator"


def _cap_effect(record: JobRecord) -> str | None:
    if not record.clamped or not record.kept or record.settings.cap != "clamp":
        return None
    if "device" in record.settings.cap_in_words:
        return "its effect is unknown, because devices do not tell"
    return (
        f"it clamped {fmean(record.clamped):,.0f} of {counted(record.parameters, 'coordinate')} and "
        f"shortened the step to {percent(fmean(record.kept))} of its length in a round, on average"
    )


def _round_rows(record: JobRecord) -> list[tuple[str, ...]]:
    """A row for each round that closed, and of a run for those that did not; a dash where its value is
    missing."""
    numbers = record.numbers
    if isinstance(record, RunRecord):
        numbers = (*numbers, *range(record.last_round + 1, record.settings.rounds + 1))
    rows = itertools.zip_longest(
        map(str, numbers),
        *([map("{:.3g}".format, record.clip_norms)] if record.clip_norms else []),
        map("{:.3f}".format, record.noise_multipliers),
        map(upwards, record.epsilon_spent),
        ("–" if math.isnan(share) else percent(share, 2) for share in record.accuracy_history),
        *(
            [(percent(share, 2) for share in record.baseline_history)]
            if isinstance(record, RunRecord)
            else []
        ),
        *([map("{:,.0f}".format, record.clamped), map(percent, record.kept)] if _shows_cap(record) else []),
        map("{:.1f}".format, record.seconds_by_round),
        fillvalue="–",
    )
    return list(itertools.islice(rows, len(numbers)))
